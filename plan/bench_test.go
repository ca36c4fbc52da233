package plan

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"kproxy.dev/kproxy/health"
	"kproxy.dev/kproxy/service"
)

// benchInputs is n steady services with ten endpoints each, probed, half of
// them offloaded.
func benchInputs(b *testing.B, n int, change uint16) Inputs {
	b.Helper()
	var sb service.Builder
	sb.SetNode(testNode)
	in := Inputs{
		Now: t0, Caps: allCaps, Policy: DefaultPolicy(),
		Observed: Observed{Carried: map[service.Key]uint64{}, Programmed: map[service.Key]uint64{}},
	}
	states := map[health.Target]health.State{}
	view := health.NewView(testHealth, nil)
	for i := range n {
		p := port(fmt.Sprintf("service-%05d", i))
		p.ClusterIPs = []netip.Addr{netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)})}
		if i%10 == 0 {
			p.NodePort, p.ExternallyAccessible = uint16(30000+i/10), true
		}
		if err := sb.AddPort(p); err != nil {
			b.Fatal(err)
		}
		for j := range 10 {
			e := service.Endpoint{
				Address: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, byte(100 + j), byte(i >> 8), byte(i)}), 8080),
				Node:    fmt.Sprintf("n%d", j), Ready: true, Serving: true, Weight: 1,
			}
			if i == n/2 && j == 0 {
				e.Weight += change
			}
			sb.AddEndpoint(p.Key, e)
			states[view.Target(&p, e.Address)] = health.State{Status: health.Up, Since: t0}
		}
		in.Observed.Carried[p.Key] = uint64(i % 2)
	}
	in.Snapshot, in.Health = sb.Build(), health.NewView(testHealth, states)
	return in
}

var sizes = []int{10, 100, 1000, 10000}

// BenchmarkCompute is the first plan of all.
func BenchmarkCompute(b *testing.B) {
	for _, n := range sizes {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			in := benchInputs(b, n, 0)
			b.ReportAllocs()
			for b.Loop() {
				Compute(nil, in)
			}
		})
	}
}

// BenchmarkComputeChange is the next plan when the endpoints of one service
// changed.
func BenchmarkComputeChange(b *testing.B) {
	for _, n := range sizes {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			in, previous := benchSteady(b, n)
			in.Snapshot = in.Snapshot.With(benchInputs(b, n, 1).Snapshot, []service.Name{{Namespace: "ns", Name: fmt.Sprintf("service-%05d", n/2)}})
			b.ReportAllocs()
			for b.Loop() {
				Compute(previous, in)
			}
		})
	}
}

// BenchmarkComputeProgrammed is the next plan when the rules of one service have
// been written.
func BenchmarkComputeProgrammed(b *testing.B) {
	for _, n := range sizes {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			in, previous := benchSteady(b, n)
			k := previous.Services[n/2].Port.Key
			in.Observed.Programmed[k]++
			in.Dirty[k] = true
			b.ReportAllocs()
			for b.Loop() {
				Compute(previous, in)
			}
		})
	}
}

// BenchmarkComputeHealth is the next plan when there is a new view of health.
func BenchmarkComputeHealth(b *testing.B) {
	for _, n := range sizes {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			in, previous := benchSteady(b, n)
			in.Health, in.Dirty = benchInputs(b, n, 0).Health, nil
			b.ReportAllocs()
			for b.Loop() {
				Compute(previous, in)
			}
		})
	}
}

// benchSteady returns a plan that has settled, and inputs that say nothing new.
func benchSteady(b *testing.B, n int) (Inputs, *Plan) {
	b.Helper()
	in := benchInputs(b, n, 0)
	var p *Plan
	for range 4 {
		p, _ = Compute(p, in)
		for _, s := range p.Services {
			in.Observed.Programmed[s.Port.Key] = s.KernelHash
		}
		in.Now = in.Now.Add(time.Minute)
	}
	in.Dirty = map[service.Key]bool{}
	return in, p
}
