package trace

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"

	vnetlink "github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
	"kproxy.dev/kproxy/conntrack"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/netlink"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/trace/netfilter"
)

// hostState holds what a trace reads of this host. The functions are the seam between
// following a packet and reading the kernel.
type hostState struct {
	addresses   addresses
	route       func(query) route
	walk        func(netfilter.Packet, netfilter.Hook, netfilter.Span) *netfilter.Walk
	rules       func(table, chain string) []string // of iptables
	listener    func(service.Protocol, netip.AddrPort) (listener, bool, error)
	disabled    func(service.Family) string                // the setting that switches a family off; empty if none does
	stopped     func(socket uint32) (pid int, name string) // the process that has it; 0 if it runs, or isn't seen
	forwarding  func(f service.Family, in string) string   // the setting that keeps packets from being forwarded
	reversePath func(from netip.Addr, in string, mark uint32) reversePath
	conntrack   func() (count, limit int, err error)
	// sets lists kproxy's sets with their entries.
	sets func(names func(string) bool) ([]kernel.SetState, error)
	// What is behind the routing decision.
	hop            func(*route) (hop, error)
	hops           func(*route) []nextHop // that connections are spread over; nil for the one that the route has
	uplink         func(service.Family) string
	byPorts        bool // rules of routing look at protocols or ports
	throughDefault func(query) bool
	linksDown      func() []string
	programs       func(link string) []Finding // of eBPF, that get packets where netfilter doesn't
	neighbours     func() (neighbourhood, error)
	// bridge reads a link; nil if its packets pass no bridge, or there are no rules but those of IP.
	bridge func(link string) *bridge
	// visit runs f in another network namespace of this host, with what is there.
	visit func(path string, f func(*hostState)) error

	notes []string // of what couldn't be read
	close func()
}

// readHost reads what all packets of a family meet. The functions work in the network
// namespace of the calling thread.
func readHost(ctx context.Context, f service.Family, proxy *Proxy) (*hostState, error) {
	own, err := localAddresses()
	if err != nil {
		return nil, err
	}
	sets, err := kernel.OpenIPSets()
	if err != nil {
		return nil, fmt.Errorf("read sets: %w", err)
	}
	c := netfilter.DefaultConfig()
	c.Sets, c.Host = sets, matchHost{}
	if proxy != nil && proxy.Variant.Name != "" {
		c.Variant = proxy.Variant
	} // else the host's own; the other one is read as well
	tables, err := netfilter.Read(ctx, c, f)
	if err != nil {
		sets.Close()
		return nil, fmt.Errorf("read the rules of netfilter: %w", err)
	}
	return &hostState{
		addresses: own, route: askRoute, walk: tables.Walk, rules: tables.Rules, listener: listenerFor, stopped: stoppedOwner, disabled: disabled,
		forwarding: forwardingOff, reversePath: checkReversePath, conntrack: conntrack.Use, notes: tables.Notes,
		hop: readHop, hops: nextHops, uplink: uplink, byPorts: rulesByPorts(f), throughDefault: throughDefault, linksDown: linksDown,
		programs: func(link string) []Finding { return programsOn(link, f) },
		bridge: func(link string) *bridge {
			if !tables.BelowIP() {
				return nil
			}
			return readBridge(link, f)
		},
		neighbours: sync.OnceValues(func() (neighbourhood, error) { return neighbours(spaces()) }),
		visit:      func(path string, g func(*hostState)) error { return visit(ctx, f, path, g) },
		sets:       sets.List, close: sets.Close,
	}, nil
}

// visit runs f in the network namespace at path, with what packets of a family meet there. The only neighbours there are those
// of the calling thread's namespace.
func visit(ctx context.Context, family service.Family, path string, f func(*hostState)) error {
	here, err := os.Open(ownSpace)
	if err != nil {
		return err
	}
	defer here.Close()
	return inside(path, func() error {
		s, err := readHost(ctx, family, nil)
		if err != nil {
			return err
		}
		defer s.close()
		s.neighbours = sync.OnceValues(func() (neighbourhood, error) {
			return neighbours([]space{{path: fmt.Sprintf("/proc/self/fd/%d", here.Fd())}})
		})
		f(s)
		return nil
	})
}

// local reports whether an address is this node's own.
func (s *hostState) local(a netip.Addr) bool {
	_, ok := s.addresses.links[a]
	return ok || a.IsLoopback()
}

// matchHost answers what rules ask about the host (netfilter.Host).
type matchHost struct{}

// AddressType implements netfilter.Host by asking for a route, as the match
// addrtype does (inet_addr_type in net/ipv4/fib_frontend.c).
func (matchHost) AddressType(a netip.Addr) (string, error) {
	if a.IsMulticast() {
		return "MULTICAST", nil
	}
	r := askRoute(query{to: a})
	if r.err != nil {
		return "UNICAST", nil // xt_addrtype: what has no route is unicast
	}
	switch r.kind {
	case unix.RTN_LOCAL:
		return "LOCAL", nil
	case unix.RTN_BROADCAST:
		return "BROADCAST", nil
	case unix.RTN_UNICAST:
		return "UNICAST", nil
	}
	return "", fmt.Errorf("find type of address %s: its route is of type %s", a, routeKinds[r.kind])
}

// InterfaceAddress implements netfilter.Host: the first address of a link, which
// REDIRECT takes (nf_nat_redirect_ipv4 in net/netfilter/nf_nat_redirect.c).
func (matchHost) InterfaceAddress(name string, f service.Family) (netip.Addr, error) {
	return linkAddress(name, f)
}

// MasqueradeAddress implements netfilter.Host: the source that the kernel would
// choose towards dst by that link.
func (matchHost) MasqueradeAddress(out string, dst netip.Addr) (netip.Addr, error) {
	r := askRoute(query{to: dst})
	if r.err == nil && r.link == out && r.source.IsValid() {
		return r.source, nil
	}
	return linkAddress(out, service.FamilyOf(dst))
}

// Listens implements netfilter.Host.
func (matchHost) Listens(proto service.Protocol, a netip.AddrPort) (netfilter.Socket, error) {
	l, ok, err := listenerFor(proto, a)
	return netfilter.Socket{Found: ok, Wildcard: l.address.Addr().IsUnspecified(), Transparent: l.transparent}, err
}

// query is a packet as the routing decision sees it.
type query struct {
	to, from netip.Addr // from may be the zero Addr
	in       string     // interface it came in on; empty for this node's own
	mark     uint32

	protocol     service.Protocol // 0: rules of routing don't look at it, nor at the ports
	sport, dport uint16
}

// query asks for a packet's route.
func (s *hostState) query(p *netfilter.Packet) query {
	q := query{to: p.Dst.Addr(), from: p.Src.Addr(), in: p.In, mark: p.Mark}
	if s.byPorts {
		q.protocol, q.sport, q.dport = p.Protocol, p.Src.Port(), p.Dst.Port()
	}
	return q
}

// rulesByPorts reports whether a rule of routing looks at protocols or ports.
func rulesByPorts(f service.Family) bool {
	rules, _ := vnetlink.RuleList(netlinkFamily(f))
	return slices.ContainsFunc(rules, func(r vnetlink.Rule) bool { return r.IPProto != 0 || r.Sport != nil || r.Dport != nil })
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
	answer, err := q.ask()
	if err != nil {
		r.err = err
		return r
	}
	r.kind = int(nl.DeserializeRtMsg(answer).Type)
	for kind, value := range netlink.Attributes(answer[unix.SizeofRtMsg:]) {
		switch kind {
		case unix.RTA_TABLE:
			r.table = int(binary.NativeEndian.Uint32(value))
		case unix.RTA_PREFSRC:
			r.source = addrOf(value)
		case unix.RTA_GATEWAY:
			r.via = addrOf(value)
		case unix.RTA_VIA: // a gateway of the other family, behind its number
			r.via = addrOf(value[2:])
		case unix.RTA_METRICS:
			for metric, n := range netlink.Attributes(value) {
				if metric == unix.RTAX_MTU {
					r.mtu = int(binary.NativeEndian.Uint32(n))
				}
			}
		case unix.RTA_OIF:
			if link, err := vnetlink.LinkByIndex(int(binary.NativeEndian.Uint32(value))); err == nil {
				r.link = link.Attrs().Name
			}
		}
	}
	return r
}

// ask returns the kernel's answer: a struct rtmsg with its attributes.
func (q query) ask() ([]byte, error) {
	const protocol, sport, dport = 27, 28, 29 // RTA_IP_PROTO and the next (include/uapi/linux/rtnetlink.h, since Linux 4.18)
	request := nl.NewNetlinkRequest(unix.RTM_GETROUTE, 0)
	m := &nl.RtMsg{}
	m.Family, m.Dst_len, m.Flags = uint8(netlinkFamily(service.FamilyOf(q.to))), uint8(q.to.BitLen()), unix.RTM_F_LOOKUP_TABLE
	request.AddData(m)
	add := func(kind int, value ...byte) { request.AddData(nl.NewRtAttr(kind, value)) }
	add(unix.RTA_DST, q.to.AsSlice()...)
	if q.from.IsValid() {
		m.Src_len = uint8(q.from.BitLen())
		add(unix.RTA_SRC, q.from.AsSlice()...)
	}
	if q.in != "" {
		link, err := vnetlink.LinkByName(q.in)
		if err != nil {
			return nil, err
		}
		add(unix.RTA_IIF, nl.Uint32Attr(uint32(link.Attrs().Index))...)
	}
	add(unix.RTA_MARK, nl.Uint32Attr(q.mark)...)
	if q.protocol != 0 {
		add(protocol, byte(q.protocol))
		add(sport, binary.BigEndian.AppendUint16(nil, q.sport)...)
		add(dport, binary.BigEndian.AppendUint16(nil, q.dport)...)
	}
	answers, err := request.Execute(unix.NETLINK_ROUTE, unix.RTM_NEWROUTE)
	if err == nil && len(answers) == 0 {
		err = unix.ENETUNREACH
	}
	if err != nil {
		return nil, err
	}
	return answers[0], nil
}

// nextHop is one of those that a route has.
type nextHop struct {
	link  string
	via   netip.Addr
	share float64
}

// nextHops returns the next hops that connections by a route are spread over by their ports; nil where there is one, or where the
// addresses decide, so that the route already has the hop of this client (fib_multipath_hash in net/ipv4/route.c).
func nextHops(r *route) (out []nextHop) {
	family := map[bool]string{true: "ipv4", false: "ipv6"}[r.to.Is4()]
	if policy, _ := kernel.ReadSysctl("net", family, "fib_multipath_hash_policy"); policy != 1 {
		return nil
	}
	o := &vnetlink.RouteGetOptions{Iif: r.in, Mark: r.mark, FIBMatch: true}
	if r.from.IsValid() {
		o.SrcAddr = r.from.AsSlice()
	}
	found, err := vnetlink.RouteGetWithOptions(r.to.AsSlice(), o)
	if err != nil || len(found) == 0 {
		return nil
	}
	total := 0
	for _, h := range found[0].MultiPath {
		if h.Flags&(unix.RTNH_F_DEAD|unix.RTNH_F_LINKDOWN) != 0 { // the kernel leaves it out
			continue
		}
		link, err := vnetlink.LinkByIndex(h.LinkIndex)
		if err != nil {
			continue
		}
		total += h.Hops + 1
		out = append(out, nextHop{link.Attrs().Name, addrOf(h.Gw), float64(h.Hops + 1)})
	}
	for i := range out {
		out[i].share /= float64(total)
	}
	return out
}

// uplink returns the link of the default route in the main table; empty if there is none.
func uplink(f service.Family) string {
	routes, _ := vnetlink.RouteList(nil, netlinkFamily(f)) // of that table
	for i := range routes {
		if link, err := vnetlink.LinkByIndex(routes[i].LinkIndex); isDefault(&routes[i]) && err == nil {
			return link.Attrs().Name
		}
	}
	return ""
}

func netlinkFamily(f service.Family) int {
	return [2]int{service.IPv4: vnetlink.FAMILY_V4, service.IPv6: vnetlink.FAMILY_V6}[f]
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
	text := strings.TrimPrefix(routeKinds[r.kind]+" "+r.to.String(), " ") + clause("via", r.via, r.via.IsValid()) +
		clause("dev", r.link, r.link != "") + clause("src", r.source, r.source.IsValid())
	return text + clause("table", r.table, r.table != unix.RT_TABLE_MAIN && r.table != unix.RT_TABLE_LOCAL && r.table != 0)
}

// command is the command that asks the same.
func (r *route) command() string {
	return "ip route get " + r.to.String() + clause("from", r.from, r.from.IsValid()) + clause("iif", r.in, r.in != "") +
		clause("mark", fmt.Sprintf("%#x", r.mark), r.mark != 0) + clause("ipproto", fmt.Sprintf("%s sport %d dport %d", r.protocol, r.sport, r.dport), r.protocol != 0)
}

// clause is a word of ip's with its value, where there is one.
func clause(word string, value any, there bool) string {
	if !there {
		return ""
	}
	return fmt.Sprintf(" %s %v", word, value)
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

// refusal returns what becomes of a packet that is to be forwarded and has no route:
// Refused where the kernel tells its sender by ICMP, Dropped for a blackhole (ip_error in
// net/ipv4/route.c, ip6_pkt_drop in net/ipv6/route.c) and whatever else fails.
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
	links, err := vnetlink.LinkList()
	if err != nil {
		return addresses{}, fmt.Errorf("list links: %w", err)
	}
	names := make(map[int]string, len(links))
	for _, l := range links {
		names[l.Attrs().Index] = l.Attrs().Name
	}
	addrs, err := vnetlink.AddrList(nil, vnetlink.FAMILY_ALL)
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

// someAddress is an address of the calling thread's network namespace that others may know; invalid if there is none.
func someAddress(f service.Family) netip.Addr {
	all, _ := vnetlink.AddrList(nil, netlinkFamily(f))
	for _, a := range all {
		if at := addrOf(a.IP); at.IsGlobalUnicast() {
			return at
		}
	}
	return netip.Addr{}
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

// together reports whether two addresses are in one network of a link.
func (a *addresses) together(link string, one, other netip.Addr) bool {
	return slices.ContainsFunc(a.networks, func(n network) bool { return n.link == link && n.Contains(one) && n.Contains(other) })
}

// linkAddress is a link's first address that other hosts can use.
func linkAddress(name string, f service.Family) (netip.Addr, error) {
	link, err := vnetlink.LinkByName(name)
	if err != nil {
		return netip.Addr{}, fmt.Errorf("look at link %s: %w", name, err)
	}
	addrs, err := vnetlink.AddrList(link, netlinkFamily(f))
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

// settingName spells a setting as sysctl(8) does, which writes a dot in a name as
// a slash.
func settingName(parts ...string) string {
	out := make([]string, len(parts))
	for i, p := range parts {
		out[i] = strings.ReplaceAll(p, ".", "/")
	}
	return strings.Join(out, ".")
}

// forwardingOff returns the setting that keeps packets which came in on an
// interface from being forwarded; empty if none does. IPv4 goes by the
// interface's own setting (IN_DEV_FORWARD in net/ipv4/route.c), IPv6 by that for
// all (ip6_forward in net/ipv6/ip6_output.c), since Linux 6.17 also by
// force_forwarding of the interface.
func forwardingOff(f service.Family, in string) string {
	if f == service.IPv6 {
		if n, ok := kernel.ReadSysctl("net", "ipv6", "conf", "all", "forwarding"); ok && n == 0 {
			if n, ok := kernel.ReadSysctl("net", "ipv6", "conf", in, "force_forwarding"); !ok || n == 0 {
				return "net.ipv6.conf.all.forwarding"
			}
		}
		return ""
	}
	if n, ok := kernel.ReadSysctl("net", "ipv4", "ip_forward"); ok && n == 0 {
		if n, ok := kernel.ReadSysctl("net", "ipv4", "conf", in, "forwarding"); !ok || n == 0 {
			return "net.ipv4.ip_forward"
		}
	}
	if n, ok := kernel.ReadSysctl("net", "ipv4", "conf", in, "forwarding"); ok && n == 0 {
		return settingName("net", "ipv4", "conf", in, "forwarding")
	}
	return ""
}

// disabled returns the setting that switches IPv6 off on all links, or on one; empty if none does.
func disabled(f service.Family) string {
	if f != service.IPv6 {
		return ""
	}
	links, _ := vnetlink.LinkList()
	names := []string{"all"}
	for _, l := range links {
		names = append(names, l.Attrs().Name)
	}
	for _, name := range names {
		if n, ok := kernel.ReadSysctl("net", "ipv6", "conf", name, "disable_ipv6"); ok && n != 0 {
			return settingName("net", "ipv6", "conf", name, "disable_ipv6")
		}
	}
	return ""
}

// reversePath holds what the reverse path filter says to a source address
// (fib_validate_source in net/ipv4/fib_frontend.c). IPv6 has such a filter only
// as a rule of iptables.
type reversePath struct {
	mode    int    // 0 off, 1 strict, 2 loose: the greater of all's and the interface's
	setting string // that decides
	marked  string // the setting that has the look-up go by the packet's mark; empty if none does
	back    route  // to the source
	refused bool
}

// checkReversePath checks whether a source address may come in on an interface.
func checkReversePath(from netip.Addr, in string, mark uint32) reversePath {
	if service.FamilyOf(from) == service.IPv6 {
		return reversePath{}
	}
	var r reversePath
	for _, conf := range []string{in, "all"} {
		if n, ok := kernel.ReadSysctl("net", "ipv4", "conf", conf, "rp_filter"); ok && n > r.mode {
			r.mode, r.setting = n, settingName("net", "ipv4", "conf", conf, "rp_filter")
		}
	}
	for _, conf := range []string{in, "all"} {
		if n, _ := kernel.ReadSysctl("net", "ipv4", "conf", conf, "src_valid_mark"); n != 0 && mark != 0 {
			r.marked = settingName("net", "ipv4", "conf", conf, "src_valid_mark")
		}
	}
	if r.marked == "" {
		mark = 0
	}
	if r.mode == 0 && mark == 0 {
		return r
	}
	r.back = askRoute(query{to: from, mark: mark})
	if r.mode == 0 { // rules of routing make the kernel look all the same, and an address of its own is no source
		r.refused = r.back.err == nil && r.back.kind != unix.RTN_UNICAST
		return r
	}
	r.refused = r.back.err != nil || r.back.kind != unix.RTN_UNICAST || r.mode == 1 && r.back.link != in
	return r
}

// remedy is for packets that it refuses.
func (r *reversePath) remedy() string {
	if r.marked != "" {
		return fmt.Sprintf("look the source up without the mark: sysctl -w %s=0", r.marked)
	}
	return fmt.Sprintf("mend the route back, or make the filter loose: sysctl -w %s=2", r.setting)
}

func (r *reversePath) String() string {
	if r.marked != "" {
		return r.marked + " = 1"
	}
	name := map[int]string{0: "off", 1: "strict", 2: "loose"}[r.mode]
	return fmt.Sprintf("%s = %d (%s)", r.setting, r.mode, name)
}

// martian says why an address can't be the source of a packet from another host
// (ip_route_input_slow in net/ipv4/route.c); empty if it can.
func martian(from netip.Addr) string {
	switch {
	case from.IsLoopback():
		return "loopback addresses mean nothing to other hosts"
	case from.IsMulticast():
		return "a multicast address is no host's"
	case from == netip.AddrFrom4([4]byte{255, 255, 255, 255}):
		return "the broadcast address is no host's"
	case from.IsUnspecified():
		return "it is no address"
	}
	return ""
}

// listener is a socket that waits for connections or datagrams.
type listener struct {
	address             netip.AddrPort
	v6only, transparent bool
	waiting, queue      uint32 // connections that it hasn't accepted, and how many may wait
	inode               uint32
}

// sockets that wait: a UDP socket that isn't connected is in TCP_CLOSE
// (include/net/tcp_states.h).
const (
	tcpListen = 10
	tcpClose  = 7
)

// Attributes of sockets, and bits of the last (include/uapi/linux/inet_diag.h; since Linux 5.10).
const (
	inetDiagSKV6Only   = 11
	inetDiagSockopt    = 22
	sockoptTransparent = 1 << 5
)

// listenersOn returns the sockets that wait on a port (sock_diag(7)), asking only
// for those: a host has many sockets.
func listenersOn(proto service.Protocol, port uint16) (out []listener, err error) {
	states := uint32(1 << tcpListen)
	if proto == service.UDP {
		states = 1 << tcpClose
	}
	s, err := netlink.Open(unix.NETLINK_SOCK_DIAG, 64<<10)
	if err != nil {
		return nil, fmt.Errorf("list sockets that listen: %w", err)
	}
	defer s.Close()
	for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		request := [56]byte{0: family, 1: uint8(proto)} // struct inet_diag_req_v2
		binary.NativeEndian.PutUint32(request[4:], states)
		binary.BigEndian.PutUint16(request[8:], port) // id.idiag_sport limits a dump
		if err := s.Dump(func(b []byte) []byte {
			return append(netlink.AppendRequest(b, unix.SOCK_DIAG_BY_FAMILY, unix.NLM_F_DUMP), request[:]...)
		}, func(m []byte) {
			if l, ok := parseListener(m); ok && l.address.Port() == port {
				out = append(out, l)
			}
		}); err != nil {
			return nil, fmt.Errorf("list sockets that listen: %w", err)
		}
	}
	return out, nil
}

// parseListener reads a struct inet_diag_msg with its attributes.
func parseListener(m []byte) (listener, bool) {
	const size = 72
	if len(m) < size {
		return listener{}, false
	}
	raw := m[8:12]
	if m[0] == unix.AF_INET6 {
		raw = m[8:24]
	}
	a, _ := netip.AddrFromSlice(raw)
	l := listener{address: netip.AddrPortFrom(a, binary.BigEndian.Uint16(m[4:])),
		waiting: binary.NativeEndian.Uint32(m[56:]), queue: binary.NativeEndian.Uint32(m[60:]), inode: binary.NativeEndian.Uint32(m[68:])}
	for kind, value := range netlink.Attributes(m[size:]) {
		l.v6only = l.v6only || kind == inetDiagSKV6Only && len(value) > 0 && value[0] != 0
		l.transparent = l.transparent || kind == inetDiagSockopt && len(value) > 0 && value[0]&sockoptTransparent != 0
	}
	return l, true
}

// takes reports whether l would get what is sent to an address.
func (l *listener) takes(a netip.Addr) bool {
	at := l.address.Addr()
	if !at.IsUnspecified() {
		return at.Unmap() == a
	}
	return at.Is4() == a.Is4() || at.Is6() && !l.v6only
}

// listenerFor returns the socket that gets what is sent to a local address.
func listenerFor(proto service.Protocol, to netip.AddrPort) (listener, bool, error) {
	all, err := listenersOn(proto, to.Port())
	var wild *listener
	for i := range all {
		switch l := &all[i]; {
		case !l.takes(to.Addr()):
		case !l.address.Addr().IsUnspecified():
			return *l, true, nil
		case wild == nil:
			wild = l
		}
	}
	if wild != nil {
		return *wild, true, nil
	}
	return listener{}, false, err
}

// stoppedOwner returns the process that has a socket, by its inode, if all that have it are stopped (SIGSTOP); 0 if one
// runs, or none is seen.
func stoppedOwner(inode uint32) (pid int, name string) {
	if inode == 0 {
		return 0, ""
	}
	owners := func(stopped bool) (pid int, name string) {
		processes, _ := filepath.Glob("/proc/[0-9]*")
		for _, p := range processes {
			stat, _ := os.ReadFile(p + "/stat") // "7 (a name) T …"
			i := bytes.LastIndexByte(stat, ')')
			if i < 0 || i+2 >= len(stat) || (stat[i+2] == 'T') != stopped {
				continue
			}
			descriptors, _ := os.ReadDir(p + "/fd")
			for _, d := range descriptors {
				if to, err := os.Readlink(p + "/fd/" + d.Name()); err == nil && to == fmt.Sprintf("socket:[%d]", inode) {
					pid, _ = strconv.Atoi(filepath.Base(p))
					return pid, string(stat[bytes.IndexByte(stat, '(')+1 : i])
				}
			}
		}
		return 0, ""
	}
	if pid, name = owners(true); pid != 0 {
		if runs, _ := owners(false); runs != 0 {
			return 0, ""
		}
	}
	return pid, name
}
