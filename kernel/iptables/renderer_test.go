package iptables_test

import (
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/iptables"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/test/kerneltest"
)

// TestRendererFollows: whatever became of the plan, a Renderer that remembers
// gives what one gives that doesn't, and what it gave before stays as it was.
func TestRendererFollows(t *testing.T) {
	t.Parallel()
	for seed := range uint64(8) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 1))
			size := []int{3, 30, 300}[seed%3]
			r := iptables.NewRenderer(options())
			wanted := map[int]*plan.Service{}
			var before, beforeText kernel.Ruleset
			var last *plan.Plan
			for range 40 {
				for range 1 + rng.IntN(size/3) {
					if i := rng.IntN(size); rng.IntN(3) == 0 {
						delete(wanted, i)
					} else {
						wanted[i] = anyService(rng, i)
					}
				}
				mode := plan.ModeIPTables
				if rng.IntN(10) == 0 {
					mode = plan.ModeUserspace
				}
				p := kerneltest.Plan(mode, values(wanted)...)
				if mode == plan.ModeUserspace {
					for i, s := range p.Services {
						c := *s
						c.Kernel, c.KernelHash = plan.None, 0
						p.Services[i] = &c
					}
				}
				got, want := r.Render(p, plan.Between(last, p)), iptables.Render(p, options())
				last = p
				if diff := difference(want, text(got)); diff != "" {
					t.Fatalf("(-from scratch +remembering):\n%s", diff)
				}
				if diff := difference(beforeText, text(before)); diff != "" {
					t.Fatalf("the last ruleset was changed (-was +is):\n%s", diff)
				}
				before, beforeText = got, want
			}
		})
	}
}

// difference is cmp.Diff, which takes long to find that large values are equal.
func difference(want, got kernel.Ruleset) string {
	if reflect.DeepEqual(want, got) {
		return ""
	}
	return cmp.Diff(want, got)
}

// TestRendererKeeps: what didn't change is recognised, without a look at it.
func TestRendererKeeps(t *testing.T) {
	t.Parallel()
	p := kerneltest.Plan(plan.ModeIPTables, kerneltest.Many(1000, 3)...)
	q := oneEndpointLess(p)
	r := iptables.NewRenderer(options())
	have := r.Render(p, plan.Between(nil, p))
	want := r.Render(q, plan.Between(p, q))
	changed := 0
	for i := range want.Chains[0] {
		h, w := &have.Chains[0][i], &want.Chains[0][i]
		if h.Maker != w.Maker {
			changed++
		}
	}
	if changed != 1 {
		t.Errorf("%d chains have other makers, want 1", changed)
	}
	if ops := kernel.Diff(have, want); len(ops.Chains[0]) != 1 {
		t.Errorf("%d chains have changed, want 1", len(ops.Chains[0]))
	}
	if again := r.Render(q, plan.Delta{}); !kernel.Diff(want, again).Empty() {
		t.Error("the same plan gave other chains")
	}
}

// text is r with the rules of all chains as text.
func text(r kernel.Ruleset) kernel.Ruleset {
	for f := range r.Chains {
		r.Chains[f] = slices.Clone(r.Chains[f])
		for i := range r.Chains[f] {
			c := &r.Chains[f][i]
			if c.Maker != nil {
				if c.Rules = c.Maker.MakeRules(c.Name); len(c.Rules) != c.Count {
					c.Rules = append(c.Rules, "the count is wrong")
				}
			}
			c.Maker, c.Count = nil, 0
		}
	}
	return r
}

func values(m map[int]*plan.Service) []*plan.Service {
	var out []*plan.Service
	for _, s := range m {
		out = append(out, s)
	}
	return out
}

// anyService is one of many kinds, at addresses that crowd together.
func anyService(rng *rand.Rand, i int) *plan.Service {
	var with []func(*plan.Service)
	address := fmt.Sprintf("10.96.%d.%d", rng.IntN(2), i%256)
	if rng.IntN(3) == 0 {
		address = "10.96.7.7" // many ports
	}
	with = append(with, kerneltest.Cluster(fmt.Sprintf("%s:%d", address, 1000+i)))
	if rng.IntN(4) == 0 {
		with = append(with, kerneltest.Cluster(fmt.Sprintf("[fd00::%x]:%d", i, 1000+i)), kerneltest.Endpoints(fmt.Sprintf("[fd01::%x]:80", rng.IntN(9)+1)))
	}
	if rng.IntN(3) == 0 {
		with = append(with, kerneltest.NodePort(uint16(30000+i)))
	}
	for range rng.IntN(4) {
		with = append(with, kerneltest.Endpoints(fmt.Sprintf("10.1.0.%d:80", rng.IntN(20)+1))) // several services have the same
	}
	s := kerneltest.Service(fmt.Sprint("s", i), service.TCP, with...)
	if rng.IntN(5) == 0 {
		s.Port.Affinity = time.Hour
	}
	return s
}
