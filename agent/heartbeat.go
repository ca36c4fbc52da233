package agent

import (
	"context"
	"log/slog"
	"sync/atomic"
	"time"
)

// heartbeat is the dead-man's switch: it keeps the portal's alive sets filled
// while the forwarder proves that it serves. When the proof fails, or this
// process is gone, the entries expire and new connections go to the kernel
// rules beneath.
type heartbeat struct {
	timeout time.Duration // lifetime of the entries
	probe   func(context.Context) error
	refresh func(timeout time.Duration) error
	expire  func() error
	log     *slog.Logger
	start   <-chan struct{} // closed when the rules that lead to the forwarder are in the kernel

	// revived is called when the portal opens, at start or again: flows that began
	// meanwhile may have taken a way that isn't theirs.
	revived func()

	missed int // beats in a row
	alive  atomic.Bool
	served atomic.Bool // alive, once
}

// run beats until ctx is done, then removes the entries at once, so that new
// connections go to the kernel before this process stops accepting.
func (h *heartbeat) run(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return nil
	case <-h.start:
	}
	// Three beats in a lifetime: one may be lost or late without an effect.
	tick := time.NewTicker(h.timeout / 3)
	defer tick.Stop()
	for {
		h.beat(ctx)
		select {
		case <-ctx.Done():
			h.alive.Store(false)
			return h.expire()
		case <-tick.C:
		}
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
		h.judge(err)
	}
}

// judge tells what a beat means. One that is missed means nothing yet: the
// entries of the one before still live. From the second on it is said, and
// again every minute.
func (h *heartbeat) judge(err error) {
	if err == nil {
		h.missed = 0
		h.served.Store(true)
		if !h.alive.Swap(true) {
			h.log.Info("the forwarder serves")
			h.revived()
		}
		return
	}
	h.missed++
	if h.missed >= 2 {
		h.alive.Store(false)
	}
	if h.missed == 2 || h.missed%missesPerReport == 0 {
		h.log.Error("the forwarder doesn't serve; new connections go to the kernel rules beneath, where there are any", "beats missed", h.missed, "error", err)
	}
}

// missesPerReport is some minute's worth of beats.
const missesPerReport = 60
