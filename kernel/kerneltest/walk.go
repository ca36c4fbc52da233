package kerneltest

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"time"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// Walk is a random walk over plans: each differs from the one before in a few
// services. The same seed gives the same walk.
type Walk struct {
	rng      *rand.Rand
	mode     plan.Mode
	beneath  plan.DataPlane
	services map[int]*plan.Service
	size     int
	node     []netip.Addr // the node's addresses
}

// NewWalk returns a walk over plans of at most size services, whose kernel
// rules are those of the data plane beneath; in mode auto, of either.
func NewWalk(seed uint64, mode plan.Mode, beneath plan.DataPlane, size int) *Walk {
	return &Walk{rng: rand.New(rand.NewPCG(seed, 1)), mode: mode, beneath: beneath, services: map[int]*plan.Service{}, size: size}
}

// Next takes a step.
func (w *Walk) Next() *plan.Plan {
	for range 1 + w.rng.IntN(w.size/2+1) {
		i := w.rng.IntN(w.size)
		if w.rng.IntN(4) == 0 {
			delete(w.services, i)
			continue
		}
		w.services[i] = w.service(i)
	}
	var all []*plan.Service
	for i := range w.size {
		if s := w.services[i]; s != nil {
			all = append(all, s)
		}
	}
	if w.node == nil || w.rng.IntN(6) == 0 {
		w.node = w.addresses()
	}
	p := Plan(w.mode, all...)
	p.Policy.PodCIDRs = []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("fd00:244::/64")}
	p.Policy.NodeAddresses = w.node
	rehash(p)
	return p
}

// addresses are what the node may have: those of its own and some that are
// service addresses as well. It always has one of each family.
func (w *Walk) addresses() []netip.Addr {
	out := []netip.Addr{netip.MustParseAddr("198.51.100.7"), netip.MustParseAddr("2001:db8:7::7")}
	for _, a := range []string{"198.51.100.8", "192.0.2.2", "192.0.2.4", "2001:db8:7::8", "2001:db8::4", "2001:db8::5"} {
		if w.rng.IntN(2) == 0 {
			out = append(out, netip.MustParseAddr(a))
		}
	}
	slices.SortFunc(out, netip.Addr.Compare)
	return out
}

// Taken is a virtual server for a foreigner to have: at the address of a service
// of every walk.
func Taken() kernel.Virtual {
	return kernel.Virtual{
		Protocol: service.TCP, Address: netip.MustParseAddrPort("10.96.0.1:80"), Scheduler: "lblc",
		Reals: []kernel.Real{{Address: netip.MustParseAddrPort("192.0.2.250:8080"), Weight: 7}},
	}
}

// service makes the i-th service, different each time. Its addresses are
// nobody else's.
func (w *Walk) service(i int) *plan.Service {
	one := func(n int) bool { return w.rng.IntN(n) == 0 }
	protocols := []service.Protocol{service.TCP, service.TCP, service.UDP, service.SCTP}
	s := Service(fmt.Sprintf("walk-%d", i), protocols[i%len(protocols)], Algorithm(service.Algorithms[w.rng.IntN(len(service.Algorithms))]))
	Beneath(w.beneath)(s)
	if w.mode == plan.ModeAuto && one(3) {
		Beneath(plan.IPTables)(s)
	}
	if one(2) {
		InUserspace(s)
	}
	if one(5) {
		Scheduler([]string{"sed", "lblc", "wlc"}[w.rng.IntN(3)])(s)
	}
	if one(3) {
		Affinity(time.Duration(1+w.rng.IntN(3)) * time.Hour)(s)
	}
	w.endpoints(s, i)
	external := func(f *plan.Frontend) {
		if one(2) {
			f.Local, f.ShortCircuit, f.Masquerade = true, true, plan.MasqueradeNodeLocal
		}
		if one(3) {
			f.SourceRanges = []netip.Prefix{netip.MustParsePrefix("198.51.100.0/24"), netip.MustParsePrefix("2001:db8:1::/48")}
		}
	}
	internal := func(f *plan.Frontend) {
		f.Masquerade = []plan.Masquerade{plan.MasqueradeNever, plan.MasqueradeUnlessPod, plan.MasqueradeAlways}[w.rng.IntN(3)]
	}
	Cluster(fmt.Sprintf("10.96.%d.%d:80", i/4, i), internal)(s)
	Cluster(fmt.Sprintf("[fd00:96::%x]:80", i*7), internal)(s)
	if one(2) {
		LoadBalancer(fmt.Sprintf("192.0.2.%d:80", i), external)(s)
		LoadBalancer(fmt.Sprintf("[2001:db8::%x]:80", i), external)(s)
	}
	if one(2) {
		NodePort(uint16(30000+i*5), func(f *plan.Frontend) { external(f); f.SourceRanges = nil })(s)
	}
	settle(s)
	return s
}

// endpoints gives the i-th service endpoints, out of few: those that a walk
// takes away come back.
func (w *Walk) endpoints(s *plan.Service, i int) {
	one := func(n int) bool { return w.rng.IntN(n) == 0 }
	taken := map[int]bool{}
	for range w.rng.IntN(5) {
		taken[w.rng.IntN(8)] = true
	}
	for _, id := range slices.Sorted(maps.Keys(taken)) {
		for _, a := range []string{fmt.Sprintf("10.244.%d.%d:8080", i, id), fmt.Sprintf("[fd00:244::%x:%x]:8080", i, id)} {
			if one(4) {
				Unusable(a, id%3 == 0)(s)
			} else {
				Endpoint(a, uint32(w.rng.IntN(4)), id%3 == 0)(s)
			}
		}
	}
	slices.SortFunc(s.Endpoints, func(a, b plan.Endpoint) int { return a.Address.Compare(b.Address) })
}

// settle gives frontends the verdict that their endpoints call for.
func settle(s *plan.Service) {
	for i := range s.Frontends {
		f := &s.Frontends[i]
		f.Verdict = plan.Forward
		f.Verdict = s.VerdictFor(&plan.Frontend{Family: f.Family, Local: f.Local, Verdict: plan.Reject}, plan.Client{}, nil)
		if f.Verdict == plan.Reject && f.Local && len(s.Groups[f.Family].Cluster) > 0 {
			f.Verdict = plan.Drop
		}
	}
}
