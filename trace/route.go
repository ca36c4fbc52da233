package trace

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"kproxy.dev/kproxy/service"
)

// query is a packet as the routing decision sees it.
type query struct {
	to, from netip.Addr // from may be the zero Addr
	in       string     // interface it came in on; empty for this node's own
	mark     uint32
}

// route is the kernel's answer to a query.
type route struct {
	query
	link   string // it leaves by
	via    netip.Addr
	source netip.Addr // that the kernel would choose
	mtu    int        // 0 for the link's
	table  int
	kind   int // RTN_*
	err    error
}

// local reports whether the packet is delivered to this node.
func (r *route) local() bool { return r.err == nil && r.kind == unix.RTN_LOCAL }

// passes reports whether the packet goes on, to this node or to another host.
func (r *route) passes() bool {
	return r.err == nil && (r.kind == unix.RTN_LOCAL || r.kind == unix.RTN_UNICAST)
}

// askRoute asks the kernel for a route (RTM_GETROUTE), as ip route get does.
func askRoute(q query) route {
	r := route{query: q}
	o := &netlink.RouteGetOptions{Iif: q.in, Mark: q.mark}
	if q.from.IsValid() {
		o.SrcAddr = q.from.AsSlice()
	}
	found, err := netlink.RouteGetWithOptions(q.to.AsSlice(), o)
	if err == nil && len(found) == 0 {
		err = unix.ENETUNREACH
	}
	if err != nil {
		r.err = err
		return r
	}
	f := &found[0]
	r.kind, r.table, r.mtu = f.Type, f.Table, f.MTU
	r.via, r.source = addrOf(f.Gw), addrOf(f.Src)
	if via, ok := f.Via.(*netlink.Via); ok && !r.via.IsValid() {
		r.via = addrOf(via.Addr)
	}
	if link, err := netlink.LinkByIndex(f.LinkIndex); err == nil {
		r.link = link.Attrs().Name
	}
	return r
}

func addrOf(b []byte) netip.Addr {
	a, _ := netip.AddrFromSlice(b)
	return a.Unmap()
}

// kinds of routes as ip prints them (include/uapi/linux/rtnetlink.h).
var routeKinds = map[int]string{
	unix.RTN_LOCAL: "local", unix.RTN_BROADCAST: "broadcast", unix.RTN_ANYCAST: "anycast", unix.RTN_MULTICAST: "multicast",
	unix.RTN_BLACKHOLE: "blackhole", unix.RTN_UNREACHABLE: "unreachable", unix.RTN_PROHIBIT: "prohibit", unix.RTN_THROW: "throw",
}

// String is the question and the answer, as ip route get has them.
func (r *route) String() string {
	if r.err != nil {
		return fmt.Sprintf("%s: %s", r.command(), r.failure())
	}
	var b strings.Builder
	if k := routeKinds[r.kind]; k != "" {
		b.WriteString(k + " ")
	}
	b.WriteString(r.to.String())
	if r.via.IsValid() {
		fmt.Fprintf(&b, " via %s", r.via)
	}
	if r.link != "" {
		fmt.Fprintf(&b, " dev %s", r.link)
	}
	if r.source.IsValid() {
		fmt.Fprintf(&b, " src %s", r.source)
	}
	if r.table != unix.RT_TABLE_MAIN && r.table != unix.RT_TABLE_LOCAL && r.table != 0 {
		fmt.Fprintf(&b, " table %d", r.table)
	}
	return b.String()
}

// command is the command that asks the same.
func (r *route) command() string {
	var b strings.Builder
	fmt.Fprintf(&b, "ip route get %s", r.to)
	if r.from.IsValid() {
		fmt.Fprintf(&b, " from %s", r.from)
	}
	if r.in != "" {
		fmt.Fprintf(&b, " iif %s", r.in)
	}
	if r.mark != 0 {
		fmt.Fprintf(&b, " mark %#x", r.mark)
	}
	return b.String()
}

// failure says in a few words why there is no way.
func (r *route) failure() string {
	switch {
	case r.err == nil:
		return "the route is of type " + routeKinds[r.kind]
	case errors.Is(r.err, unix.ENETUNREACH):
		return "there is no route"
	case errors.Is(r.err, unix.EHOSTUNREACH):
		return "the route is of type unreachable, or the host doesn't forward"
	case errors.Is(r.err, unix.EACCES):
		return "the route is of type prohibit"
	case errors.Is(r.err, unix.EXDEV):
		return "the reverse path filter refuses the source"
	case errors.Is(r.err, unix.EINVAL) && r.from.IsLoopback() && !r.to.IsLoopback():
		return "a loopback address can't be the source of what leaves this node"
	case errors.Is(r.err, unix.EINVAL) && r.in == "":
		return "the route is of type blackhole"
	}
	return fmt.Sprintf("the kernel refuses it (%v)", r.err)
}

// refusal is what becomes of a packet that is to be forwarded and has no route: the
// kernel says so to its sender by ICMP, but for a blackhole (ip_error in net/ipv4/route.c,
// ip6_pkt_drop in net/ipv6/route.c).
func (r *route) refusal() Verdict {
	if errors.Is(r.err, unix.ENETUNREACH) || errors.Is(r.err, unix.EHOSTUNREACH) || errors.Is(r.err, unix.EACCES) ||
		r.err == nil && (r.kind == unix.RTN_UNREACHABLE || r.kind == unix.RTN_PROHIBIT) {
		return Refused
	}
	return Dropped
}

// addresses are this node's own.
type addresses struct {
	links    map[netip.Addr]string // by address
	networks []network             // directly connected
}

// network is a network that a link is in.
type network struct {
	netip.Prefix
	link string
}

func localAddresses() (addresses, error) {
	links, err := netlink.LinkList()
	if err != nil {
		return addresses{}, fmt.Errorf("list links: %w", err)
	}
	names := make(map[int]string, len(links))
	for _, l := range links {
		names[l.Attrs().Index] = l.Attrs().Name
	}
	addrs, err := netlink.AddrList(nil, netlink.FAMILY_ALL)
	if err != nil {
		return addresses{}, fmt.Errorf("list addresses: %w", err)
	}
	out := addresses{links: make(map[netip.Addr]string, len(addrs))}
	for _, a := range addrs {
		if a.IPNet == nil {
			continue
		}
		at, link := addrOf(a.IP), names[a.LinkIndex]
		out.links[at] = link
		if bits, _ := a.Mask.Size(); bits < at.BitLen() && !at.IsLoopback() {
			out.networks = append(out.networks, network{netip.PrefixFrom(at, bits).Masked(), link})
		}
	}
	return out, nil
}

// linkTo returns the link whose network an address is in; empty if none is.
func (a *addresses) linkTo(to netip.Addr) string {
	best := network{}
	for _, n := range a.networks {
		if n.Contains(to) && n.Bits() >= best.Bits() {
			best = n
		}
	}
	return best.link
}

// linkAddress is a link's first address that other hosts can use.
func linkAddress(name string, f service.Family) (netip.Addr, error) {
	link, err := netlink.LinkByName(name)
	if err != nil {
		return netip.Addr{}, fmt.Errorf("look at link %s: %w", name, err)
	}
	family := netlink.FAMILY_V4
	if f == service.IPv6 {
		family = netlink.FAMILY_V6
	}
	addrs, err := netlink.AddrList(link, family)
	if err != nil {
		return netip.Addr{}, fmt.Errorf("list addresses of %s: %w", name, err)
	}
	for _, a := range addrs {
		if at := addrOf(a.IP); !at.IsLinkLocalUnicast() {
			return at, nil
		}
	}
	return netip.Addr{}, fmt.Errorf("link %s has no %s address", name, f)
}
