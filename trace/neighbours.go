package trace

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"kproxy.dev/kproxy/health"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/trace/netfilter"
)

// hop holds what is known of the way to the next host: the link, and the neighbour
// that packets are addressed to on it.
type hop struct {
	to        netip.Addr // the neighbour
	link      string
	down      bool // it was set down
	carrier   bool
	empty     bool // it is a bridge without ports
	mtu       int
	silent    bool // ARP is off on it, so that only entries that are there already are right (arp_constructor in net/ipv4/arp.c)
	neighbour int  // NUD_*; 0: nothing is known yet, and the kernel will ask
	mac       string
}

// readHop reads the link that a route leaves by, and its neighbour there.
func readHop(r *route) (hop, error) {
	h := hop{to: r.to, link: r.link}
	if r.via.IsValid() {
		h.to = r.via
	}
	link, err := netlink.LinkByName(r.link)
	if err != nil {
		return h, fmt.Errorf("look at link %s: %w", r.link, err)
	}
	a := link.Attrs()
	h.down, h.mtu = a.RawFlags&unix.IFF_UP == 0, a.MTU
	h.carrier, h.silent = a.RawFlags&unix.IFF_LOWER_UP != 0, a.RawFlags&unix.IFF_NOARP != 0
	if r.mtu > 0 && r.mtu < h.mtu {
		h.mtu = r.mtu
	}
	if link.Type() == "bridge" {
		links, err := netlink.LinkList()
		h.empty = err == nil && !slices.ContainsFunc(links, func(l netlink.Link) bool { return l.Attrs().MasterIndex == a.Index })
	}
	all, err := netlink.NeighList(a.Index, netlinkFamily(service.FamilyOf(h.to)))
	if err != nil {
		return h, fmt.Errorf("list neighbours on %s: %w", r.link, err)
	}
	for _, n := range all {
		if addrOf(n.IP) == h.to {
			h.neighbour, h.mac = n.State, n.HardwareAddr.String()
		}
	}
	return h, nil
}

// linksDown are the links that were set down, which takes their routes with them.
func linksDown() []string {
	links, _ := netlink.LinkList()
	var out []string
	for _, l := range links {
		if a := l.Attrs(); a.RawFlags&unix.IFF_UP == 0 && a.EncapType != "loopback" && !slices.Contains(neverUp, l.Type()) {
			out = append(out, a.Name)
		}
	}
	return out
}

// programsOn names the eBPF programs, filters and emulated networks that get a link's packets of a family before netfilter or behind
// it. They aren't followed, but those that drop all are errors.
func programsOn(name string, f service.Family) (out []Finding) {
	link, err := netlink.LinkByName(name)
	if err != nil {
		return nil
	}
	note := func(drops bool, what, remedy string) {
		severity, does := SeverityNote, "what it does with packets isn't followed"
		if drops {
			severity, does = SeverityError, "it drops them all"
		}
		out = append(out, Finding{severity, fmt.Sprintf("%s of link %s: %s", what, name, does), "link " + name, remedy})
	}
	if x := link.Attrs().Xdp; x != nil && x.Attached {
		note(false, fmt.Sprintf("XDP program %d gets the packets", x.ProgId), fmt.Sprintf("bpftool prog show id %d tells whose it is", x.ProgId))
	}
	for i, parent := range []uint32{netlink.HANDLE_MIN_INGRESS, netlink.HANDLE_MIN_EGRESS} {
		if filters, err := netlink.FilterList(link, parent); err == nil && len(filters) > 0 {
			side := [...]string{"ingress", "egress"}[i]
			note(dropsAll(filters, f), fmt.Sprintf("a filter of tc (%s) gets the packets", side), fmt.Sprintf("tc filter show dev %s %s", name, side))
		}
	}
	disciplines, _ := netlink.QdiscList(link)
	for _, q := range disciplines {
		if q, ok := q.(*netlink.Netem); ok {
			note(q.Loss == math.MaxUint32 && q.Parent == netlink.HANDLE_ROOT, "netem delays, loses or changes the packets", "tc qdisc show dev "+name)
		}
	}
	return out
}

// dropsAll reports whether the first of tc's filters that gets a family's packets matches and drops them all.
func dropsAll(filters []netlink.Filter, f service.Family) bool {
	types := []uint16{unix.ETH_P_ALL, [2]uint16{service.IPv4: unix.ETH_P_IP, service.IPv6: unix.ETH_P_IPV6}[f]}
	i := slices.IndexFunc(filters, func(x netlink.Filter) bool { return slices.Contains(types, x.Attrs().Protocol) })
	if i < 0 {
		return false
	}
	all, ok := filters[i].(*netlink.MatchAll)
	return ok && len(all.Actions) == 1 && all.Actions[0].Attrs().Action == netlink.TC_ACT_SHOT && all.Actions[0].Type() == "generic"
}

// notePrograms notes the programs on a link that packets pass, and returns what drops them all; nil if none does.
func (t *tracer) notePrograms(link string) (stop *Finding) {
	for _, f := range t.host.programs(link) {
		if f.Severity == SeverityError {
			stop = &f
		} else {
			t.warn(f.Severity, f.What, f.Where, f.Remedy)
		}
	}
	return stop
}

// neverUp are kinds of links that modules of the kernel make in every namespace, and IPVS's
// addresses are on, none of which packets leave by.
var neverUp = []string{"dummy", "ipip", "sit", "ip6tnl", "gre", "gretap", "erspan", "ip6gre", "ip6gretap", "vti", "vti6"}

// throughDefault reports whether a route is the default route.
func throughDefault(q query) bool {
	found, err := netlink.RouteGetWithOptions(q.to.AsSlice(), &netlink.RouteGetOptions{Mark: q.mark, FIBMatch: true})
	return err == nil && len(found) > 0 && isDefault(&found[0])
}

// downLinks says which links are down; empty if none is.
func (t *tracer) downLinks() string {
	down := t.host.linksDown()
	if len(down) == 0 {
		return ""
	}
	return fmt.Sprintf("down, and without the routes that went by them, is %s (ip link set dev %s up, then add its routes)", strings.Join(down, ", "), down[0])
}

// defaultGateway is the next hop of the default route; invalid if there is none.
func defaultGateway(f service.Family) netip.Addr {
	routes, _ := netlink.RouteList(nil, netlinkFamily(f))
	for i := range routes {
		if gateway := addrOf(routes[i].Gw); isDefault(&routes[i]) && gateway.IsValid() && !gateway.IsLinkLocalUnicast() {
			return gateway
		}
	}
	return netip.Addr{}
}

func isDefault(r *netlink.Route) bool {
	if r.Dst == nil {
		return true
	}
	bits, _ := r.Dst.Mask.Size()
	return bits == 0
}

// noHop says why packets don't get to the next host by a route; nil if nothing
// speaks against it.
func (t *tracer) noHop(r *route) *Finding {
	if r.local() || r.link == "" {
		return nil
	}
	h, err := t.host.hop(r)
	if err != nil {
		t.warn(SeverityWarning, err.Error(), "links", "")
		return nil
	}
	if stop := t.notePrograms(r.link); stop != nil {
		return stop
	}
	g := t.guest(h.to)
	other, behind := t.neighbours().behind[h.link]
	known := h.neighbour&(unix.NUD_REACHABLE|unix.NUD_STALE|unix.NUD_DELAY|unix.NUD_PROBE|unix.NUD_PERMANENT) != 0 || h.neighbour&unix.NUD_NOARP != 0 && !h.silent
	switch {
	case h.down:
		return &Finding{SeverityError, fmt.Sprintf("link %s, by which the packet leaves, is down", h.link), "link " + h.link, "ip link set dev " + h.link + " up"}
	case h.empty:
		return &Finding{SeverityError, fmt.Sprintf("link %s, by which the packet leaves, is a bridge without ports: nothing is behind it", h.link), "link " + h.link,
			fmt.Sprintf("look whether %s is to be there (%s): networks of container engines must not overlap with others", h.to, r.command())}
	case !h.carrier:
		f := &Finding{SeverityError, fmt.Sprintf("link %s, by which the packet leaves, has no carrier: its other end is down", h.link), "link " + h.link,
			"set its other end up (in the pod's network namespace, if it is a pod's), or look at the cable"}
		if g != nil {
			f.Remedy = fmt.Sprintf("nsenter --net=%s ip link set dev %s up", g.path, g.link)
		}
		return f
	case g != nil && g.veth && h.link != g.peer && h.link != g.by:
		return &Finding{SeverityError, fmt.Sprintf("packets for %s leave by %s, but it is behind %s", h.to, h.link, g.by), r.command(), "mend the routes: " + t.routeRemedy(h.to)}
	case h.silent && behind && !known:
		return &Finding{SeverityError, fmt.Sprintf("link %s doesn't ask for the address of %s: ARP is off on it", h.link, h.to), "link " + h.link, "ip link set dev " + h.link + " arp on"}
	case behind && !other.bridged && !known && !other.answers(h.to):
		return other.noAnswer(&h)
	case h.mac != "" && known && (g != nil && !slices.Contains(g.macs, h.mac) || g == nil && behind && !other.bridged && !slices.Contains(other.macs, h.mac)):
		if g == nil {
			g = &other
		}
		return &Finding{SeverityError, fmt.Sprintf("the neighbour entry of %s on %s is wrong: packets are addressed to %s, but %s has %s", h.to, h.link, h.mac, g.link, strings.Join(g.macs, ", ")),
			fmt.Sprintf("neighbour %s on %s (%s)", h.to, h.link, neighbourText(h.neighbour)), fmt.Sprintf("ip neigh del %s dev %s", h.to, h.link)}
	case t.twin(g):
		return nil
	case h.neighbour&unix.NUD_INCOMPLETE != 0 || h.neighbour&unix.NUD_FAILED != 0 && g == nil:
		f := &Finding{SeverityError, fmt.Sprintf("no host on %s answers for %s: the kernel asks (ARP, neighbour discovery) in vain", h.link, h.to),
			fmt.Sprintf("neighbour %s on %s (%s)", h.to, h.link, neighbourText(h.neighbour)), "look whether the pod or host is there, and has this address"}
		if g != nil {
			f.What += fmt.Sprintf(", although %s has it", g.path)
			f.Remedy = remedyARP
		}
		return f
	}
	return nil
}

// askedInVain says that the next host by a route hasn't answered for its address, and has it: from before it was there, or it still
// is so; nil if it has answered, or isn't seen.
func (t *tracer) askedInVain(r *route) *Finding {
	h, err := t.host.hop(r)
	g := t.guest(h.to)
	if err != nil || h.neighbour&unix.NUD_FAILED == 0 || g == nil || t.twin(g) {
		return nil
	}
	return &Finding{SeverityError, fmt.Sprintf("the kernel has asked for %s on %s in vain, although %s has it: whether it answers by now isn't known", h.to, h.link, g.path),
		fmt.Sprintf("neighbour %s on %s (FAILED)", h.to, h.link), "if this lasts, " + remedyARP}
}

// twin reports whether the client's gateway has the client's address as well, and so doesn't answer it (ownSource says that).
func (t *tracer) twin(g *guest) bool {
	if !t.departs || g == nil || t.client.Address.Is6() {
		return false
	}
	_, own := g.own[t.client.Address]
	return own
}

// remedyARP is for hosts that are there and can't be found out of sight of IP's rules.
const remedyARP = "look for rules that drop ARP or neighbour discovery, there and on bridges between: nft list ruleset, arptables -L, ebtables -L, ip link show (XDP)"

// neighbourText names a state as ip neigh does.
func neighbourText(state int) string {
	for _, s := range []struct {
		bit  int
		name string
	}{{unix.NUD_PERMANENT, "PERMANENT"}, {unix.NUD_FAILED, "FAILED"}, {unix.NUD_INCOMPLETE, "INCOMPLETE"}, {unix.NUD_NOARP, "NOARP"}, {unix.NUD_REACHABLE, "REACHABLE"}, {unix.NUD_STALE, "STALE"}} {
		if state&s.bit != 0 {
			return s.name
		}
	}
	return fmt.Sprintf("state %#x", state)
}

// guest returns the pod of this node that has an address; nil if none is known.
func (t *tracer) guest(a netip.Addr) *guest {
	if g, ok := t.neighbours().at[a]; ok {
		return &g
	}
	return nil
}

func (t *tracer) neighbours() neighbourhood {
	all, err := t.host.neighbours()
	if err != nil {
		t.warn(SeverityNote, "other network namespaces of this node can't be looked into: "+err.Error(), "namespaces", "")
	}
	return all
}

// unreached says why a packet that leaves this node for an endpoint doesn't get to
// a socket there, and what becomes of it then; nil if nothing speaks against it.
func (t *tracer) unreached(p netfilter.Packet, r *route) (Verdict, *Finding) {
	to := p.Dst
	if f := t.noHop(r); f != nil {
		return Dropped, f
	}
	e, g := t.planned(to), t.guest(to.Addr())
	if (e != nil && e.Local || g != nil && g.veth && g.by != r.link) && t.host.throughDefault(r.query) {
		f := &Finding{SeverityError, fmt.Sprintf("the route to %s is missing: it is on this node, but packets for it leave by the default route, on %s", to.Addr(), r.link),
			r.command(), t.routeRemedy(to.Addr())}
		if down := t.downLinks(); down != "" {
			f.What += "; " + down
		}
		t.nameOff(f, to.Addr())
		return Dropped, f
	}
	if f := t.askedInVain(r); f != nil {
		return Undetermined, f
	}
	if v, f := t.elsewhere(r); f != nil {
		return v, f
	}
	if g == nil {
		return t.unhealthy(e)
	}
	return Forwarded, nil
}

// elsewhere says that a route leads to another network namespace of this host than has the address, and what becomes of packets there;
// nil if it doesn't, or that isn't seen.
func (t *tracer) elsewhere(r *route) (Verdict, *Finding) {
	next, ok := t.neighbours().behind[r.link]
	if g := t.guest(r.via); g != nil {
		next, ok = *g, true
	} else if next.bridged {
		return Forwarded, nil
	}
	if _, has := next.own[r.to]; !ok || has || t.arrives || t.departs {
		return Forwarded, nil
	}
	f := &Finding{SeverityError, fmt.Sprintf("packets for %s leave by %s to network namespace %s, ", r.to, r.link, next.path), r.command(), "mend the routes: ip route show to match " + r.to.String()}
	switch g := t.guest(r.to); {
	case !next.forwards[service.FamilyOf(r.to)]:
		f.What += "which neither has that address nor forwards packets"
		if g == nil { // whose address it is isn't seen: a route of type local may take it
			return Undetermined, f
		}
		return Dropped, f
	case g != nil && g.path != next.path:
		f.What += fmt.Sprintf("which may forward them or not, but it is behind %s", g.by)
		return Undetermined, f
	}
	return Forwarded, nil
}

// noHairpin says why a pod doesn't reach itself; nil if nothing speaks against it. Where bridges show
// packets to netfilter, one whose new destination is on the bridge that it came in by is bridged, not routed
// (br_nf_pre_routing_finish in net/bridge/br_netfilter_hooks.c), and a port sends back what came in by it only in hairpin mode.
func (t *tracer) noHairpin(w way, r *route) *Finding {
	if w.userspace || w.balanced || w.packet.In != r.link || w.packet.Dst.Addr() != t.client.Address {
		return nil
	}
	if w.packet.Src.Addr() == w.packet.Dst.Addr() {
		f := &Finding{SeverityError, "the client is the endpoint itself, and drops a packet that bears its own address: its source isn't masqueraded", "nat POSTROUTING", t.repairs()}
		if s := t.acceptedBefore(netfilter.Postrouting); s != nil {
			f.What, f.Where = f.What+", because a rule that isn't kproxy's accepts the packet before kproxy's do: "+s.Text, place(s)
			f.Remedy = "let it stand behind kproxy's jump; " + t.ruleRemedy(s)
		}
		return f
	}
	if shown, _ := kernel.ReadSysctl("net", "bridge", "bridge-nf-call-"+t.program(&netfilter.Step{})); shown == 0 {
		return nil
	}
	h, err := t.host.hop(r)
	if err != nil {
		return nil
	}
	learned, _ := netlink.NeighList(0, unix.AF_BRIDGE) // none, where there is no bridge
	for _, n := range learned {
		port, err := netlink.LinkByIndex(n.LinkIndex)
		if err != nil || n.MasterIndex == 0 || n.HardwareAddr.String() != h.mac {
			continue
		}
		if mode, err := netlink.LinkGetProtinfo(port); err == nil && !mode.Hairpin {
			name := port.Attrs().Name
			return &Finding{SeverityError, fmt.Sprintf("the client is the endpoint itself, and port %s of bridge %s doesn't send packets back to where they came from (hairpin mode is off)", name, r.link),
				"port " + name, fmt.Sprintf("ip link set dev %s type bridge_slave hairpin on; the network plugin is to do so for every pod (hairpinMode of the CNI plugin bridge)", name)}
		}
	}
	return nil
}

// planned is the plan's endpoint at an address; nil if it has none.
func (t *tracer) planned(a netip.AddrPort) *plan.Endpoint {
	if t.service == nil {
		return nil
	}
	return t.service.EndpointAt(a)
}

// unhealthy returns what becomes of a packet by the last health check of an endpoint that can't be
// looked at from here. An endpoint that fails otherwise, by its answer to HTTP say, takes connections
// all the same.
func (t *tracer) unhealthy(e *plan.Endpoint) (Verdict, *Finding) {
	if e == nil || e.Probed == nil {
		return Forwarded, nil
	}
	if e.Ejected != nil {
		f := &Finding{SeverityError, fmt.Sprintf("endpoint %s doesn't take connections: %s%s", e.Address, e.Ejected.Text(time.Now()), anyway(e)), "endpoint " + e.Address.String(), "look at the pod and its node: whether they run, and the way there"}
		if e.Ejected.Reason == health.Refused {
			return Refused, f
		}
		return Dropped, f
	}
	if e.Health != "down" {
		return Forwarded, nil
	}
	f := &Finding{SeverityError, fmt.Sprintf("endpoint %s doesn't take connections: its health check fails: %s", e.Address, e.Error), "endpoint " + e.Address.String(), "look at the pod: whether it runs and listens on that port"}
	switch {
	case strings.Contains(e.Error, "refused"):
		return Refused, f
	case strings.Contains(e.Error, "no answer within"), strings.Contains(e.Error, "connect: "):
		return Dropped, f
	}
	return Forwarded, nil
}

// routeRemedy says how to get a missing route back.
func (t *tracer) routeRemedy(to netip.Addr) string {
	if g := t.guest(to); g != nil && g.by != "" {
		return fmt.Sprintf("ip route add %s/%d dev %s, as the network plugin did", to, to.BitLen(), g.by)
	}
	return fmt.Sprintf("add it again, or have the network plugin do so (ip route show to match %s, ip rule)", to)
}

// cause says what keeps kproxy itself from an endpoint whose health check fails;
// empty if nothing is found.
func (t *tracer) cause(e *plan.Endpoint) string {
	to := e.Address
	r := t.host.route(query{to: to.Addr()})
	if !r.passes() {
		return fmt.Sprintf("no way to %s: %s", to.Addr(), r.failure())
	}
	if r.local() {
		return ""
	}
	p := netfilter.NewPacket(t.req.Protocol, netip.AddrPortFrom(r.source, clientPort), to, "")
	if _, f := t.unreached(p, &r); f != nil && !strings.Contains(f.What, "its health check fails") {
		return f.What
	}
	return ""
}

// checkMTU warns where a link on the way takes smaller packets than the host that sends them by it, and doesn't know, on the way
// of packets that the kernel forwards: userspace's connections find their MTU.
func (t *tracer) checkMTU(w way, r *route) {
	if w.userspace || t.client.Node || t.req.Protocol != service.TCP {
		return
	}
	out, err := t.host.hop(r)
	back := t.host.route(query{to: t.client.Address})
	back.link = t.client.Interface
	in, err2 := t.host.hop(&back)
	if err != nil || err2 != nil || in.mtu == 0 || out.mtu == 0 || t.metRule("TCPMSS", "MAXSEG SIZE SET") != nil {
		return
	}
	client := in.mtu
	if g := t.guest(t.client.Address); g != nil {
		client = g.mtu
	}
	endpoint := client // whose link isn't seen, and may be as large
	if g := t.guest(r.to); g != nil {
		endpoint = g.mtu
	}
	// Either sends packets as large as its own link and what the other has offered allow.
	largest := min(client, endpoint)
	t.checkLink(out, largest, "the client", r.to)
	t.checkLink(in, largest, "the endpoint", t.client.Address)
}

// checkLink warns that packets from one side are too large for a link on their way.
func (t *tracer) checkLink(h hop, largest int, side string, to netip.Addr) {
	if h.mtu < largest {
		t.warn(SeverityWarning, fmt.Sprintf("packets of up to %d bytes come from %s, but only %d pass on the way to %s: larger ones are lost where ICMP (fragmentation needed) is filtered", largest, side, h.mtu, to),
			"link "+h.link, fmt.Sprintf("give the links one MTU (ip link set dev %s mtu %d), or let connections begin with smaller packets (TCPMSS --clamp-mss-to-pmtu)", h.link, largest))
	}
}

// netnsDir is where ip netns and container runtimes keep namespaces.
const netnsDir = "/run/netns"

// space is another network namespace of this host.
type space struct {
	path  string // opens it
	inode uint64 // tells it from others
	pid   int    // a process in it; 0 if none is known
}

// ownSpace is the network namespace of the calling thread.
const ownSpace = "/proc/thread-self/ns/net"

func inodeOf(path string) (uint64, error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return 0, &os.PathError{Op: "stat", Path: path, Err: err}
	}
	return st.Ino, nil
}

// spaces are the network namespaces of this host but the calling thread's own, as
// far as this process may see them: those with a name, and those of processes.
func spaces() []space {
	own, _ := inodeOf(ownSpace)
	at := map[uint64]int{}
	var out []space
	add := func(s space) {
		if i, known := at[s.inode]; known && out[i].pid == 0 {
			out[i].pid = s.pid
		} else if !known && s.inode != own {
			at[s.inode] = len(out)
			out = append(out, s)
		}
	}
	named, _ := os.ReadDir(netnsDir)
	for _, e := range named {
		path := filepath.Join(netnsDir, e.Name())
		if inode, err := inodeOf(path); err == nil {
			add(space{path: path, inode: inode})
		}
	}
	processes, _ := os.ReadDir("/proc")
	for _, e := range processes {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		path := "/proc/" + e.Name() + "/ns/net"
		if inode, err := inodeOf(path); err == nil {
			add(space{path, inode, pid})
		}
	}
	return out
}

// spaceName says which network namespace the calling thread is in.
func spaceName() string {
	own, err := inodeOf(ownSpace)
	if err != nil {
		return ""
	}
	named, _ := os.ReadDir(netnsDir)
	for _, e := range named {
		if inode, err := inodeOf(filepath.Join(netnsDir, e.Name())); err == nil && inode == own {
			return filepath.Join(netnsDir, e.Name())
		}
	}
	if first, err := inodeOf("/proc/1/ns/net"); err == nil && first == own {
		return "this host's own (that of process 1)"
	}
	return fmt.Sprintf("net:[%d], which has no name", own)
}

// enter moves the calling thread to a namespace. Any process may have made the path, so it looks at what it leads to before it opens
// that: a FIFO would keep it waiting, and a device might do something.
func enter(path string, kind int) error {
	found, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: path, Err: err}
	}
	defer unix.Close(found)
	var is unix.Statfs_t
	if err := unix.Fstatfs(found, &is); err != nil || is.Type != unix.NSFS_MAGIC {
		return fmt.Errorf("enter namespace %s: it is no namespace: name one of /run/netns, or /proc/PID/ns/net", path)
	}
	fd, err := unix.Open(fmt.Sprintf("/proc/self/fd/%d", found), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: path, Err: err}
	}
	defer unix.Close(fd)
	if err := unix.Setns(fd, kind); err != nil {
		return fmt.Errorf("enter namespace %s: %w", path, err)
	}
	return nil
}

// inside runs f in the network namespace at path.
func inside(path string, f func() error) error {
	return kernel.OnThread(func() error {
		if err := enter(path, unix.CLONE_NEWNET); err != nil {
			return err
		}
		return f()
	})
}

// guest is a pod, or whatever else has an address in another network namespace of
// this host that one link joins with the traced one.
type guest struct {
	path    string
	link    string   // that has the address
	peer    string   // the traced namespace's end of it
	by      string   // what packets for it leave by: peer, or the bridge that peer is a port of
	veth    bool     // link is one end of a pair
	bridged bool     // link is a port of a bridge, behind which are others
	mtu     int      // of link
	macs    []string // of all its links
	mac     string   // six bytes that its packets bear
	// What decides whether it answers for an address (arp_process in net/ipv4/arp.c, ndisc_recv_ns in net/ipv6/ndisc.c).
	silent    bool // ARP is off on link
	arpIgnore int
	proxies   map[service.Family]bool // it answers for what is behind it
	forwards  map[service.Family]bool // it forwards what comes in by link
	own       map[netip.Addr]string   // its addresses
	here      []netip.Addr            // those of link, or of the bridge that it is a port of
}

// answers reports whether the guest tells others on its link that an address is there.
func (g *guest) answers(a netip.Addr) bool {
	_, own := g.own[a]
	switch family := service.FamilyOf(a); {
	case g.silent:
		return false
	case g.proxies[family]:
		return true
	case family == service.IPv4 && g.arpIgnore == 0:
		return own
	case family == service.IPv4 && g.arpIgnore >= 8:
		return false
	}
	return slices.Contains(g.here, a)
}

// noAnswer says why the guest doesn't answer for the address of a hop.
func (g *guest) noAnswer(h *hop) *Finding {
	if _, own := g.own[h.to]; !own {
		return &Finding{SeverityError, fmt.Sprintf("link %s leads to network namespace %s, which doesn't have %s", h.link, g.path, h.to), "link " + h.link,
			fmt.Sprintf("give it the address (nsenter --net=%s ip addr add %s/%d dev %s), or mend what says that it is there", g.path, h.to, h.to.BitLen(), g.link)}
	}
	f := &Finding{SeverityError, fmt.Sprintf("network namespace %s has %s, and doesn't answer for it on %s: ", g.path, h.to, g.link), "link " + h.link, ""}
	if g.silent {
		f.What, f.Remedy = f.What+"ARP is off on that link", fmt.Sprintf("nsenter --net=%s ip link set dev %s arp on", g.path, g.link)
	} else {
		f.What, f.Remedy = f.What+fmt.Sprintf("arp_ignore is %d", g.arpIgnore), fmt.Sprintf("nsenter --net=%s sysctl -w net.ipv4.conf.%s.arp_ignore=0, and that of all", g.path, g.link)
	}
	return f
}

// neighbourhood holds the guests that this process finds in other network namespaces.
type neighbourhood struct {
	at     map[netip.Addr]guest
	behind map[string]guest // by the traced namespace's end of a veth
}

// neighbours are the guests in some namespaces. Addresses alone don't tell: several networks of one host may use
// the same, so that the link's other end has to be in the calling thread's namespace.
func neighbours(all []space) (neighbourhood, error) {
	out := neighbourhood{at: map[netip.Addr]guest{}, behind: map[string]guest{}}
	here, err := unix.Open(ownSpace, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return out, &os.PathError{Op: "open", Path: ownSpace, Err: err}
	}
	defer unix.Close(here)
	links, err := netlink.LinkList()
	if err != nil {
		return out, fmt.Errorf("list links: %w", err)
	}
	names, masters := map[int]string{}, map[int]string{}
	for _, l := range links {
		names[l.Attrs().Index] = l.Attrs().Name
	}
	for _, l := range links {
		a := l.Attrs()
		masters[a.Index] = cmp.Or(names[a.MasterIndex], a.Name)
	}
	err = kernel.OnThread(func() error {
		for _, s := range all {
			if enter(s.path, unix.CLONE_NEWNET) == nil {
				out.add(s, here, names, masters)
			}
		}
		return nil
	})
	return out, err
}

// add adds those of the calling thread's namespace, s, whose links lead to the namespace
// here, where links have names and masters by index.
func (n *neighbourhood) add(s space, here int, names, masters map[int]string) {
	id, err := netlink.GetNetNsIdByFd(here)
	if err != nil || id < 0 {
		return // no link of it leads there
	}
	links, err := netlink.LinkList()
	if err != nil {
		return
	}
	own, err := localAddresses()
	if err != nil {
		return
	}
	var macs []string
	byIndex := map[int]netlink.Link{}
	for _, l := range links {
		if mac := l.Attrs().HardwareAddr.String(); mac != "" { // links without a card, as lo's, have none
			macs = append(macs, mac)
		}
		byIndex[l.Attrs().Index] = l
	}
	for _, l := range links {
		a := l.Attrs()
		if a.NetNsID != id || a.ParentIndex == 0 {
			continue
		}
		g := guest{
			path: s.path, link: a.Name, peer: names[a.ParentIndex], by: masters[a.ParentIndex], veth: l.Type() == "veth",
			mtu: a.MTU, macs: macs, silent: a.RawFlags&unix.IFF_NOARP != 0, own: own.links, proxies: map[service.Family]bool{}, forwards: map[service.Family]bool{},
		}
		at := l // that has the addresses
		if m := byIndex[a.MasterIndex]; m != nil {
			at, g.bridged = m, m.Type() == "bridge"
		}
		g.mac = string(at.Attrs().HardwareAddr)
		for _, f := range service.Families {
			g.forwards[f] = forwardingOff(f, at.Attrs().Name) == ""
		}
		addrs, _ := netlink.AddrList(at, netlink.FAMILY_ALL)
		for _, x := range addrs {
			g.here = append(g.here, addrOf(x.IP))
		}
		for _, conf := range []string{"all", at.Attrs().Name} {
			ignore, _ := kernel.ReadSysctl("net", "ipv4", "conf", conf, "arp_ignore")
			g.arpIgnore = max(g.arpIgnore, ignore)
			arp, _ := kernel.ReadSysctl("net", "ipv4", "conf", conf, "proxy_arp")
			private, _ := kernel.ReadSysctl("net", "ipv4", "conf", conf, "proxy_arp_pvlan")
			ndp, _ := kernel.ReadSysctl("net", "ipv6", "conf", conf, "proxy_ndp")
			g.proxies[service.IPv4] = g.proxies[service.IPv4] || arp+private != 0
			g.proxies[service.IPv6] = g.proxies[service.IPv6] || ndp != 0
		}
		if g.veth {
			n.behind[g.peer] = g
		}
		for _, x := range g.here {
			if !x.IsLinkLocalUnicast() {
				n.at[x] = g
			}
		}
	}
}

// errNoPod says that no visible process has the host name.
var errNoPod = errors.New("there is no such pod on this node, as far as this process may see")

// podSpace returns the network namespace of a pod: the host name of its processes is the pod's
// (unless spec.hostname or spec.hostNetwork says otherwise).
func podSpace(pod string) (string, error) {
	var found []string
	all := spaces()
	err := kernel.OnThread(func() error {
		for _, s := range all {
			var u unix.Utsname
			if s.pid == 0 || enter(fmt.Sprintf("/proc/%d/ns/uts", s.pid), unix.CLONE_NEWUTS) != nil || unix.Uname(&u) != nil {
				continue
			}
			if unix.ByteSliceToString(u.Nodename[:]) == pod {
				found = append(found, s.path)
			}
		}
		return nil
	})
	switch {
	case err != nil:
		return "", err
	case len(found) == 0:
		return "", fmt.Errorf("find pod %s: %w; pass the path of its network namespace (--netns)", pod, errNoPod)
	case len(found) > 1:
		slices.Sort(found)
		return "", fmt.Errorf("find pod %s: several namespaces have that host name; pass one of %s (--netns)", pod, strings.Join(found, ", "))
	}
	return found[0], nil
}
