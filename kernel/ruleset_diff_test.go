package kernel_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/service"
)

func TestDiff(t *testing.T) {
	owner := service.Key{Namespace: "default", Name: "web"}
	chain := func(name string, rules ...string) kernel.Chain {
		return kernel.Chain{Table: "nat", Name: name, Rules: rules}
	}
	set := func(name string, entries ...string) kernel.Set {
		return kernel.Set{Name: name, Type: kernel.HashIP, Entries: entries}
	}
	bare := func(name string) kernel.Set { return set(name) }
	dynamic := func(name string) kernel.Set {
		return kernel.Set{Name: name, Type: kernel.HashIP, Dynamic: true, Owner: owner}
	}
	jump := kernel.Jump{Table: "nat", From: "OUTPUT", Rule: "-j KPROXY-A"}
	last := kernel.Jump{Table: "nat", From: "OUTPUT", Rule: "-j KPROXY-A", Last: true}
	four := func(c ...kernel.Chain) [2][]kernel.Chain { return [2][]kernel.Chain{c, nil} }
	tests := []struct {
		name       string
		have, want kernel.Ruleset
		ops        kernel.Ops
	}{
		{"nothing", kernel.Ruleset{}, kernel.Ruleset{}, kernel.Ops{}},
		{
			"everything is new",
			kernel.Ruleset{},
			kernel.Ruleset{Sets: []kernel.Set{set("KPROXY-1", "10.0.0.1")}, Chains: four(chain("KPROXY-A", "-j RETURN")), Jumps: [2][]kernel.Jump{{jump}, nil}},
			kernel.Ops{
				CreateSets: []kernel.Set{bare("KPROXY-1")},
				AddEntries: []kernel.SetEntries{{Set: bare("KPROXY-1"), Entries: []string{"10.0.0.1"}}},
				Chains:     four(chain("KPROXY-A", "-j RETURN")), AddJumps: [2][]kernel.Jump{{jump}, nil},
			},
		},
		{
			"everything goes",
			kernel.Ruleset{Sets: []kernel.Set{set("KPROXY-1", "10.0.0.1"), set("KPROXY-2")}, Chains: four(chain("KPROXY-A", "-j RETURN")), Jumps: [2][]kernel.Jump{{jump}, nil}},
			kernel.Ruleset{},
			kernel.Ops{DelJumps: [2][]kernel.Jump{{jump}, nil}, DelChains: four(chain("KPROXY-A")), DestroySets: []string{"KPROXY-2", "KPROXY-1"}},
		},
		{
			"what is the same stays",
			kernel.Ruleset{Chains: four(chain("KPROXY-A", "-j RETURN"), chain("KPROXY-B", "-j RETURN"), chain("KPROXY-D"))},
			kernel.Ruleset{Chains: four(chain("KPROXY-A", "-j RETURN"), chain("KPROXY-B", "-j ACCEPT"), chain("KPROXY-C"))},
			kernel.Ops{Chains: four(chain("KPROXY-B", "-j ACCEPT"), chain("KPROXY-C")), DelChains: four(chain("KPROXY-D"))},
		},
		{
			"owners don't matter",
			kernel.Ruleset{Chains: four(chain("KPROXY-A", "-j RETURN"))},
			kernel.Ruleset{Chains: four(kernel.Chain{Table: "nat", Name: "KPROXY-A", Rules: []string{"-j RETURN"}, Owner: owner})},
			kernel.Ops{},
		},
		{
			"entries",
			kernel.Ruleset{Sets: []kernel.Set{set("KPROXY-1", "10.0.0.1", "10.0.0.3"), set("KPROXY-2", "10.0.0.2")}},
			kernel.Ruleset{Sets: []kernel.Set{set("KPROXY-1", "10.0.0.2", "10.0.0.3", "10.0.0.4"), set("KPROXY-2")}},
			kernel.Ops{
				AddEntries: []kernel.SetEntries{{Set: bare("KPROXY-1"), Entries: []string{"10.0.0.2", "10.0.0.4"}}},
				DelEntries: []kernel.SetEntries{{Set: bare("KPROXY-2"), Entries: []string{"10.0.0.2"}}, {Set: bare("KPROXY-1"), Entries: []string{"10.0.0.1"}}},
			},
		},
		{
			"entries of dynamic sets",
			kernel.Ruleset{Sets: []kernel.Set{set("KPROXY-1", "10.0.0.1")}},
			kernel.Ruleset{Sets: []kernel.Set{dynamic("KPROXY-1"), dynamic("KPROXY-2")}},
			kernel.Ops{CreateSets: []kernel.Set{dynamic("KPROXY-2")}},
		},
		{
			"a jump at another place",
			kernel.Ruleset{Jumps: [2][]kernel.Jump{nil, {jump}}},
			kernel.Ruleset{Jumps: [2][]kernel.Jump{nil, {last}}},
			kernel.Ops{AddJumps: [2][]kernel.Jump{nil, {last}}, DelJumps: [2][]kernel.Jump{nil, {jump}}},
		},
		{
			"a jump that is there twice",
			kernel.Ruleset{Jumps: [2][]kernel.Jump{{jump, jump}, nil}},
			kernel.Ruleset{Jumps: [2][]kernel.Jump{{jump}, nil}},
			kernel.Ops{DelJumps: [2][]kernel.Jump{{jump}, nil}},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got := kernel.Diff(tt.have, tt.want)
			if diff := cmp.Diff(tt.ops, got); diff != "" {
				t.Errorf("Diff (-want +got):\n%s", diff)
			}
			if got.Empty() != (tt.name == "nothing" || tt.name == "owners don't matter") {
				t.Errorf("Empty = %t", got.Empty())
			}
			if ops := kernel.Diff(tt.want, tt.want); !ops.Empty() {
				t.Errorf("Diff of equal rulesets = %+v", ops)
			}
		})
	}
}
