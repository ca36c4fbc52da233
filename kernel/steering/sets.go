package steering

import (
	"cmp"
	"net/netip"
	"slices"
	"strconv"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// Sets returns the redirect sets and their entries, in order of name. They decide
// which data plane gets a service's new connections, so they follow every plan at
// once, while chains follow when they can:
//
//   - USER holds what is redirected to userspace,
//   - LOCAL the node ports that are redirected when they are reached by way of loopback,
//   - REJECT and DROP what is refused and dropped,
//   - HEALTH the ports at which load balancers ask for a Service's health,
//   - RANGED the addresses that only the clients in ALLOW may use,
//   - SHORT, where the kernel data plane can't tell clients apart ([plan.Plan.TellsClients]), what is
//     redirected to userspace for pods and this node, whatever is done with others' connections,
//   - CLUSTER, where these are closed, holds the cluster IPs that services have, and LEFT what another proxy serves,
//   - LEAVING, where the kernel carries connections, the endpoints that may have
//     some but get no new ones,
//   - ALIVE, STARTING, LET and HELD are empty here: see [kernel.Heartbeat] and
//     [kernel.Exceptions].
func Sets(p *plan.Plan) []kernel.Set {
	b := newMembers(p)
	for _, s := range p.Services {
		b.addService(s)
	}
	b.addHealthPorts(p)
	return b.sets()
}

// SetChanges returns what leads from the entries of old to those of p, between
// which lies d. It looks only at the services in d: an offload among ten thousand
// services costs what that one service costs. An entry that one service gives up
// and another takes over is left in place.
func SetChanges(old, p *plan.Plan, d plan.Delta) kernel.SetOps {
	before, now := newMembers(cmp.Or(old, p)), newMembers(p)
	changed := make(map[service.Key]bool, len(d.Changes))
	for _, c := range d.Changes {
		before.addService(c.Was)
		now.addService(c.Is)
		changed[c.Key()] = true
	}
	if !d.SameHealthPorts() { // the ports of a Service share one, so the others count as well
		before.addHealthPorts(cmp.Or(old, p))
		now.addHealthPorts(p)
	}
	if slices.ContainsFunc(d.Changes, func(c plan.Change) bool { return leaves(c.Was) || leaves(c.Is) }) { // other services may have the same endpoints
		for _, s := range p.Services {
			if !changed[s.Port.Key] {
				before.leaving(s)
				now.leaving(s)
			}
		}
	}
	if p.Policy.CloseClusterIPs && slices.ContainsFunc(d.Changes, func(c plan.Change) bool {
		return c.Is == nil || c.Was != nil && !slices.Equal(c.Was.Port.ClusterIPs, c.Is.Port.ClusterIPs)
	}) {
		for _, s := range p.Services { // the ports of a Service share its cluster IPs
			if !changed[s.Port.Key] {
				before.clusterIPs(s)
				now.clusterIPs(s)
			}
		}
	}
	return kernel.DiffSets(before.sets(), now.sets())
}

// EmptySetsOf returns the redirect sets without entries, in order of name: those that rules always
// need, and those that only the rules of a data plane need which p uses; p may be nil. All are
// dynamic: the rules need them to exist, and [Sets] says what is in them.
func EmptySetsOf(p *plan.Plan) []kernel.Set {
	var out []kernel.Set
	for _, f := range service.Families {
		add := func(base string, t kernel.SetType, timeout uint32) {
			out = append(out, kernel.Set{Name: kernel.FamilySet(base, f), Type: t, Family: f, Timeout: timeout, Dynamic: true})
		}
		addNodePorts := func(base string, protocols ...service.Protocol) {
			for _, proto := range protocols {
				out = append(out, kernel.Set{Name: kernel.NodePortSet(base, proto, f), Type: kernel.BitmapPort, Dynamic: true})
			}
		}
		add(kernel.SetAlive, kernel.HashNet, defaultAliveTimeout)
		add(kernel.SetStarting, kernel.HashNet, defaultAliveTimeout)
		add(kernel.SetHeld, kernel.HashIPPortIP, defaultKeptTimeout)
		add(kernel.SetLet, kernel.HashIPPort, defaultLetTimeout)
		add(kernel.SetRanged, kernel.HashIPPort, 0)
		add(kernel.SetAllow, kernel.HashIPPortNet, 0)
		for _, base := range []string{kernel.SetDrop, kernel.SetReject, kernel.SetUser} {
			add(base, kernel.HashIPPort, 0)
			addNodePorts(base, userProtocols[:]...)
		}
		addNodePorts(kernel.SetLocal, userProtocols[:]...)
		addNodePorts(kernel.SetHealth, service.TCP)
		if p == nil {
			continue
		}
		if !p.TellsClients {
			add(kernel.SetShort, kernel.HashIPPort, 0)
			addNodePorts(kernel.SetShort, userProtocols[:]...)
		}
		if p.Policy.CloseClusterIPs {
			add(kernel.SetCluster, kernel.HashIP, 0)
			add(kernel.SetLeft, kernel.HashIPPort, 0)
		}
		if p.Offloads() {
			add(kernel.SetLeaving, kernel.HashIPPort, 0)
		}
	}
	slices.SortFunc(out, kernel.CompareSets)
	return out
}

// members collects the entries of redirect sets.
type members struct {
	empty   []kernel.Set
	entries map[string][]string
	// nodeAddresses are those at which node ports answer, loopback aside.
	nodeAddresses [2][]netip.Addr
}

func newMembers(p *plan.Plan) *members {
	b := &members{empty: EmptySetsOf(p), entries: map[string][]string{}}
	for _, f := range service.Families {
		b.nodeAddresses[f] = p.Policy.NodePortAddresses(f)
	}
	return b
}

func (b *members) put(set string, entries ...string) {
	b.entries[set] = append(b.entries[set], entries...)
}

// addService adds a service's entries; those of nil are none.
func (b *members) addService(s *plan.Service) {
	if s == nil {
		return
	}
	for i := range s.Frontends {
		b.add(s, &s.Frontends[i])
	}
	b.leaving(s)
	b.clusterIPs(s)
}

// clusterIPs adds a service port's cluster IPs, and where another proxy serves it, or rules of the kernel, which may be gone
// for a moment: what they miss is to a port that a service has. Where cluster IPs aren't closed, there are no such sets.
func (b *members) clusterIPs(s *plan.Service) {
	for _, a := range s.Port.ClusterIPs {
		b.put(kernel.FamilySet(kernel.SetCluster, service.FamilyOf(a)), a.String())
	}
	left := s.Left()
	for i := range s.Frontends {
		if f := &s.Frontends[i]; s.InKernel() && f.Kind == plan.ClusterIP {
			left = append(left, f.Address)
		}
	}
	for _, at := range left {
		b.put(kernel.FamilySet(kernel.SetLeft, service.FamilyOf(at.Addr())), kernel.AddressEntry(s.Port.Protocol, at))
	}
}

func (b *members) add(s *plan.Service, f *plan.Frontend) {
	if f.Kind == plan.NodePort {
		b.addNodePort(s, f)
		return
	}
	entry := kernel.AddressEntry(f.Protocol, f.Address)
	b.addFrontend(s, f, func(base string) { b.put(kernel.FamilySet(base, f.Family), entry) })
	if allowed, limited := ranges(f); limited {
		b.put(kernel.FamilySet(kernel.SetRanged, f.Family), entry)
		for _, r := range allowed {
			b.put(kernel.FamilySet(kernel.SetAllow, f.Family), entry+","+prefixEntry(r))
		}
	}
}

// addFrontend puts f into the sets of what is done with its connections.
func (b *members) addFrontend(s *plan.Service, f *plan.Frontend, put func(base string)) {
	switch f.Verdict {
	case plan.Reject:
		put(kernel.SetReject)
	case plan.Drop:
		put(kernel.SetDrop)
	}
	if inUserspace(s, f) {
		put(kernel.SetUser)
	}
	if s.ShortCircuits(f) {
		put(kernel.SetShort)
	}
}

// addNodePort adds to the bitmaps of f's family. These know TCP and UDP only, as
// userspace does (ip_set_get_ip_port, net/netfilter/ipset/ip_set_getport.c): a node
// port of SCTP, which the kernel's rules serve, is refused at each of the node's
// addresses, as a service's own is.
func (b *members) addNodePort(s *plan.Service, f *plan.Frontend) {
	if f.Protocol == service.SCTP {
		b.addFrontend(s, f, func(base string) {
			for _, a := range b.nodeAddresses[f.Family] {
				if base == kernel.SetReject || base == kernel.SetDrop {
					b.put(kernel.FamilySet(base, f.Family), kernel.AddressEntry(f.Protocol, netip.AddrPortFrom(a, f.Address.Port())))
				}
			}
		})
		return
	}
	put := func(base string) {
		b.put(kernel.NodePortSet(base, f.Protocol, f.Family), strconv.Itoa(int(f.Address.Port())))
	}
	b.addFrontend(s, f, put)
	if s.Serves(f) {
		put(kernel.SetLocal) // the node itself, which short circuits are for
	}
}

// addHealthPorts adds the ports at which load balancers ask this node whether it
// has endpoints, some of them by the load balancer's own address.
func (b *members) addHealthPorts(p *plan.Plan) {
	for _, h := range plan.HealthPorts(p) {
		for _, f := range service.Families {
			if h.Problem == "" {
				b.put(kernel.NodePortSet(kernel.SetHealth, service.TCP, f), strconv.Itoa(int(h.Port)))
			}
		}
	}
}

// inUserspace reports whether f's new connections are redirected. Where the
// verdict drops outsiders and only pods and this node are served, these are told
// apart before they are redirected: by the kernel's rules, or by SHORT.
func inUserspace(s *plan.Service, f *plan.Frontend) bool {
	return s.DataPlane == plan.Userspace && f.Verdict == plan.Forward
}

// sets returns the sets with what was collected. Those with lifetimes are filled apart
// from plans.
func (b *members) sets() []kernel.Set {
	out := b.empty
	for i := range out {
		e := b.entries[out[i].Name]
		slices.Sort(e)
		out[i].Entries, out[i].Dynamic = slices.Compact(e), out[i].Timeout > 0
	}
	return out
}

// leaves reports whether s has endpoints that get no new connection, but may still have some:
// those that terminate, are down, or drain.
func leaves(s *plan.Service) bool { return s != nil && s.Kernel != plan.None && s.Leaving }

// leaving adds these. The rules against packets that conntrack takes for invalid have to
// know them, besides those in [kernel.SetEndpoint].
func (b *members) leaving(s *plan.Service) {
	if !leaves(s) {
		return
	}
	for i := range s.Endpoints {
		if e := &s.Endpoints[i]; e.Leaves() {
			b.put(kernel.FamilySet(kernel.SetLeaving, service.FamilyOf(e.Address.Addr())), kernel.AddressEntry(s.Port.Protocol, e.Address))
		}
	}
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
	for _, a := range slices.Concat(p.ClusterIPs, p.ExternalIPs, p.LoadBalancerIPs) {
		out = append(out, kernel.SetEntry{Set: kernel.FamilySet(kernel.SetUser, service.FamilyOf(a)), Entry: kernel.AddressEntry(p.Protocol, netip.AddrPortFrom(a, p.Number))})
	}
	if p.NodePort != 0 {
		for _, f := range service.Families {
			out = append(out, kernel.SetEntry{Set: kernel.NodePortSet(kernel.SetUser, p.Protocol, f), Entry: strconv.Itoa(int(p.NodePort))})
		}
	}
	return out
}
