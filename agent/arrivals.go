package agent

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/userspace"
)

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

// compare is told how many connections the rules have sent to userspace, and a figure that
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
