package kerneltest

import (
	"context"
	"net/netip"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

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
		if _, err := s.Drain(context.Background()); err != nil {
			t.Fatalf("Drain: %v", err)
		}
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

// plan renders services on a node with addresses.
func (m Mode) plan(services ...*plan.Service) kernel.Ruleset {
	p := Plan(m.Mode, services...)
	p.Policy.NodeAddresses = []netip.Addr{netip.MustParseAddr("198.51.100.77"), netip.MustParseAddr("2001:db8:7::7")}
	return m.Render(p)
}
