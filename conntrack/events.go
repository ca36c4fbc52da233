package conntrack

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// eventBuffer is the receive buffer for events: room for some ten thousand
// connections that end at once. The kernel drops what doesn't fit.
const eventBuffer = 8 << 20

// groupDestroy is NFNLGRP_CONNTRACK_DESTROY of linux/netfilter/nfnetlink.h.
const groupDestroy = 3

// Listener receives the ends of flows. It is bound to the network namespace of
// the thread that called [Subscribe], and buffers from then on.
type Listener struct {
	conn      *netlink.Conn
	overflows atomic.Uint64
}

// Subscribe begins to listen for the ends of flows.
func Subscribe() (*Listener, error) {
	conn, err := netlink.Dial(unix.NETLINK_NETFILTER, &netlink.Config{MessageBufferSize: answerSize})
	if err != nil {
		return nil, fmt.Errorf("open conntrack event socket: %w", err)
	}
	l := &Listener{conn: conn}
	err = conn.SetReadBuffer(eventBuffer)
	if err == nil {
		err = conn.JoinGroup(groupDestroy)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("subscribe to conntrack events: %w", err), l.Close())
	}
	return l, nil
}

// Close closes the socket.
func (l *Listener) Close() error { return l.conn.Close() }

// Overflows is how often the kernel has dropped events because they weren't
// read fast enough; each may stand for many.
func (l *Listener) Overflows() uint64 { return l.overflows.Load() }

// Run calls f with each flow that ends, from one goroutine, until ctx ends. A
// Listener runs once.
func (l *Listener) Run(ctx context.Context, f func(Flow)) error {
	stop := context.AfterFunc(ctx, func() { _ = l.conn.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	for {
		err := l.receive(f)
		if ctx.Err() != nil {
			return nil
		}
		switch {
		case err == nil:
		case errors.Is(err, unix.ENOBUFS):
			l.overflows.Add(1)
		default:
			return fmt.Errorf("receive conntrack events: %w", err)
		}
	}
}

func (l *Listener) receive(f func(Flow)) error {
	for m, err := range l.conn.ReceiveIter() {
		if err != nil {
			return err
		}
		if m.Header.Type != messageDelete {
			continue
		}
		if flow, err := decode(m.Data); err == nil { // one odd event is no reason to miss the rest
			f(flow)
		}
	}
	return nil
}
