package plan

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"kproxy.dev/kproxy/health"
	"kproxy.dev/kproxy/service"
)

// t0 is when every test's world begins.
var t0 = time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)

var (
	testNode   = service.Node{Name: "n1", Zone: "zone-a", Addresses: addrs("192.168.0.1", "fd00:1::1")}
	testHealth = health.Defaults{Kind: service.CheckTCP, Interval: 2 * time.Second, Timeout: time.Second, Rise: 2, Fall: 3}
	allCaps    = capsOf(Capability{Name: "iptables", Supported: true}, Capability{Name: "ipvs", Reason: "not built"}, nil)
)

// capsOf returns the Caps of a host with two data planes: the preferred one has schedulers and
// can't tell clients apart, as IPVS; the other one can, as iptables.
func capsOf(iptables, ipvs Capability, unusable map[string]string) Caps {
	return Caps{Planes: []Abilities{
		{
			Plane: IPVS, Title: "IPVS", Host: ipvs, Otherwise: "scheduler rr", Schedulers: true, MissingSchedulers: unusable, Drains: true, LocalAddresses: true,
			Algorithms: map[service.Algorithm]string{
				service.RoundRobin: "rr", service.WeightedRoundRobin: "wrr", service.LeastConnections: "wlc", service.SourceHash: "sh", service.Maglev: "mh",
			},
		},
		{
			Plane: IPTables, Title: "iptables", Host: iptables, Otherwise: "random choice", TellsClients: true,
			Algorithms: map[service.Algorithm]string{service.RoundRobin: "", service.WeightedRoundRobin: "", service.Random: ""},
		},
	}}
}

// unusable makes schedulers unusable.
func unusable(why map[string]string) func(*world) {
	return func(w *world) {
		w.in.Caps.Planes = slices.Clone(w.in.Caps.Planes)
		w.in.Caps.Planes[0].MissingSchedulers = why
	}
}

// defaultScheduler is for services that ask for none.
func defaultScheduler(name string) func(*world) {
	return func(w *world) {
		w.in.Caps.Planes = slices.Clone(w.in.Caps.Planes)
		w.in.Caps.Planes[0].Scheduler = name
	}
}

func addrs(in ...string) []netip.Addr {
	var out []netip.Addr
	for _, s := range in {
		out = append(out, netip.MustParseAddr(s))
	}
	return out
}

func prefixes(in ...string) []netip.Prefix {
	var out []netip.Prefix
	for _, s := range in {
		out = append(out, netip.MustParsePrefix(s))
	}
	return out
}

// port returns a plain TCP service port "ns/name".
func port(name string, change ...func(*service.Port)) service.Port {
	p := service.Port{
		Key: service.Key{Namespace: "ns", Name: name, Protocol: service.TCP}, Created: t0, Number: 80,
		ClusterIPs: addrs("10.96.0.1"),
	}
	for _, c := range change {
		c(&p)
	}
	return p
}

// hints are e's, to be filled in.
func hints(e *service.Endpoint) *service.Hints {
	if e.Hints == nil {
		e.Hints = &service.Hints{}
	}
	return e.Hints
}

// endpoint parses what tests say of an endpoint: an address, then words.
//
//	"10.0.0.1 n1 ready", "10.0.0.2 n2 serving terminating zone:a,b node:n1 weight:3"
//
// The port is 8080 unless given.
func endpoint(s string) service.Endpoint {
	words := strings.Fields(s)
	e := service.Endpoint{Weight: 1}
	if ap, err := netip.ParseAddrPort(words[0]); err == nil {
		e.Address = ap
	} else {
		e.Address = netip.AddrPortFrom(netip.MustParseAddr(words[0]), 8080)
	}
	for _, w := range words[1:] {
		name, value, _ := strings.Cut(w, ":")
		switch name {
		case "ready":
			e.Ready, e.Serving = true, true
		case "serving":
			e.Serving = true
		case "terminating":
			e.Terminating = true
		case "zone":
			hints(&e).Zones = strings.Split(value, ",")
		case "node":
			hints(&e).Nodes = strings.Split(value, ",")
		case "weight":
			fmt.Sscan(value, &e.Weight)
		default:
			e.Node = w
		}
	}
	return e
}

func endpoints(in ...string) []service.Endpoint {
	var out []service.Endpoint
	for _, s := range in {
		out = append(out, endpoint(s))
	}
	return out
}

// world holds what a test hands to Compute, and the parts that the test changes.
type world struct {
	t  *testing.T
	in Inputs
	// ports and eps make the snapshot.
	ports  map[service.Key]service.Port
	eps    map[service.Key][]service.Endpoint
	states map[health.Target]health.State
	node   service.Node

	previous *Plan
	delta    Delta  // from the plan before to previous
	given    Inputs // the last time
	seen     map[health.Target]health.State
}

func newWorld(t *testing.T) *world {
	w := &world{
		t: t, ports: map[service.Key]service.Port{}, eps: map[service.Key][]service.Endpoint{},
		states: map[health.Target]health.State{}, node: testNode,
	}
	w.in = Inputs{
		Now: t0, Caps: allCaps, Policy: DefaultPolicy(),
		Observed: Observed{Carried: map[service.Key]uint64{}, Programmed: map[service.Key]uint64{}, Adopted: map[service.Key]bool{}},
		Failed:   map[service.Key]Failure{}, Pins: map[service.Key]service.Preference{},
	}
	w.in.Policy.Mode = ModeIPTables
	return w
}

func (w *world) set(p service.Port, eps ...string) {
	w.ports[p.Key] = p
	w.eps[p.Key] = endpoints(eps...)
}

// health sets the state of the endpoint at address (port 8080) of "ns/name".
func (w *world) health(name, address string, st health.Status, since time.Time, flaps ...time.Time) {
	p := w.ports[keyOf(name)]
	v := health.NewView(testHealth, nil)
	w.states[v.Target(&p, endpoint(address).Address)] = health.State{Status: st, Since: since, Flaps: flaps}
}

func (w *world) snapshot() *service.Snapshot {
	var b service.Builder
	b.SetNode(w.node)
	for k, p := range w.ports {
		if err := b.AddPort(p); err != nil {
			w.t.Fatal(err)
		}
		for _, e := range w.eps[k] {
			b.AddEndpoint(k, e)
		}
	}
	return b.Build()
}

// view is a copy of the health states.
func (w *world) view() *health.View {
	states := map[health.Target]health.State{}
	for t, s := range w.states {
		states[t] = s
	}
	return health.NewView(testHealth, states)
}

// compute makes the next plan, and checks what holds for every plan.
func (w *world) compute() *Plan {
	w.t.Helper()
	in := w.inputs()
	p, d := Compute(w.previous, in)
	checkPlan(w.t, &in, p)
	checkDelta(w.t, d, w.previous, p)
	w.previous, w.delta = p, d
	return p
}

// inputs makes of the world what Compute is told: as in the agent, with the dirty set.
func (w *world) inputs() Inputs {
	g := &w.given
	in := w.in
	in.Snapshot = updated(g.Snapshot, w.snapshot())
	in.Observed.Carried, in.Observed.Programmed = maps.Clone(in.Observed.Carried), maps.Clone(in.Observed.Programmed)
	in.Failed, in.Pins = maps.Clone(in.Failed), maps.Clone(in.Pins)
	in.Health = g.Health
	if in.Health == nil || !reflect.DeepEqual(w.seen, w.states) {
		in.Health, w.seen = w.view(), maps.Clone(w.states)
	} else {
		in.Dirty = map[service.Key]bool{}
		markDiffering(in.Dirty, g.Observed.Carried, in.Observed.Carried)
		markDiffering(in.Dirty, g.Observed.Programmed, in.Observed.Programmed)
		markDiffering(in.Dirty, g.Failed, in.Failed)
		markDiffering(in.Dirty, g.Pins, in.Pins)
		w.markEjected(in.Dirty, g.Ejected, in.Ejected)
	}
	w.given = in
	return in
}

// markEjected marks the service ports of the previous plan with an endpoint of which was and is don't say the same.
func (w *world) markEjected(dirty map[service.Key]bool, was, is *health.Ejections) {
	for _, s := range w.previous.Services {
		for i := range s.Endpoints {
			at := health.Endpoint{Protocol: s.Port.Protocol, Address: s.Endpoints[i].Address}
			if was.Of(at) != is.Of(at) {
				dirty[s.Port.Key] = true
			}
		}
	}
}

// markDiffering marks the keys of what was and is don't have alike.
func markDiffering[V comparable](dirty map[service.Key]bool, was, is map[service.Key]V) {
	for _, m := range []map[service.Key]V{was, is} {
		for k := range m {
			before, there := was[k]
			if now, stays := is[k]; there != stays || before != now {
				dirty[k] = true
			}
		}
	}
}

// sameDecision reports whether others see the same in both.
func sameDecision(t *testing.T, a, b *Service) bool {
	return a == b || a != nil && b != nil && dumpServices(t, &Plan{Services: []*Service{a}}) == dumpServices(t, &Plan{Services: []*Service{b}})
}

// checkDelta compares what Compute says has changed with both plans.
func checkDelta(t *testing.T, d Delta, old, p *Plan) {
	t.Helper()
	if d.Full != (old == nil) {
		t.Fatalf("the delta is full: %v", d.Full)
	}
	checkChanges(t, d, old, p)
}

// checkChanges checks that d leads from old to p, in order, and names what differs.
func checkChanges(t *testing.T, d Delta, old, p *Plan) {
	t.Helper()
	if !slices.IsSortedFunc(d.Changes, func(a, b Change) int { return cmp.Or(a.Key().Compare(b.Key()), 1) }) {
		t.Fatal("changes are out of order")
	}
	changes := map[service.Key]Change{}
	for _, c := range d.Changes {
		changes[c.Key()] = c
	}
	for _, c := range Between(old, p).Changes {
		got, changed := changes[c.Key()]
		if !changed && !sameDecision(t, c.Was, c.Is) || changed && !(sameDecision(t, got.Was, c.Was) && sameDecision(t, got.Is, c.Is)) {
			t.Fatalf("%s: the delta has %v, want %v", c.Key(), got, c)
		}
		delete(changes, c.Key())
	}
	if len(changes) > 0 {
		t.Fatalf("the delta has what neither plan has: %v", changes)
	}
}

// updated returns next with what it has in common with was taken from there.
func updated(was, next *service.Snapshot) *service.Snapshot {
	if was == nil {
		return next
	}
	var changed []service.Name
	for _, s := range [][2]*service.Snapshot{{was, next}, {next, was}} {
		for i := range s[0].Len() {
			p, _, hash := s[0].At(i)
			if j, there := s[1].Find(p.Key); there {
				if q, _, other := s[1].At(j); other == hash && q.Source == p.Source {
					continue
				}
			}
			changed = append(changed, service.Name{Namespace: p.Namespace, Name: p.Name})
		}
	}
	if len(changed) == 0 && reflect.DeepEqual(was.Node(), next.Node()) {
		return was
	}
	return was.With(next, changed)
}

// one computes and returns the only service.
func (w *world) one() *Service {
	w.t.Helper()
	p := w.compute()
	if len(p.Services) != 1 {
		w.t.Fatalf("plan has %d services, want 1", len(p.Services))
	}
	return p.Services[0]
}

// program makes the kernel hold the rules of the last plan.
func (w *world) program() {
	for _, s := range w.previous.Services {
		w.in.Observed.Programmed[s.Port.Key] = s.KernelHash
	}
}
