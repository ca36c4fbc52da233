package lb

import (
	"fmt"
	"testing"
	"time"

	"kproxy.dev/kproxy/service"
)

func BenchmarkPick(b *testing.B) {
	for _, a := range service.Algorithms {
		for _, n := range []int{3, 1000} {
			weights := uniform(n)
			weights[0] = 3
			p := New(a, targetsOf(weights...), 1)
			p.Pick(clientOf(0), nil)
			b.Run(fmt.Sprintf("%s/%d", a, n), func(b *testing.B) {
				b.ReportAllocs()
				for i := 0; b.Loop(); i++ {
					p.Pick(clientOf(i), nil)
				}
			})
			b.Run(fmt.Sprintf("%s/%d/parallel", a, n), func(b *testing.B) {
				b.SetParallelism(32)
				b.RunParallel(func(pb *testing.PB) {
					for i := 0; pb.Next(); i++ {
						p.Pick(clientOf(i), nil)
					}
				})
			})
		}
	}
}

// A connection's whole life, and with least connections all reports.
func BenchmarkAcquireRelease(b *testing.B) {
	for _, a := range []service.Algorithm{service.RoundRobin, service.LeastConnections} {
		for _, n := range []int{3, 1000} {
			targets := targetsOf(uniform(n)...)
			p := New(a, targets, 1)
			b.Run(fmt.Sprintf("%s/%d/parallel", a, n), func(b *testing.B) {
				b.ReportAllocs()
				b.SetParallelism(32)
				b.RunParallel(func(pb *testing.PB) {
					for pb.Next() {
						targets[p.Acquire(clientOf(0), nil)].Load.Release()
					}
				})
			})
		}
	}
}

func BenchmarkNew(b *testing.B) {
	for _, a := range service.Algorithms {
		targets := targetsOf(uniform(100)...)
		b.Run(string(a), func(b *testing.B) {
			for b.Loop() {
				New(a, targets, 1)
			}
		})
	}
	b.Run("maglev table", func(b *testing.B) {
		targets := targetsOf(uniform(100)...)
		for b.Loop() {
			maglevTable(targets)
		}
	})
}

func BenchmarkAffinity(b *testing.B) {
	a := NewAffinity(time.Hour)
	now := time.Now()
	for i := range 50_000 {
		a.Set(clientOf(i), endpointA, now)
	}
	b.Run("get/parallel", func(b *testing.B) {
		b.ReportAllocs()
		b.SetParallelism(32)
		b.RunParallel(func(pb *testing.PB) {
			for i := 0; pb.Next(); i++ {
				a.Get(clientOf(i%50_000), now)
			}
		})
	})
	b.Run("set new", func(b *testing.B) {
		b.ReportAllocs()
		for i := 0; b.Loop(); i++ {
			a.Set(clientOf(i), endpointA, now)
		}
	})
}

func BenchmarkSlots(b *testing.B) {
	weights := make([]uint32, 100)
	for i := range weights {
		weights[i] = uint32(i + 1)
	}
	for b.Loop() {
		Slots(weights, 256)
	}
}

// BenchmarkSlotsOfMany is of 1000 endpoints, of which the last weighs as much as all others.
func BenchmarkSlotsOfMany(b *testing.B) {
	weights := make([]uint32, 1000)
	for i := range weights {
		weights[i] = 1
	}
	weights[len(weights)-1] = uint32(len(weights))
	for b.Loop() {
		Slots(weights, SlotLimit)
	}
}
