package lab

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestTrafficRecordsEachExchange(t *testing.T) {
	n := build(t, dualStack("kplab-traf", 1))
	b := n.Backends[0]
	for _, network := range []string{"tcp", "udp"} {
		seen := 0
		traffic, err := StartTraffic(t.Context(), TrafficConfig{
			From: n.Client, Network: network, Target: b.Address(true, LinePort), Rate: 1000, Count: 200, Timeout: time.Minute,
			OnResult: func(Result) { seen++ },
		})
		if err != nil {
			t.Fatal(err)
		}
		got := traffic.Wait()
		if diff := cmp.Diff(map[string]int{"b1": 200}, got.ByBackend()); diff != "" || seen != 200 {
			t.Errorf("%s: %s; %d seen; per backend (-want +got):\n%s", network, got, seen, diff)
		}
	}
}

func TestTrafficStopsWithoutFailures(t *testing.T) {
	n := build(t, dualStack("kplab-stop", 1))
	b := n.Backends[0]
	fail := func(f Fault) {
		t.Helper()
		if err := b.Fail(t.Context(), f); err != nil {
			t.Fatal(err)
		}
	}
	fail(Hang) // until it ends, all of them are under way: their SYNs come again a second later
	ctx, cancel := context.WithCancel(t.Context())
	traffic, err := StartTraffic(ctx, TrafficConfig{
		From: n.Client, Network: "tcp", Target: b.Address(false, LinePort), Rate: 500, Count: 1000, Concurrency: 8, Timeout: 20 * time.Second,
	})
	if err != nil {
		t.Fatal(err)
	}
	time.Sleep(time.Second)
	cancel()
	fail(Healthy)
	got := traffic.Wait()
	if len(got) == 0 || len(got) == 1000 || len(got.Failed()) > 0 {
		t.Errorf("got %s; want some, not all, and none failed", got)
	}
}

// Where nothing answers, exchanges that wait take no thread each: thousands of threads keep a machine from answering anything.
func TestTrafficHoldsNoThreads(t *testing.T) {
	n := build(t, dualStack("kplab-thrd", 1))
	b := n.Backends[0]
	if err := b.Fail(t.Context(), Hang); err != nil {
		t.Fatal(err)
	}
	threads := func() int {
		t.Helper()
		entries, err := os.ReadDir("/proc/self/task")
		if err != nil {
			t.Fatal(err)
		}
		return len(entries)
	}
	before := threads()
	traffic, err := StartTraffic(t.Context(), TrafficConfig{
		From: n.Client, Network: "tcp", Target: b.Address(false, LinePort), Rate: 1000, Count: 200, Concurrency: 200, Timeout: time.Second,
	})
	if err != nil {
		t.Fatal(err)
	}
	time.Sleep(500 * time.Millisecond)
	if now := threads(); now > before+100 {
		t.Errorf("%d threads, %d before: those that connect hold them", now, before)
	}
	if got := traffic.Wait(); len(got.Failed()) != 200 {
		t.Errorf("got %s, want 200 that fail", got)
	}
}

func TestTrafficRecordsFailures(t *testing.T) {
	n := build(t, dualStack("kplab-rec", 1))
	traffic, err := StartTraffic(t.Context(), TrafficConfig{
		From: n.Client, Network: "tcp", Target: netip.AddrPortFrom(n.Backends[0].Addresses[0], 1), Rate: 1000, Count: 5, Timeout: time.Minute,
	})
	if err != nil {
		t.Fatal(err)
	}
	got := traffic.Wait()
	if len(got.Failed()) != 5 || outcome(got[0].Err) != "refused" {
		t.Errorf("got %s, want 5 refused", got)
	}
	if later := got.Since(time.Now()); len(later) != 0 {
		t.Errorf("%d exchanges started after the end", len(later))
	}
}

func TestTrafficRefusesBadConfig(t *testing.T) {
	if _, err := StartTraffic(t.Context(), TrafficConfig{Network: "icmp"}); err == nil {
		t.Error("got no error")
	}
}

func TestHeldReportsBreak(t *testing.T) {
	n := build(t, dualStack("kplab-held", 1))
	b := n.Backends[0]
	config := HoldConfig{From: n.Client, Network: "tcp", Target: b.Address(true, LinePort), Every: time.Millisecond, Timeout: time.Minute}
	kept, err := Hold(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	for kept.Exchanges() < 10 {
		time.Sleep(time.Millisecond)
	}
	if err := kept.Close(); err != nil {
		t.Errorf("connection that was closed by its holder: %v", err)
	}
	broken, err := Hold(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	if first := broken.First(); first.Backend != "b1" || broken.LocalAddr().Addr() != first.Peer {
		t.Errorf("first answer %+v, local address %s", first, broken.LocalAddr())
	}
	b.Stop()
	for broken.Err() == nil {
		time.Sleep(time.Millisecond)
	}
	if broken.Close() == nil {
		t.Error("connection to a stopped backend: got no error")
	}
}

func TestResultsErr(t *testing.T) {
	good, bad := Result{Answer: Answer{Backend: "b1"}}, Result{Err: errors.New("refused")}
	for _, tt := range []struct {
		r    Results
		want string
	}{
		{nil, "no exchange was made"},
		{Results{good}, ""},
		{Results{good, bad}, "2 exchanges (b1 1), 1 failed, first at 00:00:00.000: refused"},
	} {
		got := ""
		if err := tt.r.Err(); err != nil {
			got = err.Error()
		}
		if got != tt.want {
			t.Errorf("%v: got %q, want %q", tt.r, got, tt.want)
		}
	}
}
