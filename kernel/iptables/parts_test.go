package iptables

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/service"
)

// manyChains returns the chains of n services and of their tree, sorted.
func manyChains(n int) []kernel.Chain {
	var leaves []leaf
	var chains []kernel.Chain
	for i := range n {
		key := service.Key{Namespace: "ns", Name: fmt.Sprint("s", i), Protocol: service.TCP}
		own, behind := kernel.ChainName(kindCluster, key), kernel.ChainName(kindEndpoint, key)
		chains = append(chains,
			kernel.Chain{Table: "nat", Name: own, Owner: key, Rules: slices.Repeat([]string{"-j " + behind}, 10)},
			kernel.Chain{Table: "nat", Name: behind, Owner: key, Rules: []string{"-j RETURN"}})
		a := addrOf(uint32(10<<24 + i))
		leaves = append(leaves, leaf{addr: a, proto: service.TCP, port: 80, rule: toPort(a, service.TCP, 80, "x") + " -j " + own})
	}
	chains = append(chains, dispatch(leaves, nil)...)
	chains = append(chains, kernel.Chain{Table: "filter", Name: "KPROXY-INPUT", Rules: []string{"-j RETURN"}})
	slices.SortFunc(chains, kernel.CompareChains)
	return chains
}

// TestPartsLeadToWhatIsThere: every chain is written once, after all that it
// leads to, in commits of one table that are neither large nor, where many rules
// are in the kernel already, small.
func TestPartsLeadToWhatIsThere(t *testing.T) {
	t.Parallel()
	tests := []struct {
		variant         string
		services        int
		written         int
		atLeast, atMost int // commits
	}{
		{"nft", 0, 0, 2, 2},
		{"nft", 100, 0, 2, 2},
		{"nft", 3000, 0, 15, 25},
		{"nft", 3000, 120_000, 3, 5},
		{"legacy", 3000, 0, 2, 2},
	}
	for _, tt := range tests {
		t.Run(fmt.Sprint(tt.variant, " ", tt.services, " on ", tt.written), func(t *testing.T) {
			chains := manyChains(tt.services)
			b := &Backend{env: &steering.Env{Variant: kernel.Variant{Name: tt.variant}}, written: tt.written}
			parts := b.parts(chains)
			if len(parts) < tt.atLeast || len(parts) > tt.atMost {
				t.Errorf("%d commits, want %d to %d", len(parts), tt.atLeast, tt.atMost)
			}
			there := map[string]bool{}
			for _, part := range parts {
				for _, c := range part {
					if there[c.Table+c.Name] || c.Table != part[0].Table {
						t.Fatalf("%s %s is in a commit of %s, or in two", c.Table, c.Name, part[0].Table)
					}
					there[c.Table+c.Name] = true
				}
				for _, c := range part {
					for _, r := range c.Rules {
						if to := target(r); kernel.Own(to) && !there[c.Table+to] {
							t.Fatalf("%s leads to %s, which comes later", c.Name, to)
						}
					}
				}
			}
			if len(there) != len(chains) {
				t.Errorf("%d chains are written, want %d", len(there), len(chains))
			}
		})
	}
}

func addrOf(n uint32) netip.Addr {
	return netip.AddrFrom4([4]byte{byte(n >> 24), byte(n >> 16), byte(n >> 8), byte(n)})
}
