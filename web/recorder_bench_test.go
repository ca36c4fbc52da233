package web

import (
	"fmt"
	"net/netip"
	"runtime"
	"testing"
	"time"

	"kproxy.dev/kproxy/plan"
)

// bigCluster is a proxy with n service ports of three endpoints.
func bigCluster(n int) *fakeSource {
	f := &fakeSource{}
	for i := range n {
		s := plan.ServiceStatus{
			Namespace: fmt.Sprintf("team-%d", i/500), Name: fmt.Sprintf("svc-%04d", i), Port: "http", Protocol: "TCP",
			Addresses: []netip.AddrPort{netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)}), 80)},
			DataPlane: plan.IPTables, State: plan.StateOffloaded, Reason: "every endpoint has been up for 10s",
		}
		for e := range 3 {
			s.Endpoints = append(s.Endpoints, plan.EndpointStatus{
				Address: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, byte(e), byte(i >> 8), byte(i)}), 8080), Health: "up", Usable: true, Since: start,
			})
		}
		f.status.Services = append(f.status.Services, s)
	}
	return f
}

// BenchmarkReadStatus is what reading 5,000 services costs beside the status itself,
// and what the recorder keeps of them: with one in twenty busy, which is a lot, and
// with all of them, which is the worst.
func BenchmarkReadStatus(b *testing.B) {
	for _, every := range []int{20, 1} {
		b.Run(fmt.Sprintf("busy=1in%d", every), func(b *testing.B) {
			src := bigCluster(5000)
			before := heap()
			rec := NewRecorder(DefaultRecorderConfig(src))
			at := start
			read := func() {
				for i := 0; i < len(src.status.Services); i += every {
					c := &src.status.Services[i].Connections
					*c = plan.Connections{Active: 1, Total: c.Total + 9, Failed: c.Failed + 1, Retried: c.Retried + 1, BytesIn: c.BytesIn + 1e3, BytesOut: c.BytesOut + 1e6}
				}
				at = at.Add(2 * time.Second)
				rec.readStatus(at, true)
			}
			for range rec.cfg.Samples {
				read()
			}
			b.ReportAllocs()
			for b.Loop() {
				read()
			}
			b.ReportMetric((float64(heap())-float64(before))/(1<<20), "MB-kept")
			runtime.KeepAlive(rec)
		})
	}
}

// BenchmarkOverview is what the first of all streams that begin between two reads
// costs.
func BenchmarkOverview(b *testing.B) {
	rec := NewRecorder(DefaultRecorderConfig(bigCluster(5000)))
	rec.readStatus(start, true)
	b.ReportAllocs()
	for b.Loop() {
		rec.hub.whole = nil
		m, ch := rec.hub.subscribe(rec.overview)
		rec.hub.unsubscribe(ch)
		b.ReportMetric(float64(len(m))/1e3, "kB-sent")
	}
}

func heap() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}
