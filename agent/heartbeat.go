package agent

import (
	"context"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/userspace"
)

// heartbeat is the dead-man's switch: it keeps the alive sets filled
// while the forwarder proves that it serves. When the proof fails, or this
// process is gone, the entries expire and new connections go to the kernel
// rules.
type heartbeat struct {
	timeout time.Duration // lifetime of the entries
	probe   func(context.Context) error
	refresh func(timeout time.Duration) error
	expire  func() error
	log     *slog.Logger
	start   <-chan struct{} // closed when the rules that lead to the forwarder are in the kernel

	// revived is called when new connections are redirected to userspace, at start or again: flows that began
	// meanwhile may have taken a way that isn't theirs.
	revived func()

	// retired is closed when the kernel's rules are to take new connections, while the forwarder goes on with those it has.
	retired chan struct{}
	expired chan struct{} // closed when they do

	missed int // beats in a row
	alive  atomic.Bool
	served atomic.Bool // alive, once
}

// run beats until ctx is done or it is retired, then removes the entries at once, so that
// new connections go to the kernel before this process stops accepting.
func (h *heartbeat) run(ctx context.Context) error {
	select {
	case <-ctx.Done():
	case <-h.retired: // no rule leads to the forwarder
	case <-h.start:
		h.beats(ctx)
	}
	h.alive.Store(false)
	err := h.expire()
	close(h.expired)
	<-ctx.Done()
	return err
}

func (h *heartbeat) beats(ctx context.Context) {
	// Three beats in a lifetime: one may be lost or late without an effect.
	tick := time.NewTicker(h.timeout / 3)
	defer tick.Stop()
	for {
		select {
		case <-h.retired:
			return
		default:
			h.beat(ctx)
		}
		select {
		case <-h.retired:
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// retire has the kernel's rules take new connections, and returns when they do, or ctx is done.
func (h *heartbeat) retire(ctx context.Context) {
	close(h.retired)
	select {
	case <-h.expired:
	case <-ctx.Done():
	}
}

func (h *heartbeat) beat(ctx context.Context) {
	probing, cancel := context.WithTimeout(ctx, h.timeout/3)
	defer cancel()
	err := h.probe(probing)
	if err == nil {
		err = h.refresh(h.timeout)
	}
	if ctx.Err() == nil {
		h.count(err)
	}
}

// count counts a beat, err says that it is missed. One means nothing yet: the
// entries of the one before still live. From the second on it is said, and
// again every minute.
func (h *heartbeat) count(err error) {
	if err == nil {
		h.missed = 0
		h.served.Store(true)
		if !h.alive.Load() {
			h.log.Info("the forwarder serves")
			h.revived()
			h.alive.Store(true) // last: who reads it may stop this process at once, and what revived ends would last
		}
		return
	}
	h.missed++
	if h.missed >= 2 {
		h.alive.Store(false)
	}
	if h.missed == 2 || h.missed%missesPerReport == 0 {
		h.log.Error("the forwarder doesn't serve; new connections go to the kernel's rules, where there are any", "beats missed", h.missed, "error", err)
	}
}

// missesPerReport is some minute's worth of beats.
const missesPerReport = 60

// arrivals compares what the rules send to userspace with what comes to the forwarder.
// A foreign rule that drops connections on their way, or an interface that they can't
// pass, shows nowhere else: the heartbeat comes from this node, and clients only time out.
type arrivals struct {
	every         time.Duration // between two readings
	begun         bool
	steered, came uint64
	lost          atomic.Uint64 // packets of the last period that began connections of which none arrived
}

const (
	// arrivalsEvery is the period, or ten times the heartbeat's time-out where that is shorter.
	arrivalsEvery = 30 * time.Second
	// lostLeast is how many packets have to be missing: a few may be on their way.
	lostLeast = 3
)

// compare takes how many connections the rules have sent to userspace, and a figure that
// grows whenever something comes to it.
func (x *arrivals) compare(steered, came uint64) {
	sent, nothing := steered-x.steered, came == x.came
	switch {
	case !x.begun, !nothing, sent == 0:
		x.lost.Store(0)
	case sent >= lostLeast:
		x.lost.Store(sent)
	}
	x.begun, x.steered, x.came = true, steered, came
}

// notReady says that nothing arrives; empty if something does, or nothing was sent.
func (x *arrivals) notReady() string {
	n := x.lost.Load()
	if n == 0 {
		return ""
	}
	return fmt.Sprintf("in the last %.0f s rules sent new connections to userspace (%d packets) and none arrived; kproxy trace --from CLIENT ADDRESS:PORT names what is in the way", x.every.Seconds(), n)
}

// watchArrivals compares until ctx is done.
func (a *Agent) watchArrivals(ctx context.Context) error {
	tick := time.NewTicker(a.arrivals.every)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		steered := a.countPackets().Steered // first: what is sent from now on may arrive already
		came := uint64(0)
		a.userspace.Traffic(func(_ service.Key, c userspace.Counters) {
			came += c.Total + c.Failed + c.BytesIn
		})
		was := a.arrivals.notReady()
		if a.arrivals.compare(steered, came); a.arrivals.notReady() != was {
			a.log.Warn("what is sent to userspace", "arrives", a.arrivals.notReady() == "", "detail", a.arrivals.notReady())
		}
	}
}
