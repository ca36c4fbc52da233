package userspace

import (
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestPark: a parked poller wakes up for what had come before, for what comes at whatever moment, and when its time is over.
func TestPark(t *testing.T) {
	var p poller
	must(t, p.init())
	defer p.shut()
	p.admitPosts()
	events := make([]unix.EpollEvent, eventsAtOnce)
	nothing := func() {}
	p.post(nothing)
	if n := p.park(events, -1); n != 1 {
		t.Errorf("%d events of one that had come before", n)
	}
	p.runPosted()
	began := time.Now()
	if n, d := p.park(events, 20), time.Since(began); n != 0 || d < 20*time.Millisecond {
		t.Errorf("%d events after %v, want none after 20 ms", n, d)
	}
	for i := range 2000 {
		go p.post(nothing)
		if i%2 == 0 {
			time.Sleep(time.Duration(i) * time.Microsecond / 20)
		}
		if n := p.park(events, 20_000); n != 1 {
			t.Fatalf("round %d: %d events, want one", i, n)
		}
		p.runPosted()
	}
}
