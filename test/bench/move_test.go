// Package bench measures what crosses packages. Each package's own benchmarks
// are beside its code; `make bench-go` runs all of them, CI each once.
package bench

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/test/kerneltest"
)

// BenchmarkMove is one offload or recall of one service among many, from the
// user's wish to the kernel's sets: Compute, the portal's changes, and netlink,
// in a network namespace of its own. No table is restored for it.
func BenchmarkMove(b *testing.B) {
	for _, n := range []int{10, 100, 1_000, 10_000} {
		b.Run(fmt.Sprintf("services=%d", n), func(b *testing.B) { benchmarkMove(b, n) })
	}
}

func benchmarkMove(b *testing.B, n int) {
	kerneltest.Namespace(b)
	store, err := kernel.OpenIPSets()
	if err != nil {
		b.Fatal(err)
	}
	defer store.Close()

	in := plan.Inputs{
		Now: time.Unix(1_700_000_000, 0), Snapshot: snapshot(b, n), Policy: plan.DefaultPolicy(),
		Caps: plan.Caps{Planes: kerneltest.Planes(plan.IPTables)},
		Pins: map[service.Key]service.Preference{},
	}
	in.Policy.Mode = plan.ModeIPTables
	p, _ := plan.Compute(nil, in)
	in.Observed.Programmed = map[service.Key]uint64{}
	for _, s := range p.Services {
		in.Observed.Programmed[s.Port.Key] = s.KernelHash
	}
	if _, err := kernel.ApplySets(b.Context(), store, kernel.DiffSets(nil, steering.Sets(p))); err != nil {
		b.Fatal(err)
	}
	moved := p.Services[n/2].Port.Key
	wish := map[bool]service.Preference{false: service.PreferUserspace, true: service.PreferKernel}
	toKernel := false
	in.Dirty = map[service.Key]bool{moved: true}
	for b.Loop() {
		toKernel = !toKernel
		in.Pins = map[service.Key]service.Preference{moved: wish[toKernel]}
		next, d := plan.Compute(p, in)
		entries, err := kernel.ApplySets(b.Context(), store, steering.SetChanges(p, next, d))
		if err != nil || entries != 1 {
			b.Fatalf("%d entries changed, error %v; want one", entries, err)
		}
		p = next
	}
}

// snapshot is n services with ten endpoints each.
func snapshot(b *testing.B, n int) *service.Snapshot {
	var build service.Builder
	address, endpoint := netip.MustParseAddr("10.96.0.1"), netip.MustParseAddr("10.128.0.1")
	for i := range n {
		k := service.Key{Namespace: "bench", Name: fmt.Sprintf("s%05d", i), Protocol: service.TCP}
		if err := build.AddPort(service.Port{Key: k, Number: 80, ClusterIPs: []netip.Addr{address}}); err != nil {
			b.Fatal(err)
		}
		address = address.Next()
		for range 10 {
			build.AddEndpoint(k, service.Endpoint{Address: netip.AddrPortFrom(endpoint, 8080), Ready: true, Serving: true, Weight: 1})
			endpoint = endpoint.Next()
		}
	}
	return build.Build()
}
