package steering

import (
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// Portal returns the portal's sets and who is in them, in order of name. They
// decide which data plane gets a service's new connections, so they follow
// every plan at once, while chains follow when they can:
//
//   - USER holds what is redirected to userspace,
//   - LOCAL the node ports that are redirected when they are reached by way of loopback,
//   - REJECT and DROP what is refused and dropped,
//   - HEALTH the ports at which load balancers ask for a Service's health,
//   - RANGED the addresses that only the clients in ALLOW may use,
//   - SHORT, unless iptables is all that lies beneath, what is redirected to userspace
//     for pods and this node, whatever is done with others' connections,
//   - ALIVE the heartbeat; kproxy refreshes it and Portal leaves it empty,
//   - STARTING likewise, see [AnnounceStart],
//   - LEAVING, where the kernel carries connections, the endpoints that may have
//     some but get no new ones,
//   - LET the endpoints whose refusals pass; Portal leaves it empty as well,
//     see [LetRefusals],
//   - HELD connections; Portal leaves it empty as well, see [HoldConnections].
func Portal(p *plan.Plan) []kernel.Set {
	b := newPortal(p)
	for _, s := range p.Services {
		for i := range s.Frontends {
			b.add(s, &s.Frontends[i])
		}
	}
	b.addHealthPorts(p)
	b.addLeaving(p)
	return b.sets()
}

// portal collects entries per set name.
type portal struct {
	specs   []kernel.Set
	entries map[string][]string
	// nodeAddresses are those at which node ports answer, loopback aside.
	nodeAddresses [2][]netip.Addr
}

// PortalSets returns the portal's sets without entries, in order of name. All
// are dynamic: the rules need them to exist, and [Portal] says who is in them.
func PortalSets() []kernel.Set {
	var out []kernel.Set
	for _, f := range service.Families {
		out = append(out,
			kernel.Set{Name: kernel.FamilySet(kernel.SetAlive, f), Type: kernel.HashNet, Timeout: defaultAliveTimeout},
			kernel.Set{Name: kernel.FamilySet(kernel.SetAllow, f), Type: kernel.HashIPPortNet},
			kernel.Set{Name: kernel.FamilySet(kernel.SetDrop, f), Type: kernel.HashIPPort},
			kernel.Set{Name: kernel.FamilySet(kernel.SetHeld, f), Type: kernel.HashIPPortIP, Timeout: defaultHeldTimeout},
			kernel.Set{Name: kernel.FamilySet(kernel.SetLet, f), Type: kernel.HashIPPort, Timeout: defaultLetTimeout},
			kernel.Set{Name: kernel.FamilySet(kernel.SetRanged, f), Type: kernel.HashIPPort},
			kernel.Set{Name: kernel.FamilySet(kernel.SetReject, f), Type: kernel.HashIPPort},
			kernel.Set{Name: kernel.FamilySet(kernel.SetStarting, f), Type: kernel.HashNet, Timeout: defaultAliveTimeout},
			kernel.Set{Name: kernel.FamilySet(kernel.SetUser, f), Type: kernel.HashIPPort})
		for i := len(out) - 9; i < len(out); i++ {
			out[i].Family = f
		}
	}
	for _, f := range service.Families {
		for _, base := range []string{kernel.SetDrop, kernel.SetLocal, kernel.SetReject, kernel.SetUser} {
			for _, proto := range []service.Protocol{service.TCP, service.UDP} {
				out = append(out, kernel.Set{Name: kernel.NodePortSet(base, proto, f), Type: kernel.BitmapPort})
			}
		}
		out = append(out, kernel.Set{Name: kernel.NodePortSet(kernel.SetHealth, service.TCP, f), Type: kernel.BitmapPort})
	}
	for i := range out {
		out[i].Dynamic = true
	}
	slices.SortFunc(out, func(a, b kernel.Set) int { return strings.Compare(a.Name, b.Name) })
	return out
}

// PortalSetsOf returns those of p's portal: [PortalSets], and those that only
// the rules of a data plane which p uses need.
func PortalSetsOf(p *plan.Plan) []kernel.Set {
	out := PortalSets()
	if p == nil {
		return out
	}
	for _, f := range service.Families {
		if !p.TellsClients {
			out = append(out,
				kernel.Set{Name: kernel.FamilySet(kernel.SetShort, f), Type: kernel.HashIPPort, Family: f, Dynamic: true},
				kernel.Set{Name: kernel.NodePortSet(kernel.SetShort, service.TCP, f), Type: kernel.BitmapPort, Dynamic: true},
				kernel.Set{Name: kernel.NodePortSet(kernel.SetShort, service.UDP, f), Type: kernel.BitmapPort, Dynamic: true})
		}
		if p.Offloads() {
			out = append(out, kernel.Set{Name: kernel.FamilySet(kernel.SetLeaving, f), Type: kernel.HashIPPort, Family: f, Dynamic: true})
		}
	}
	slices.SortFunc(out, func(a, b kernel.Set) int { return strings.Compare(a.Name, b.Name) })
	return out
}

func newPortal(p *plan.Plan) *portal {
	b := &portal{specs: PortalSetsOf(p), entries: map[string][]string{}}
	if p != nil {
		for _, f := range service.Families {
			b.nodeAddresses[f] = p.Policy.NodePortAddresses(f)
		}
	}
	return b
}

func (b *portal) add(s *plan.Service, f *plan.Frontend) {
	if f.Kind == plan.NodePort {
		b.addNodePort(s, f)
		return
	}
	entry := kernel.AddressEntry(f.Protocol, f.Address)
	put := func(base string, entries ...string) {
		name := kernel.FamilySet(base, f.Family)
		b.entries[name] = append(b.entries[name], entries...)
	}
	switch f.Verdict {
	case plan.Reject:
		put(kernel.SetReject, entry)
	case plan.Drop:
		put(kernel.SetDrop, entry)
	}
	if inUserspace(s, f) {
		put(kernel.SetUser, entry)
	}
	if s.ShortCircuits(f) {
		put(kernel.SetShort, entry)
	}
	if allowed, limited := ranges(f); limited {
		put(kernel.SetRanged, entry)
		for _, r := range allowed {
			put(kernel.SetAllow, entry+","+prefixEntry(r))
		}
	}
}

// addNodePort adds to the bitmaps of f's family. These know TCP and UDP only, as
// userspace does (ip_set_get_ip_port, net/netfilter/ipset/ip_set_getport.c): a node
// port of SCTP is refused at each of the node's addresses, as a service's own is.
func (b *portal) addNodePort(s *plan.Service, f *plan.Frontend) {
	put := b.putNodePort
	if f.Protocol == service.SCTP {
		put = b.putNodePlaces
	}
	switch f.Verdict {
	case plan.Reject:
		put(kernel.SetReject, f)
	case plan.Drop:
		put(kernel.SetDrop, f)
	}
	if f.Protocol == service.SCTP {
		return // the kernel's rules serve it
	}
	if s.Serves(f) {
		put(kernel.SetLocal, f) // the node itself, which short circuits are for
	}
	if inUserspace(s, f) {
		put(kernel.SetUser, f)
	}
	if s.ShortCircuits(f) {
		put(kernel.SetShort, f)
	}
}

func (b *portal) putNodePort(base string, f *plan.Frontend) {
	name := kernel.NodePortSet(base, f.Protocol, f.Family)
	b.entries[name] = append(b.entries[name], strconv.Itoa(int(f.Address.Port())))
}

// putNodePlaces puts a node port into the set of addresses, as if each of the
// node's were a service's.
func (b *portal) putNodePlaces(base string, f *plan.Frontend) {
	name := kernel.FamilySet(base, f.Family)
	for _, a := range b.nodeAddresses[f.Family] {
		b.entries[name] = append(b.entries[name], kernel.AddressEntry(f.Protocol, netip.AddrPortFrom(a, f.Address.Port())))
	}
}

// addHealthPorts adds the ports at which load balancers ask this node whether it
// has endpoints, some of them by the load balancer's own address.
func (b *portal) addHealthPorts(p *plan.Plan) {
	for _, h := range plan.HealthPorts(p) {
		if h.Problem != "" {
			continue
		}
		for _, f := range service.Families {
			name := kernel.NodePortSet(kernel.SetHealth, service.TCP, f)
			b.entries[name] = append(b.entries[name], strconv.Itoa(int(h.Port)))
		}
	}
}

// inUserspace reports whether f's new connections are redirected. Where the
// verdict drops outsiders and only pods and this node are served, these are told
// apart before they are redirected: by the kernel's rules, or by SHORT.
func inUserspace(s *plan.Service, f *plan.Frontend) bool {
	return s.DataPlane == plan.Userspace && f.Verdict == plan.Forward
}

func (b *portal) sets() []kernel.Set {
	out := b.specs
	for i := range out {
		s := &out[i]
		s.Dynamic = slices.ContainsFunc([]string{kernel.SetAlive, kernel.SetHeld, kernel.SetLet, kernel.SetStarting}, func(base string) bool { return s.Name == kernel.FamilySet(base, s.Family) })
		e := b.entries[s.Name]
		slices.Sort(e)
		s.Entries = slices.Compact(e)
	}
	return out
}

// ranges returns the clients that may use f, and whether that is a limit at
// all: a range of every address, which ipset couldn't hold either, is none.
func ranges(f *plan.Frontend) (allowed []netip.Prefix, limited bool) {
	for _, r := range f.SourceRanges {
		if service.FamilyOf(r.Addr()) != f.Family {
			continue
		}
		if r.Bits() == 0 {
			return nil, false
		}
		allowed = append(allowed, r.Masked())
	}
	return allowed, len(f.SourceRanges) > 0
}

// prefixEntry prints a network as `ipset save` does: a full-length prefix is
// left out.
func prefixEntry(p netip.Prefix) string {
	if p.IsSingleIP() {
		return p.Addr().String()
	}
	return p.String()
}

// everyAddress is the whole of a family.
var everyAddress = [2]netip.Prefix{
	service.IPv4: netip.PrefixFrom(netip.IPv4Unspecified(), 0),
	service.IPv6: netip.PrefixFrom(netip.IPv6Unspecified(), 0),
}

// netEntries are a network's entries in a hash:net set, which takes no /0
// (ipset(8)): every address is two halves.
func netEntries(p netip.Prefix) []string {
	if p.Bits() > 0 {
		return []string{prefixEntry(p)}
	}
	if p.Addr().Is4() {
		return []string{"0.0.0.0/1", "128.0.0.0/1"}
	}
	return []string{"8000::/1", "::/1"}
}

// UserEntries returns where p's addresses would be found in the userspace sets.
func UserEntries(p *service.Port) []kernel.SetEntry {
	var out []kernel.SetEntry
	for _, addrs := range [][]netip.Addr{p.ClusterIPs, p.ExternalIPs, p.LoadBalancerIPs} {
		for _, a := range addrs {
			out = append(out, kernel.SetEntry{Set: kernel.FamilySet(kernel.SetUser, service.FamilyOf(a)), Entry: kernel.AddressEntry(p.Protocol, netip.AddrPortFrom(a, p.Number))})
		}
	}
	if p.NodePort != 0 {
		for _, f := range service.Families {
			out = append(out, kernel.SetEntry{Set: kernel.NodePortSet(kernel.SetUser, p.Protocol, f), Entry: strconv.Itoa(int(p.NodePort))})
		}
	}
	return out
}
