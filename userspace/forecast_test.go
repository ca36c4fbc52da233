package userspace

import (
	"net/netip"
	"testing"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

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
