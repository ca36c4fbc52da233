package kerneltest

import (
	"context"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// drains takes endpoints and services away from their connections, in the ways
// there are, and looks at what becomes of both.
func (m Mode) drains(t *testing.T) {
	if s := m.Open(t, &Faults{}); s.Drain == nil || s.Host == nil {
		return
	}
	web := func(endpoints ...string) *plan.Service {
		return Service("web", service.TCP, Kernel(m.Plane), Cluster("10.96.7.1:80"), Cluster("[fd00:96:7::1]:80"),
			NodePort(30080), Endpoints(endpoints...))
	}
	dns := func(endpoints ...string) *plan.Service {
		return Service("dns", service.UDP, Kernel(m.Plane), Cluster("10.96.7.1:53"), Cluster("[fd00:96:7::1]:53"), Endpoints(endpoints...))
	}
	other := Service("other", service.TCP, Kernel(m.Plane), Cluster("10.96.7.1:81"), Endpoints("10.244.7.1:8080"))
	both := []string{"10.244.7.1:8080", "10.244.7.2:8080", "[fd00:244:7::1]:8080", "[fd00:244:7::2]:8080"}
	one := []string{"10.244.7.1:8080", "[fd00:244:7::1]:8080"}
	unusable := web(one...)
	Unusable("10.244.7.2:8080", false)(unusable)
	Unusable("[fd00:244:7::2]:8080", false)(unusable)
	ways := []struct {
		name string
		to   []*plan.Service
	}{
		{"an endpoint goes", []*plan.Service{web(one...), dns(one...), other}},
		{"all endpoints go", []*plan.Service{web(), dns(), other}},
		{"an endpoint isn't usable", []*plan.Service{unusable, other}},
		{"a service goes", []*plan.Service{other}},
		{"everything goes", nil},
	}
	t.Run("somebody always answers", func(t *testing.T) {
		s := m.Open(t, &Faults{})
		m.bring(t, s, m.plan(web(one...), other))
		m.bring(t, s, m.plan(web("10.244.7.2:8080", "[fd00:244:7::2]:8080"), other))
		if vacant := s.Host.Vacant(); len(vacant) > 0 {
			t.Errorf("for a moment nobody answered at %v", vacant)
		}
	})
	for _, way := range ways {
		t.Run(way.name, func(t *testing.T) {
			m.drain(t, m.plan(web(both...), dns(both...), other), m.plan(way.to...), way.name == "an endpoint isn't usable")
		})
	}
}

func (m Mode) plan(services ...*plan.Service) kernel.Ruleset {
	for _, s := range services {
		settle(s)
	}
	p := Plan(m.Mode, services...)
	p.Policy.NodeAddresses = []netip.Addr{netip.MustParseAddr("198.51.100.77"), netip.MustParseAddr("2001:db8:7::7")}
	rehash(p)
	return m.Render(p)
}

// drain goes from one ruleset to another while there are connections. Listed
// says that endpoints only stop being usable: their connections last, however
// long.
func (m Mode) drain(t *testing.T, from, to kernel.Ruleset, listed bool) {
	drained := func(t *testing.T) System {
		s := m.Open(t, &Faults{})
		m.bring(t, s, from)
		for range 5 {
			s.Host.Connect(rand.New(rand.NewPCG(3, 3)))
		}
		m.bring(t, s, to)
		servers, err := s.Host.Table().List()
		if err != nil {
			t.Fatal(err)
		}
		for _, v := range servers {
			wanted, _ := to.Virtual(v.Protocol, v.Address)
			if _, own := from.Virtual(v.Protocol, v.Address); own && v.Protocol == service.UDP && !slices.Equal(v.Reals, wanted.Reals) {
				t.Errorf("flows of UDP at %s aren't free to go elsewhere: real servers %v, want %v", v.Address, v.Reals, wanted.Reals)
			}
		}
		if left := m.goOn(t, s); (left == 0) != listed {
			t.Errorf("%d real servers are left to drain", left)
		}
		return s
	}
	t.Run("connections end", func(t *testing.T) {
		s := drained(t)
		s.settle(t)
		m.uncut(t, s)
		m.same(t, s, to)
	})
	t.Run("in a later run", func(t *testing.T) {
		s := drained(t).restarted(t)
		m.goOn(t, s)
		m.uncut(t, s)
		s.settle(t)
		m.uncut(t, s)
		m.same(t, s, to)
	})
	t.Run("it returns", func(t *testing.T) {
		s := drained(t)
		m.bring(t, s, from)
		if left := m.goOn(t, s); left != 0 {
			t.Errorf("%d real servers are left to drain", left)
		}
		m.uncut(t, s)
		m.same(t, s, from)
	})
	t.Run("the time is up", func(t *testing.T) {
		s := drained(t)
		s.Host.Advance(24 * time.Hour)
		if left := m.goOn(t, s); left != 0 {
			t.Errorf("a day later %d real servers are left to drain", left)
		}
		if cut := s.Host.Cut(); (len(cut) == 0) != listed {
			t.Errorf("connections that were cut off: %v", cut)
		}
		m.same(t, s, to)
	})
}

func (m Mode) goOn(t *testing.T, s System) int {
	t.Helper()
	left, err := s.Drain(context.Background())
	if err != nil {
		t.Fatalf("Drain: %v", err)
	}
	return left
}

func (m Mode) uncut(t *testing.T, s System) {
	t.Helper()
	if cut := s.Host.Cut(); len(cut) > 0 {
		t.Errorf("connections were cut off: %v", cut)
	}
}

// foreignReals puts foreign real servers into kproxy's virtual servers and changes
// those in every way.
func (m Mode) foreignReals(t *testing.T) {
	s := m.Open(t, &Faults{})
	if s.AddForeign == nil {
		return
	}
	web := func(endpoint string) kernel.Ruleset {
		return m.plan(Service("web", service.TCP, Kernel(m.Plane), Cluster("10.96.7.1:80"), Endpoints(endpoint)))
	}
	m.bring(t, s, web("10.244.7.1:8080"))
	have := observe(t, s)
	v, ok := have.Virtual(service.TCP, netip.MustParseAddrPort("10.96.7.1:80"))
	if !ok {
		t.Fatalf("the service has no virtual server among %v", have.Virtuals)
	}
	s.AddForeign(t, v)
	foreign := s.Foreign(t)
	if !strings.Contains(foreign, v.Address.String()) {
		t.Fatalf("there is no real server at %s among:\n%s", v.Address, foreign)
	}
	for _, step := range []struct {
		what string
		want kernel.Ruleset
	}{
		{"the same plan", web("10.244.7.1:8080")},
		{"another endpoint", web("10.244.7.2:8080")},
		{"no service", m.plan()},
		{"the service again", web("10.244.7.3:8080")},
		{"nothing at all", kernel.Ruleset{}},
	} {
		m.bring(t, s, step.want)
		m.goOn(t, s)
		if diff := gocmp.Diff(foreign, s.Foreign(t)); diff != "" {
			t.Fatalf("foreign state after %s (-before +after):\n%s", step.what, diff)
		}
		s = s.restarted(t)
	}
	s.RemoveForeign(t)
	s.settle(t)
	m.bring(t, s, kernel.Ruleset{})
	m.same(t, s, kernel.Ruleset{})
}

// foreignServer has a foreign virtual server at an address that a service wants: only
// that service fails, until the foreigner has gone.
func (m Mode) foreignServer(t *testing.T) {
	s := m.Open(t, &Faults{})
	if s.Take == nil {
		return
	}
	s.take(t, true)
	foreign := s.Foreign(t)
	web := Service("web", service.TCP, Kernel(m.Plane), Cluster("10.96.0.1:80"), NodePort(30080), Endpoints("10.244.7.1:8080"))
	other := Service("other", service.TCP, Kernel(m.Plane), Cluster("10.96.0.1:81"), Cluster("10.96.0.2:80"), Endpoints("10.244.7.1:8080"))
	for range 2 {
		m.bring(t, s, m.plan(web, other))
		if diff := gocmp.Diff(foreign, s.Foreign(t)); diff != "" {
			t.Fatalf("foreign state (-before +after):\n%s", diff)
		}
		have := observe(t, s)
		for _, a := range []string{"10.96.0.1:81", "10.96.0.2:80"} {
			if v, ok := have.Virtual(service.TCP, netip.MustParseAddrPort(a)); !ok || len(v.Reals) == 0 {
				t.Errorf("the other service lacks its virtual server at %s: %v", a, v)
			}
		}
		s = s.restarted(t)
	}
	m.bring(t, s, m.plan(other))
	m.bring(t, s, m.plan(web, other))
	s.take(t, false)
	m.bring(t, s, m.plan(web, other))
	s.settle(t)
	m.same(t, s, m.plan(web, other))
}
