package nftables_test

import (
	"os/exec"
	"testing"
	"time"

	"kproxy.dev/kproxy/kernel/kerneltest"
	"kproxy.dev/kproxy/kernel/nftables"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/plan"
)

// BenchmarkWrite writes ten thousand services of ten endpoints into the kernel, and then
// replaces endpoints one by one.
func BenchmarkWrite(b *testing.B) {
	services := kerneltest.Many(10_000, 10)
	p := plane(services...)
	kerneltest.Namespace(b)
	routing := steering.DefaultRouting()
	b.Run("whole", func(b *testing.B) {
		for b.Loop() {
			b.StopTimer()
			exec.Command("nft", "flush", "ruleset").Run()
			t, err := nftables.Open(options(), &routing)
			if err != nil {
				b.Fatal(err)
			}
			b.StartTimer()
			begin := time.Now()
			if r := t.Follow(b.Context(), p, plan.Between(nil, p)); r.Err != nil {
				b.Fatal(r.Err)
			}
			followed := time.Since(begin)
			t.Want(p, plan.Between(nil, p))
			if r := t.Sync(b.Context(), func() {}); !r.OK() {
				b.Fatal(r.Err)
			}
			b.ReportMetric(float64(followed.Milliseconds()), "ms-follow")
			b.StopTimer()
			nftables.Close(t)
			b.StartTimer()
		}
	})
	t, err := nftables.Open(options(), &routing)
	if err != nil {
		b.Fatal(err)
	}
	defer nftables.Close(t)
	if r := t.Follow(b.Context(), p, plan.Between(nil, p)); r.Err != nil {
		b.Fatal(r.Err)
	}
	t.Want(p, plan.Between(nil, p))
	if r := t.Sync(b.Context(), func() {}); !r.OK() {
		b.Fatal(r.Err)
	}
	b.Run("endpoint", func(b *testing.B) {
		was := p.Services[5000]
		for i := 0; b.Loop(); i++ {
			is := kerneltest.Service(was.Port.Key.Name, was.Port.Key.Protocol)
			*is = *was
			is.Groups[0].Cluster = append([]plan.Backend(nil), was.Groups[0].Cluster...)
			e := &is.Groups[0].Cluster[3]
			e.Address = plan.Backend{Address: e.Address}.Address
			if i%2 == 0 {
				e.Address = kerneltest.Many(1, 1)[0].Groups[0].Cluster[0].Address
			} else {
				e.Address = p.Services[5000].Groups[0].Cluster[3].Address
			}
			is.KernelHash++
			if r := t.Follow(b.Context(), p, plan.Delta{Changes: []plan.Change{{Was: was, Is: is}}}); !r.OK() || r.Applied.Entries == 0 {
				b.Fatal(r)
			}
			was = is
		}
	})
}
