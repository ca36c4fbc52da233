package steering

import (
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/service"
)

// TestSteeringComesFirstOverVirtualServers: the virtual servers of an earlier kproxy,
// and their addresses, stay while steering's rules are written.
func TestSteeringComesFirstOverVirtualServers(t *testing.T) {
	have := kernel.Ruleset{
		Virtuals:  []kernel.Virtual{{Scheduler: "rr"}},
		Addresses: []netip.Addr{netip.MustParseAddr("10.96.0.1")},
	}
	ops := kernel.Diff(have, withShared(have, kernel.Ruleset{}))
	if !ops.Empty() {
		t.Errorf("writing steering's rules does %+v, want nothing", ops)
	}
}

// TestSteeringComesFirstOverAnotherMode: where an earlier kproxy led connections to
// another data plane, steering comes first and the way to that one stays,
// until the services' new rules are there.
func TestSteeringComesFirstOverAnotherMode(t *testing.T) {
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
		t.Errorf("steering over the rules of another mode (-want +got):\n%s", diff)
	}
}
