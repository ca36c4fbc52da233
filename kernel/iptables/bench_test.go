package iptables_test

import (
	"context"
	"fmt"
	"net/netip"
	"testing"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/iptables"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/test/kerneltest"
)

var sizes = []int{10, 100, 1000, 10000}

const endpointsEach = 10

func BenchmarkRender(b *testing.B) {
	for _, n := range sizes {
		p := kerneltest.Plan(plan.ModeIPTables, kerneltest.Many(n, endpointsEach)...)
		b.Run(fmt.Sprintf("from scratch/services=%d", n), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				iptables.Render(p, options())
			}
		})
		b.Run(fmt.Sprintf("one endpoint changed/services=%d", n), func(b *testing.B) {
			b.ReportAllocs()
			plans := [2]*plan.Plan{p, oneEndpointLess(p)}
			r := iptables.NewRenderer(options())
			r.Render(p, plan.Between(nil, p))
			for i := 0; b.Loop(); i++ {
				r.Render(plans[i%2], firstOf(plans[(i+1)%2], plans[i%2]))
			}
		})
	}
}

// oneEndpointLess is p with an endpoint of its first service gone.
func oneEndpointLess(p *plan.Plan) *plan.Plan {
	q := *p
	q.Services = append([]*plan.Service{}, p.Services...)
	s := *q.Services[0]
	s.Groups[0].Cluster = s.Groups[0].Cluster[1:]
	s.KernelHash++
	q.Services[0] = &s
	return &q
}

// firstOf leads from one plan to another that differs in the first service.
func firstOf(old, p *plan.Plan) plan.Delta {
	return plan.Delta{Changes: []plan.Change{{Was: old.Services[0], Is: p.Services[0]}}}
}

func BenchmarkDiff(b *testing.B) {
	for _, n := range sizes {
		p := kerneltest.Plan(plan.ModeIPTables, kerneltest.Many(n, endpointsEach)...)
		b.Run(fmt.Sprintf("one endpoint changed/services=%d", n), func(b *testing.B) {
			r := iptables.NewRenderer(options())
			have := r.Render(p, plan.Between(nil, p))
			less := oneEndpointLess(p)
			want := r.Render(less, firstOf(p, less))
			b.ReportAllocs()
			for b.Loop() {
				kernel.Diff(have, want)
			}
		})
		b.Run(fmt.Sprintf("read back/services=%d", n), func(b *testing.B) {
			have, want := iptables.Render(p, options()), iptables.Render(p, options())
			b.ReportAllocs()
			for b.Loop() {
				kernel.Diff(have, want)
			}
		})
	}
}

func BenchmarkRedirectSets(b *testing.B) {
	for _, n := range sizes {
		p := kerneltest.Plan(plan.ModeIPTables, kerneltest.Many(n, endpointsEach)...)
		for _, s := range p.Services {
			kerneltest.InUserspace(s)
		}
		b.Run(fmt.Sprintf("services=%d", n), func(b *testing.B) {
			have := steering.Sets(p)
			b.ReportAllocs()
			for b.Loop() {
				kernel.DiffSets(have, steering.Sets(p))
			}
		})
	}
}

// BenchmarkOffload moves one service out of userspace and back while 10,000 are
// in it: what a client waits for.
func BenchmarkOffload(b *testing.B) {
	kerneltest.Namespace(b)
	sets, err := kernel.OpenIPSets()
	if err != nil {
		b.Fatal(err)
	}
	defer sets.Close()
	user := kernel.Set{Name: "KPROXY-USER-4", Type: kernel.HashIPPort}
	if err := sets.Create(user); err != nil {
		b.Fatal(err)
	}
	entries := make([]string, 10000)
	for i := range entries {
		a := netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)})
		entries[i] = a.String() + ",tcp:80"
	}
	if err := sets.Add(user, 0, entries...); err != nil {
		b.Fatal(err)
	}
	b.Run("offload and recall", func(b *testing.B) {
		for b.Loop() {
			if err := sets.Delete(user, entries[5000]); err != nil {
				b.Fatal(err)
			}
			if err := sets.Add(user, 0, entries[5000]); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("all 10000 at once", func(b *testing.B) {
		for b.Loop() {
			if err := sets.Delete(user, entries...); err != nil {
				b.Fatal(err)
			}
			if err := sets.Add(user, 0, entries...); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("heartbeat", func(b *testing.B) {
		for _, s := range steering.EmptySetsOf(nil) {
			if err := sets.Create(s); err != nil {
				b.Fatal(err)
			}
		}
		for b.Loop() {
			if err := (&steering.Redirects{Store: sets}).Alive(3e9); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("list 10000", func(b *testing.B) {
		for b.Loop() {
			if _, err := sets.List(kerneltest.AllEntries); err != nil {
				b.Fatal(err)
			}
		}
	})
}

// BenchmarkApply measures one endpoint's change and reading back, per variant.
func BenchmarkApply(b *testing.B) {
	for _, v := range variants {
		for _, n := range programmable() {
			b.Run(fmt.Sprintf("%s/one endpoint changed/services=%d", v.Name, n), func(b *testing.B) {
				r := iptables.NewRenderer(options())
				p := kerneltest.Plan(plan.ModeIPTables, kerneltest.Many(n, endpointsEach)...)
				backend := programmed(b, v, r.Render(p, plan.Between(nil, p)))
				plans := [2]*plan.Plan{oneEndpointLess(p), p}
				have := r.Render(p, plan.Delta{})
				for i := 0; b.Loop(); i++ {
					want := r.Render(plans[i%2], firstOf(plans[(i+1)%2], plans[i%2]))
					if _, err := backend.Apply(context.Background(), kernel.Diff(have, want)); err != nil {
						b.Fatal(err)
					}
					have = want
				}
			})
			b.Run(fmt.Sprintf("%s/read back/services=%d", v.Name, n), func(b *testing.B) {
				backend := programmed(b, v, iptables.Render(kerneltest.Plan(plan.ModeIPTables, kerneltest.Many(n, endpointsEach)...), options()))
				for b.Loop() {
					if _, err := backend.Observe(context.Background()); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}

// BenchmarkAll measures all services' rules at once: a cold start, and a clean-up.
func BenchmarkAll(b *testing.B) {
	for _, v := range variants {
		for _, n := range programmable() {
			rules := iptables.Render(kerneltest.Plan(plan.ModeIPTables, kerneltest.Many(n, endpointsEach)...), options())
			for _, up := range []bool{true, false} {
				name := map[bool]string{true: "cold start", false: "clean up"}[up]
				b.Run(fmt.Sprintf("%s/%s/services=%d", v.Name, name, n), func(b *testing.B) {
					kerneltest.Namespace(b)
					backend, _ := newBackend(b, v)
					apply := func(ops kernel.Ops, timed bool) {
						if !timed {
							b.StopTimer()
							defer b.StartTimer()
						}
						if a, err := backend.Apply(context.Background(), ops); err != nil || len(a.Failed) > 0 {
							b.Fatal(err, a.Failed)
						}
					}
					for b.Loop() {
						apply(kernel.Diff(kernel.Ruleset{}, rules), up)
						apply(kernel.Diff(rules, kernel.Ruleset{}), !up)
					}
				})
			}
		}
	}
}

// programmable are the sizes of what is written to the kernel: with -short only the least, as the largest takes seconds each.
func programmable() []int {
	if testing.Short() {
		return []int{100}
	}
	return []int{100, 1000, 10000}
}

// programmed is a backend in a namespace of its own that holds rules. It must
// stay on the calling goroutine.
func programmed(b *testing.B, v kernel.Variant, rules kernel.Ruleset) *iptables.Backend {
	b.Helper()
	kerneltest.Namespace(b)
	backend, _ := newBackend(b, v)
	if a, err := backend.Apply(context.Background(), kernel.Diff(kernel.Ruleset{}, rules)); err != nil || len(a.Failed) > 0 {
		b.Fatal(err, a.Failed)
	}
	return backend
}
