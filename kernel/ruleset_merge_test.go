package kernel_test

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/service"
)

func TestMerge(t *testing.T) {
	at, address := netip.MustParseAddrPort, netip.MustParseAddr
	web, dns := service.Key{Name: "web"}, service.Key{Name: "dns"}
	a := kernel.Ruleset{
		Sets: []kernel.Set{
			{Name: "KPROXY-ALIVE-4", Dynamic: true},
			{Name: "KPROXY-ENDPOINT-4", Entries: []string{"a", "c"}},
			{Name: "KPROXY-PODS-4", Entries: []string{"p"}},
		},
		Virtuals: []kernel.Virtual{{Address: at("10.96.0.1:80"), Scheduler: "rr"}},
	}
	a.Chains[0] = []kernel.Chain{{Table: "nat", Name: "KPROXY-PORTAL", Rules: []string{"-j A"}}, {Table: "nat", Name: "KPROXY-SVC-1", Owner: web}}
	a.Jumps[0] = []kernel.Jump{
		{Table: "nat", From: "PREROUTING", Rule: "-j KPROXY-SERVICES"}, {Table: "filter", From: "INPUT", Rule: "-j KPROXY-INPUT"},
		{Table: "filter", From: "INPUT", Rule: "-j KPROXY-ACCEPT", Last: true},
	}
	b := kernel.Ruleset{
		Sets: []kernel.Set{
			{Name: "KPROXY-ALIVE-4", Dynamic: true},
			{Name: "KPROXY-ENDPOINT-4", Entries: []string{"b", "c", "d"}},
			{Name: "KPROXY-VIP-4", Dynamic: true},
		},
		Virtuals:  []kernel.Virtual{{Address: at("10.96.0.1:53"), Protocol: service.UDP, Owner: dns}},
		Addresses: []netip.Addr{address("10.96.0.1")},
	}
	b.Chains[0] = []kernel.Chain{{Table: "filter", Name: "KPROXY-INPUT"}, {Table: "nat", Name: "KPROXY-VIRTUAL", Rules: []string{"-j B"}}}
	b.Jumps[0] = []kernel.Jump{{Table: "mangle", From: "INPUT", Rule: "-j KPROXY-INPUT"}}
	want := kernel.Ruleset{
		Sets: []kernel.Set{
			{Name: "KPROXY-ALIVE-4", Dynamic: true},
			{Name: "KPROXY-ENDPOINT-4", Entries: []string{"a", "b", "c", "d"}},
			{Name: "KPROXY-PODS-4", Entries: []string{"p"}},
			{Name: "KPROXY-VIP-4", Dynamic: true},
		},
		Virtuals:  []kernel.Virtual{{Address: at("10.96.0.1:53"), Protocol: service.UDP, Owner: dns}, {Address: at("10.96.0.1:80"), Scheduler: "rr"}},
		Addresses: []netip.Addr{address("10.96.0.1")},
	}
	want.Chains[0] = []kernel.Chain{
		{Table: "filter", Name: "KPROXY-INPUT"},
		{Table: "nat", Name: "KPROXY-PORTAL", Rules: []string{"-j A"}},
		{Table: "nat", Name: "KPROXY-SVC-1", Owner: web},
		{Table: "nat", Name: "KPROXY-VIRTUAL", Rules: []string{"-j B"}},
	}
	want.Jumps[0] = []kernel.Jump{
		{Table: "filter", From: "INPUT", Rule: "-j KPROXY-INPUT"},
		{Table: "filter", From: "INPUT", Rule: "-j KPROXY-ACCEPT", Last: true},
		{Table: "mangle", From: "INPUT", Rule: "-j KPROXY-INPUT"},
		{Table: "nat", From: "PREROUTING", Rule: "-j KPROXY-SERVICES"},
	}
	before := kernel.Ruleset{Sets: slices.Clone(a.Sets)}
	same := []cmp.Option{cmpopts.EquateComparable(netip.AddrPort{}, netip.Addr{}), cmpopts.EquateEmpty()}
	if diff := cmp.Diff(want, kernel.Merge(a, b), same...); diff != "" {
		t.Errorf("Merge (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(before.Sets, a.Sets, same...); diff != "" {
		t.Errorf("Merge modified what it was given (-before +after):\n%s", diff)
	}
	for _, r := range []kernel.Ruleset{kernel.Merge(want, kernel.Ruleset{}), kernel.Merge(kernel.Ruleset{}, want)} {
		if diff := cmp.Diff(want, r, same...); diff != "" {
			t.Errorf("Merge with nothing (-want +got):\n%s", diff)
		}
	}
}
