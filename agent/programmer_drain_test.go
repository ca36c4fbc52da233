package agent

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/test/kerneltest"
)

// drainer stands in for a backend that has left something to drain: each look of the
// programmer finds the next element of left.
type drainer struct {
	mu    sync.Mutex
	left  []int
	err   error
	looks int
}

// drainingPlane is a plane with a drainer.
type drainingPlane struct {
	kernel.Plane
	*drainer
}

func (d *drainer) Drain(context.Context) (int, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.looks++
	left := 0
	if len(d.left) > 0 {
		left, d.left = d.left[0], d.left[1:]
	}
	return left, d.err
}

func (d *drainer) fails(err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.err = err
}

func (d *drainer) looked() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.looks
}

// TestProgrammerDrains: it looks at once at what an earlier kproxy left, then
// every second for as long as something drains or can't be looked at, and again
// after each change of rules.
func TestProgrammerDrains(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &drainer{left: []int{2, 1, 0}}
		m := newModelHost(t)
		m.plane = drainingPlane{m.plane, d}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- m.run(ctx, nil) }()
		after := func(what string, wait time.Duration, want int) {
			t.Helper()
			time.Sleep(wait)
			synctest.Wait()
			if looks := d.looked(); looks != want {
				t.Errorf("%s: %d looks at what drains, want %d", what, looks, want)
			}
		}
		after("at the start", time.Millisecond, 1)
		after("while something drains", 2*drainEvery, 3)
		after("when nothing drains any more", time.Hour, 3)
		m.program(twoServices())
		after("after a change of rules", 2*drainEvery, 4)
		d.fails(errors.New("no buffer space"))
		m.program(kerneltest.Plan(plan.ModeIPTables))
		after("when it can't be looked at", 3*drainEvery, 7)
		d.fails(nil)
		after("when it can be again", time.Hour, 8)
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}
