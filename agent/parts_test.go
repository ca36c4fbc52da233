package agent

import (
	"context"
	"errors"
	"log/slog"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/test/kerneltest"
	"kproxy.dev/kproxy/userspace"
)

var web = service.Key{Namespace: "shop", Name: "web", Port: "http", Protocol: service.TCP}

// TestHeartbeat: entries are refreshed while the forwarder proves that it
// serves, not before what leads to userspace is there, and removed at the end.
func TestHeartbeat(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start := make(chan struct{})
		var refreshed, expired atomic.Int32
		var broken atomic.Bool
		h := heartbeat{
			timeout: 3 * time.Second, start: start, log: slog.New(slog.DiscardHandler), expired: make(chan struct{}),
			probe: func(context.Context) error {
				if broken.Load() {
					return errors.New("the accept loop is stuck")
				}
				return nil
			},
			refresh: func(time.Duration) error { refreshed.Add(1); return nil },
			expire:  func() error { expired.Add(1); return nil },
			revived: func() {},
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- h.run(ctx) }()
		after := func(d time.Duration) { time.Sleep(d); synctest.Wait() }

		after(10 * time.Second)
		if refreshed.Load() != 0 || h.alive.Load() {
			t.Errorf("without steering: %d beats, alive %v; want none", refreshed.Load(), h.alive.Load())
		}
		close(start)
		after(time.Millisecond)
		if refreshed.Load() != 1 || !h.alive.Load() {
			t.Errorf("with steering there: %d beats, alive %v; want one at once", refreshed.Load(), h.alive.Load())
		}
		after(3 * time.Second)
		if refreshed.Load() != 4 {
			t.Errorf("%d beats in one lifetime, want 3 more", refreshed.Load())
		}
		broken.Store(true)
		after(10 * time.Second)
		if refreshed.Load() != 4 || h.alive.Load() {
			t.Errorf("while the forwarder is stuck: %d beats, alive %v; want none", refreshed.Load()-4, h.alive.Load())
		}
		broken.Store(false)
		after(time.Second)
		if refreshed.Load() != 5 || !h.alive.Load() {
			t.Errorf("when it serves again: %d beats, alive %v; want one", refreshed.Load()-4, h.alive.Load())
		}
		cancel()
		if err := <-done; err != nil || expired.Load() != 1 || h.alive.Load() {
			t.Errorf("at the end: error %v, emptied %d times, alive %v; want the sets emptied", err, expired.Load(), h.alive.Load())
		}
	})
}

// TestHeartbeatRetires: once the kernel's rules are to take new connections they do, as soon as the beat under way is over, and no
// further one comes.
func TestHeartbeatRetires(t *testing.T) {
	for range 20 { // what is ready at once is chosen at random
		synctest.Test(t, func(t *testing.T) {
			start := make(chan struct{})
			close(start)
			var refreshed, expired atomic.Int32
			h := heartbeat{
				timeout: 3 * time.Second, start: start, log: slog.New(slog.DiscardHandler), retired: make(chan struct{}), expired: make(chan struct{}),
				probe:   func(context.Context) error { time.Sleep(time.Second); return nil }, // until the next beat is due
				refresh: func(time.Duration) error { refreshed.Add(1); return nil },
				expire:  func() error { expired.Add(1); return nil },
				revived: func() {},
			}
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error, 1)
			go func() { done <- h.run(ctx) }()
			time.Sleep(500 * time.Millisecond)
			h.retire(ctx)
			if refreshed.Load() != 1 || expired.Load() != 1 || h.alive.Load() {
				t.Errorf("there were %d beats, emptied %d times, alive %v; want one, and the sets emptied", refreshed.Load(), expired.Load(), h.alive.Load())
			}
			time.Sleep(10 * time.Second)
			cancel()
			if err := <-done; err != nil || refreshed.Load() != 1 {
				t.Errorf("later there were %d beats (%v), want none", refreshed.Load()-1, err)
			}
		})
	}
}

// TestHeartbeatRetiresBeforeItBegins: while rules can't be written, a stop doesn't wait for them.
func TestHeartbeatRetiresBeforeItBegins(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		expired := 0
		h := heartbeat{timeout: 3 * time.Second, start: make(chan struct{}), retired: make(chan struct{}), expired: make(chan struct{}), expire: func() error { expired++; return nil }}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- h.run(ctx) }()
		h.retire(ctx)
		if expired != 1 {
			t.Errorf("the sets are emptied %d times, want once", expired)
		}
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// TestKernelLacks: a stop leaves to the kernel what it has the rules for, and asks first where userspace serves what it hasn't.
func TestKernelLacks(t *testing.T) {
	there := kerneltest.Service("a", service.TCP, kerneltest.Cluster("10.96.0.1:80"), kerneltest.Endpoints("10.2.0.1:8080"))
	for name, tt := range map[string]struct {
		edit  func(s *plan.Service)
		holds bool // rules of the service, as they were
		want  bool
	}{
		"in userspace, with rules":                      {func(s *plan.Service) { s.DataPlane = plan.Userspace }, true, false},
		"refused, or not programmed yet":                {func(s *plan.Service) { s.DataPlane = plan.Userspace }, false, true},
		"changed, with the former rules":                {func(s *plan.Service) { s.DataPlane = plan.Userspace; s.KernelHash++ }, true, true},
		"with rules that can't do all":                  {func(s *plan.Service) { s.DataPlane, s.Cause = plan.Userspace, plan.CauseInexpressible }, true, true},
		"one that no data plane of the kernel can have": {func(s *plan.Service) { s.DataPlane, s.Kernel, s.KernelHash = plan.Userspace, plan.None, 0 }, false, true},
		"offloaded":         {func(s *plan.Service) {}, true, false},
		"without endpoints": {func(s *plan.Service) { s.DataPlane = plan.None }, false, false},
	} {
		p := kerneltest.Plan(plan.ModeIPTables, there)
		s := *p.Services[0]
		k, hash := s.Port.Key, s.KernelHash
		tt.edit(&s)
		p.Services[0] = &s
		a := &Agent{passing: make(turn, 1), programmer: &programmer{programmed: map[service.Key]uint64{}}}
		a.cfg.AliveTimeout = time.Second
		a.current.Store(p)
		if tt.holds {
			a.programmer.programmed[k] = hash
		}
		if got := a.kernelLacks(t.Context()); got != tt.want {
			t.Errorf("%s: %v, want %v", name, got, tt.want)
		}
	}
}

// TestCarried: a first connection is enough by default; where more are asked
// for, the forwarder's traffic is looked at.
func TestCarried(t *testing.T) {
	kicks := 0
	total := uint64(0)
	c := carried{enough: 1, kick: func() { kicks++ }, traffic: func(visit func(service.Key, userspace.Counters)) { visit(web, userspace.Counters{Total: total}) }}
	dirty := map[service.Key]bool{}
	if c.update(dirty) {
		t.Error("something changed before the first connection")
	}
	c.first(web)
	if !c.update(dirty) || kicks != 1 || c.total[web] != 1 || !dirty[web] {
		t.Errorf("after the first connection: %d kicks, count %d, dirty %v; want one each, and the service", kicks, c.total[web], dirty)
	}
	c = carried{enough: 5, kick: func() {}, traffic: c.traffic}
	for _, step := range []struct {
		total   uint64
		changed bool
		count   uint64
	}{{0, false, 0}, {3, true, 3}, {3, false, 3}, {9, true, 9}, {12, false, 9}} {
		total = step.total
		dirty := map[service.Key]bool{}
		if changed := c.update(dirty); changed != step.changed || dirty[web] != changed || c.total[web] != step.count {
			t.Errorf("with %d connections: changed %v, count %d; want %v, %d", step.total, changed, c.total[web], step.changed, step.count)
		}
	}
}

// TestCarriedForgets: a service that is removed and comes again has carried nothing.
func TestCarriedForgets(t *testing.T) {
	total, other := uint64(9), service.Key{Namespace: "other", Name: "web"}
	c := carried{enough: 5, kick: func() {}, traffic: func(visit func(service.Key, userspace.Counters)) {
		visit(web, userspace.Counters{Total: total})
		visit(other, userspace.Counters{Total: 7})
	}}
	c.update(map[service.Key]bool{})
	kept := &plan.Service{Port: &service.Port{Key: other}}
	c.forget(plan.Delta{Changes: []plan.Change{{Was: kept, Is: kept}, {Was: &plan.Service{Port: &service.Port{Key: web}}}}})
	if n, known := c.total[web]; known || c.total[other] != 7 {
		t.Errorf("of the removed service %d are known, of the other one %d; want none and 7", n, c.total[other])
	}
	total = 1
	if dirty := map[service.Key]bool{}; !c.update(dirty) || !dirty[web] || c.total[web] != 1 {
		t.Errorf("the service that came again has %d, want 1", c.total[web])
	}
}

// TestEvents: subscribers get what is published from then on; one that doesn't
// read holds up nobody.
func TestEvents(t *testing.T) {
	var e events
	e.publish([]plan.Event{{Message: "too early"}})
	ch, cancel := e.subscribe(eventBuffer)
	lazy, _ := e.subscribe(eventBuffer)
	for range eventBuffer + 10 {
		e.publish([]plan.Event{{Message: "moved"}})
		if got := <-ch; got.Message != "moved" {
			t.Fatalf("event %q, want moved", got.Message)
		}
	}
	cancel()
	if _, open := <-ch; open {
		t.Error("the channel is open after the end of the subscription")
	}
	cancel() // twice is no harm
	e.close()
	if n := len(lazy); n != eventBuffer {
		t.Errorf("the lazy subscriber has %d events, want %d", n, eventBuffer)
	}
	if late, _ := e.subscribe(eventBuffer); late != nil {
		if _, open := <-late; open {
			t.Error("a subscription after the end is open")
		}
	}
}
