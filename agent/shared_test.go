package agent

import (
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/service"
)

// TestPortalOpensOverVirtualServers: the virtual servers of an earlier kproxy,
// and their addresses, stay while the portal is opened.
func TestPortalOpensOverVirtualServers(t *testing.T) {
	have := kernel.Ruleset{
		Virtuals:  []kernel.Virtual{{Scheduler: "rr"}},
		Addresses: []netip.Addr{netip.MustParseAddr("10.96.0.1")},
	}
	ops := kernel.Diff(have, withShared(have, kernel.Ruleset{}))
	if !ops.Empty() {
		t.Errorf("opening the portal does %+v, want nothing", ops)
	}
}

// TestPortalOpensOverAnotherMode: where an earlier kproxy led connections to
// another data plane, the portal comes first and the way to that one stays,
// until the services' new rules are there.
func TestPortalOpensOverAnotherMode(t *testing.T) {
	chain := func(name string, rules ...string) kernel.Chain {
		return kernel.Chain{Table: "nat", Name: name, Rules: rules}
	}
	var have, shared kernel.Ruleset
	have.Chains[service.IPv4] = []kernel.Chain{
		chain("KPROXY-DISPATCH", "-d 10.96.0.1/32 -j KPROXY-SVC-A"),
		chain("KPROXY-PORTAL", "-p tcp -j REDIRECT --to-ports 1"),
		chain("KPROXY-SERVICES", "-m mark --mark 0x1 -j RETURN", "-j KPROXY-PORTAL", `-m comment --comment "all others" -j KPROXY-DISPATCH`, "-j KPROXY-GONE"),
	}
	shared.Chains[service.IPv4] = []kernel.Chain{
		chain("KPROXY-PORTAL", "-p tcp -j REDIRECT --to-ports 2"),
		chain("KPROXY-SERVICES", "-m mark --mark 0x2 -j RETURN", "-j KPROXY-PORTAL", "-j KPROXY-VIRTUAL"),
		chain("KPROXY-VIRTUAL", "-j CONNMARK"),
	}
	want := []kernel.Chain{
		have.Chains[service.IPv4][0],
		shared.Chains[service.IPv4][0],
		chain("KPROXY-SERVICES", "-m mark --mark 0x2 -j RETURN", "-j KPROXY-PORTAL", "-j KPROXY-VIRTUAL", `-m comment --comment "all others" -j KPROXY-DISPATCH`),
		shared.Chains[service.IPv4][2],
	}
	got := withShared(have, shared)
	if diff := cmp.Diff(want, got.Chains[service.IPv4]); diff != "" {
		t.Errorf("the portal over the rules of another mode (-want +got):\n%s", diff)
	}
}

// TestDamageIsFoundWhileAServiceFails: although one service can't be programmed,
// the watch knows what the kernel holds of the others.
func TestDamageIsFoundWhileAServiceFails(t *testing.T) {
	m := newModelHost(t)
	p := twoServices()
	m.backend.refuses = p.Services[1].Port.Key
	if err := m.pass(t.Context(), p); err == nil {
		t.Fatal("the pass succeeded although a service was refused")
	}
	told := m.rules.watch.(*expectations).told
	if told == nil {
		t.Fatal("the watch wasn't told what there is")
	}
	have, err := m.rules.Observe(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if ops := kernel.Diff(have, *told); !ops.Empty() || len(told.Chains[service.IPv4]) == 0 {
		t.Errorf("the watch was told of %+v, and the kernel has more or less than that: %+v", told, ops)
	}
	dynamic := map[string]bool{}
	for _, s := range told.Sets {
		dynamic[s.Name] = s.Dynamic
	}
	for name, want := range map[string]bool{"KPROXY-ALIVE-4": true, "KPROXY-USER-4": true, "KPROXY-ENDPOINT-4": false} {
		if got, found := dynamic[name]; got != want || !found {
			t.Errorf("the watch was told of set %s: %v, with entries that come and go: %v; want %v", name, found, got, want)
		}
	}
}
