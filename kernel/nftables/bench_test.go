package nftables_test

import (
	"os/exec"
	"testing"
	"time"

	"kproxy.dev/kproxy/kernel/nftables"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/test/kerneltest"
)

// BenchmarkWrite writes ten thousand services of ten endpoints into the kernel (with -short a thousand), and then
// replaces endpoints one by one. Each part enters a namespace itself, as b.Run calls it on another thread.
func BenchmarkWrite(b *testing.B) {
	count := 10_000
	if testing.Short() {
		count = 1000
	}
	p := plane(kerneltest.Many(count, 10)...)
	routing := steering.DefaultRouting()
	open := func(b *testing.B) *nftables.Plane {
		t, err := nftables.Open(options(), &routing)
		if err != nil {
			b.Fatal(err)
		}
		return t
	}
	write := func(b *testing.B, t *nftables.Plane) (follow time.Duration) {
		begin := time.Now()
		if r := t.Follow(b.Context(), p, plan.Between(nil, p)); r.Err != nil {
			b.Fatal(r.Err)
		}
		follow = time.Since(begin)
		t.Want(p, plan.Between(nil, p))
		if r := t.Sync(b.Context(), func() {}); !r.OK() {
			b.Fatal(r.Err)
		}
		return follow
	}
	b.Run("whole", func(b *testing.B) {
		kerneltest.Namespace(b)
		for b.Loop() {
			b.StopTimer()
			exec.Command("nft", "flush", "ruleset").Run()
			t := open(b)
			b.StartTimer()
			b.ReportMetric(float64(write(b, t).Milliseconds()), "ms-follow")
			b.StopTimer()
			nftables.Close(t)
			b.StartTimer()
		}
	})
	b.Run("endpoint", func(b *testing.B) {
		kerneltest.Namespace(b)
		t := open(b)
		defer nftables.Close(t)
		write(b, t)
		was := p.Services[count/2]
		for i := 0; b.Loop(); i++ {
			is := kerneltest.Service(was.Port.Key.Name, was.Port.Key.Protocol)
			*is = *was
			is.Groups[0].Cluster = append([]plan.Backend(nil), was.Groups[0].Cluster...)
			e := &is.Groups[0].Cluster[3]
			e.Address = plan.Backend{Address: e.Address}.Address
			if i%2 == 0 {
				e.Address = kerneltest.Many(1, 1)[0].Groups[0].Cluster[0].Address
			} else {
				e.Address = p.Services[count/2].Groups[0].Cluster[3].Address
			}
			is.KernelHash++
			if r := t.Follow(b.Context(), p, plan.Delta{Changes: []plan.Change{{Was: was, Is: is}}}); !r.OK() || r.Applied.Entries == 0 {
				b.Fatal(r)
			}
			was = is
		}
	})
}
