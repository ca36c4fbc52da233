package userspace

import (
	"net/netip"
	"slices"
	"time"
	"unsafe"

	"kproxy.dev/kproxy/lb"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// table is what connections are looked up in: plans, arranged by where clients
// connect to. It is immutable.
type table struct {
	portals   map[portal]front
	nodePorts map[nodePort]front
	services  map[service.Key]*view
	addrs     map[netip.Addr]struct{} // of portals
	pods      []netip.Prefix
}

// portal is a service address.
type portal struct {
	addr  netip.AddrPort
	proto service.Protocol
}

// nodePort is a port on every local address of a family.
type nodePort struct {
	port   uint16
	family service.Family
	proto  service.Protocol
}

// front is a frontend and the service it belongs to.
type front struct {
	*plan.Frontend
	view *view
}

// view is a service as one plan decided it.
type view struct {
	plan   *plan.Service
	state  *serviceState
	groups [2]groups
}

type groups struct{ cluster, local *group }

// group is a list of endpoints to choose from, and how.
type group struct {
	backends  []plan.Backend
	endpoints []*endpoint // of backends
	algorithm service.Algorithm
	picker    lb.Picker
}

// newTable arranges p. With an old table it also keeps what only that has, and
// reuses what didn't change: a picker remembers whose turn it is.
func newTable(p *plan.Plan, old *table, state func(service.Key) *serviceState) *table {
	t := &table{
		portals: map[portal]front{}, nodePorts: map[nodePort]front{},
		services: make(map[service.Key]*view, len(p.Services)),
		addrs:    map[netip.Addr]struct{}{}, pods: p.Policy.PodCIDRs,
	}
	for _, s := range p.Services {
		var before *view
		if old != nil {
			before = old.services[s.Port.Key]
		}
		v := newView(s, before, state)
		t.services[s.Port.Key] = v
		for i := range s.Frontends {
			f := &s.Frontends[i]
			t.add(front{f, v})
		}
	}
	return t
}

func (t *table) add(f front) {
	if f.Kind == plan.NodePort {
		t.nodePorts[nodePort{f.Address.Port(), f.Family, f.Protocol}] = f
		return
	}
	t.portals[portal{f.Address, f.Protocol}] = f
	t.addrs[f.Address.Addr()] = struct{}{}
}

// keepOld adds what only old has.
func (t *table) keepOld(old *table) {
	if old == nil {
		return
	}
	for k, f := range old.portals {
		if _, ok := t.portals[k]; !ok {
			t.add(f)
		}
	}
	for k, f := range old.nodePorts {
		if _, ok := t.nodePorts[k]; !ok {
			t.add(f)
		}
	}
	for k, v := range old.services {
		if _, ok := t.services[k]; !ok {
			t.services[k] = v
		}
	}
}

func newView(s *plan.Service, old *view, state func(service.Key) *serviceState) *view {
	if old != nil && old.plan == s {
		return old
	}
	v := &view{plan: s, state: state(s.Port.Key)}
	v.state.configure(s.Port)
	for f := range s.Groups {
		var before groups
		if old != nil {
			before = old.groups[f]
		}
		g := &s.Groups[f]
		v.groups[f].cluster = newGroup(v, g.Cluster, before.cluster)
		if sameSlice(g.Local, g.Cluster) {
			v.groups[f].local = v.groups[f].cluster
			continue
		}
		v.groups[f].local = newGroup(v, g.Local, before.local)
	}
	return v
}

func newGroup(v *view, backends []plan.Backend, old *group) *group {
	algorithm := v.plan.Port.Algorithm
	if old != nil && old.algorithm == algorithm && slices.Equal(old.backends, backends) {
		return old
	}
	g := &group{backends: backends, algorithm: algorithm, endpoints: make([]*endpoint, len(backends))}
	targets := make([]lb.Target, len(backends))
	for i, b := range backends {
		g.endpoints[i] = v.state.endpoint(b.Address)
		targets[i] = lb.Target{Address: b.Address, Weight: b.Weight, Load: &g.endpoints[i].load}
	}
	g.picker = lb.New(algorithm, targets, uint64(time.Now().UnixNano()))
	return g
}

// lookup finds the frontend a connection to orig was headed to. Node ports are
// looked up last, as in the kernel; local reports whether an address is this
// node's own.
func (t *table) lookup(proto service.Protocol, orig netip.AddrPort, local func(netip.Addr) bool) (front, bool) {
	if f, ok := t.portals[portal{orig, proto}]; ok {
		return f, true
	}
	f, ok := t.nodePorts[nodePort{orig.Port(), service.FamilyOf(orig.Addr()), proto}]
	if !ok || !local(orig.Addr()) {
		return front{}, false
	}
	return f, true
}

// group returns the endpoints that c's connections may go to. The plan decides
// which; this only finds the picker made for them.
func (t *table) group(f front, c plan.Client) *group {
	g := &f.view.groups[f.Family]
	if sameSlice(f.view.plan.Backends(f.Frontend, c, t.pods), f.view.plan.Groups[f.Family].Cluster) {
		return g.cluster
	}
	return g.local
}

// sameSlice reports whether a and b are the same elements in memory.
func sameSlice(a, b []plan.Backend) bool {
	return len(a) == len(b) && (len(a) == 0 || unsafe.SliceData(a) == unsafe.SliceData(b))
}
