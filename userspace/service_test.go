package userspace

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// randomPlan changes a random part of old. As with plan.Compute, what didn't
// change is shared. Services contest a few addresses; each has one owner.
func randomPlan(r *rand.Rand, old *plan.Plan) *plan.Plan {
	had := map[string]*plan.Service{}
	for _, s := range old.Services {
		had[s.Port.Name] = s
	}
	p := &plan.Plan{}
	taken := map[netip.AddrPort]bool{}
	for i := range 12 {
		name := fmt.Sprintf("s%02d", i)
		if s := had[name]; s != nil && r.IntN(3) > 0 && !taken[s.Frontends[0].Address] {
			taken[s.Frontends[0].Address] = true
			p.Services = append(p.Services, s)
			continue
		}
		a := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 96, 0, byte(r.IntN(16))}), 80)
		d := testService{name: name, proto: service.UDP, vip: a}
		for j := range r.IntN(3) {
			d.eps = append(d.eps, netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 2, byte(j), byte(r.IntN(4))}), 1))
		}
		if r.IntN(5) == 0 {
			d.front = func(f *plan.Frontend) {
				f.Kind, f.Address = plan.NodePort, netip.AddrPortFrom(netip.Addr{}, 30000+uint16(a.Addr().As4()[3]))
			}
		}
		s := testPlan(d).Services[0]
		if at := s.Frontends[0].Address; r.IntN(4) > 0 && !taken[at] {
			taken[at] = true
			p.Services = append(p.Services, s)
		}
	}
	return p
}

// contents returns what a table says, for comparison.
func (t *table) contents() map[string]string {
	m := map[string]string{}
	for k, f := range t.fronts {
		m[fmt.Sprint(k)] = fmt.Sprint(f.view.plan.Port.Key, f.view.plan.Groups)
	}
	for a, n := range t.addrs {
		m[a.String()] = fmt.Sprint(n)
	}
	return m
}

// Whatever plans came before, prepared or committed: after Prepare everything
// in the plan is served by what it says, and after Commit nothing else is.
func TestRandomWalkOverPlans(t *testing.T) {
	for seed := range uint64(10) {
		r := rand.New(rand.NewPCG(seed, 1))
		s := New(Config{})
		p := &plan.Plan{}
		var last *plan.Plan // prepared
		for step := range 100 {
			p = randomPlan(r, p)
			fresh := New(Config{})
			serve(fresh, p)
			want := fresh.table.contents()
			d := plan.Between(last, p)
			if last != nil {
				d.Full = false
				d.Changes = slices.DeleteFunc(d.Changes, func(c plan.Change) bool { return c.Was == c.Is })
			}
			s.Prepare(p, d)
			last = p
			if r.IntN(3) == 0 {
				continue
			}
			got := s.table.contents()
			for k := range want {
				if got[k] == "" {
					t.Fatalf("seed %d step %d: %s isn't served after Prepare", seed, step, k)
				}
			}
			s.Commit()
			if diff := cmp.Diff(want, s.table.contents()); diff != "" {
				t.Fatalf("seed %d step %d (-want +got):\n%s", seed, step, diff)
			}
			if len(s.plans.views) != len(p.Services) {
				t.Fatalf("seed %d step %d: %d views of %d services", seed, step, len(s.plans.views), len(p.Services))
			}
		}
	}
}

// Clients of a service don't notice that its endpoints change all the time.
func TestPlansChangeUnderLoad(t *testing.T) {
	var eps []netip.AddrPort
	for i := range 4 {
		eps = append(eps, tcpEndpoint(t, named(fmt.Sprint(i))))
	}
	s := start(t, Config{}, testPlan(testService{name: "s", eps: eps}))
	var stop atomic.Bool
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for !stop.Load() {
				c, err := tryDial(netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), s.tcp[0].port))
				if err != nil {
					t.Error(err)
					return
				}
				if _, err := tryAsk(c, "x"); err != nil {
					t.Error(err)
				}
				c.SetLinger(0)
				c.Close()
			}
		})
	}
	r := rand.New(rand.NewPCG(1, 2))
	for i := range 300 {
		some := eps[r.IntN(3):]
		p := testPlan(testService{name: "s", eps: some, port: service.Port{Algorithm: service.Algorithms[i%len(service.Algorithms)]}})
		prepare(s, p)
		countersOf(s, testServiceKey("s"))
		s.Connections()
		s.Commit()
	}
	stop.Store(true)
	wg.Wait()
	eventually(t, "all have ended", func() bool { return countersOf(s, testServiceKey("s")).Active == 0 })
	c := countersOf(s, testServiceKey("s"))
	if c.Failed != 0 || c.Retried != 0 {
		t.Errorf("counters %+v", c)
	}
	for _, e := range c.Endpoints {
		if e.Active != 0 {
			t.Errorf("endpoint %+v, want none active", e)
		}
	}
}

// An endpoint that has departed is forgotten with its last connection, not only when its
// service changes again.
func TestDepartedEndpointsAreForgotten(t *testing.T) {
	a, b := tcpEndpoint(t, named("a")), tcpEndpoint(t, named("b"))
	s := start(t, Config{}, testPlan(testService{name: "s", eps: []netip.AddrPort{a}}))
	c := connect(t, s)
	ask(t, c, "x")
	next := testPlan(testService{name: "s", eps: []netip.AddrPort{b}})
	serve(s, next)
	ask(t, connect(t, s), "x")
	if n := len(countersOf(s, testServiceKey("s")).Endpoints); n != 2 {
		t.Fatalf("%d endpoints are known while both have connections", n)
	}
	c.Close()
	eventually(t, "the departed endpoint is forgotten", func() bool {
		e := countersOf(s, testServiceKey("s")).Endpoints
		return len(e) == 1 && e[0].Address == b
	})
}

// TestForecast: the endpoint that is foretold takes the next connection; asking
// costs nobody a turn, and an address of no service has no forecast.
func TestForecast(t *testing.T) {
	eps := []netip.AddrPort{tcpEndpoint(t, named("a")), tcpEndpoint(t, named("b")), tcpEndpoint(t, named("c"))}
	s := start(t, Config{}, testPlan(testService{name: "web", eps: eps}))
	client := plan.Client{Address: netip.MustParseAddr("127.0.0.1"), Node: true}
	names := map[netip.AddrPort]string{eps[0]: "a", eps[1]: "b", eps[2]: "c"}
	for range 7 {
		f, ok := s.Forecast(service.TCP, vip, client)
		if !ok || len(f.Endpoints) != 3 || f.Retries != 3 {
			t.Fatalf("Forecast = %+v, %v", f, ok)
		}
		next := ""
		for _, e := range f.Endpoints {
			if e.Share < 0.33 || e.Share > 0.34 {
				t.Errorf("%s has a share of %v, want a third", e.Address, e.Share)
			}
			if e.Source.IsValid() {
				t.Errorf("%s sees %s, want the node's address", e.Address, e.Source)
			}
			if e.Next {
				next += names[e.Address]
			}
		}
		if got := ask(t, connect(t, s), "hi"); got != next+" hi" {
			t.Errorf("%q was foretold, %q answered", next, got)
		}
	}
	if f, ok := s.Forecast(service.UDP, vip, client); ok {
		t.Errorf("Forecast of an address of no service = %+v", f)
	}
}
