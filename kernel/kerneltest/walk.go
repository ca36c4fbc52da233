package kerneltest

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"time"

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
}

// NewWalk returns a walk over plans of at most size services, whose kernel
// rules are those of the data plane beneath.
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
	p := Plan(w.mode, all...)
	p.Policy.PodCIDRs = []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("fd00:244::/64")}
	return p
}

// service makes the i-th service, different each time. Its addresses are
// nobody else's.
func (w *Walk) service(i int) *plan.Service {
	one := func(n int) bool { return w.rng.IntN(n) == 0 }
	protocols := []service.Protocol{service.TCP, service.TCP, service.UDP, service.SCTP}
	s := Service(fmt.Sprintf("walk-%d", i), protocols[i%len(protocols)], Algorithm(service.Algorithms[w.rng.IntN(len(service.Algorithms))]))
	s.Beneath = w.beneath
	if one(2) {
		InUserspace(s)
	}
	if one(3) {
		Affinity(time.Duration(1+w.rng.IntN(3)) * time.Hour)(s)
	}
	for range w.rng.IntN(5) {
		id := w.rng.IntN(200)
		Endpoint(fmt.Sprintf("10.244.%d.%d:8080", i, id), uint32(w.rng.IntN(4)), one(3))(s)
		Endpoint(fmt.Sprintf("[fd00:244::%x:%x]:8080", i, id), uint32(w.rng.IntN(4)), one(3))(s)
	}
	unique(s)
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

// unique drops endpoints that came twice.
func unique(s *plan.Service) {
	for f := range s.Groups {
		seen := map[netip.AddrPort]bool{}
		keep := func(in []plan.Backend) (out []plan.Backend) {
			for _, b := range in {
				if !seen[b.Address] {
					seen[b.Address] = true
					out = append(out, b)
				}
			}
			return out
		}
		s.Groups[f].Cluster = keep(s.Groups[f].Cluster)
		clear(seen)
		s.Groups[f].Local = keep(s.Groups[f].Local)
	}
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
