package conntrack

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/kernel/netlink"
)

const (
	// eventBuffer is the receive buffer for events: room for some ten thousand
	// connections that end at once. The kernel drops what doesn't fit.
	eventBuffer = 8 << 20
	// eventSize holds any event: the kernel makes room for less than half of it
	// (ctnetlink_nlmsg_size in net/netfilter/nf_conntrack_netlink.c), security
	// contexts aside.
	eventSize = 4 << 10
	// eventPause is how long, after events were read, no others are read.
	// One that comes after a while is read at once; where thousands of connections
	// end in a second, being woken for each costs several times what reading it does.
	eventPause = 2 * time.Millisecond
)

// Listener receives the ends of flows whose destination was rewritten. It is
// bound to the network namespace of the thread that called [Subscribe], and
// buffers from then on.
type Listener struct {
	file      *os.File
	raw       syscall.RawConn
	overflows atomic.Uint64
}

// Subscribe begins to listen for the ends of flows that were rewritten
// ([Flow.Rewritten]).
func Subscribe() (*Listener, error) {
	socket, err := netlink.Open(unix.NETLINK_NETFILTER, 0)
	if err != nil {
		return nil, fmt.Errorf("open conntrack event socket: %w", err)
	}
	l := &Listener{file: os.NewFile(uintptr(socket.FD), "conntrack events")}
	// Beyond net.core.rmem_max only with CAP_NET_ADMIN in the initial user namespace.
	if err = unix.SetsockoptInt(socket.FD, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, eventBuffer); err != nil {
		err = unix.SetsockoptInt(socket.FD, unix.SOL_SOCKET, unix.SO_RCVBUF, eventBuffer)
	}
	if err == nil {
		l.raw, err = l.file.SyscallConn()
	}
	if err == nil {
		err = l.SkipClosed(0)
	}
	if err == nil {
		err = unix.SetsockoptInt(socket.FD, unix.SOL_NETLINK, unix.NETLINK_ADD_MEMBERSHIP, unix.NFNLGRP_CONNTRACK_DESTROY)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("subscribe to conntrack events: %w", err), l.Close())
	}
	return l, nil
}

// SkipClosed has the kernel not tell, from now on, of TCP connections that were
// answered from a port and were closed in the ordinary way ([Flow.CutShort]); 0 is
// no port. Where that is userspace's own, nobody asks for them.
func (l *Listener) SkipClosed(port uint16) error {
	instructions, err := interesting(port)
	if err != nil {
		return err
	}
	program := make([]unix.SockFilter, len(instructions))
	for i, r := range instructions {
		program[i] = unix.SockFilter{Code: r.Op, Jt: r.Jt, Jf: r.Jf, K: r.K}
	}
	controlErr := l.raw.Control(func(fd uintptr) {
		err = unix.SetsockoptSockFprog(int(fd), unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]})
	})
	return errors.Join(controlErr, err)
}

// Close closes the socket.
func (l *Listener) Close() error { return l.file.Close() }

// Overflows returns how often the kernel has dropped events because they weren't
// read fast enough; each time may stand for many events.
func (l *Listener) Overflows() uint64 { return l.overflows.Load() }

// Run calls f with each flow that ends, from one goroutine, until ctx ends. A
// Listener runs once.
func (l *Listener) Run(ctx context.Context, f func(Flow)) error {
	stop := context.AfterFunc(ctx, func() { _ = l.file.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	buf := make([]byte, eventSize)
	for {
		err := l.receive(ctx, buf, f)
		if ctx.Err() != nil {
			return nil
		}
		switch {
		case err == nil:
			time.Sleep(eventPause)
		case errors.Is(err, unix.ENOBUFS):
			l.overflows.Add(1)
		default:
			return fmt.Errorf("receive conntrack events: %w", err)
		}
	}
}

// receive waits for events, and reads until there are no more.
func (l *Listener) receive(ctx context.Context, buf []byte, f func(Flow)) (err error) {
	got := false
	waitErr := l.raw.Read(func(fd uintptr) bool {
		for ctx.Err() == nil {
			var n int
			switch n, err = unix.Read(int(fd), buf); err {
			case nil:
				got = true
				for m := range netlink.Messages(buf[:n]) {
					// One odd event is no reason to miss the rest.
					if flow, err := decode(m.Body); err == nil && m.Type == messageDelete {
						f(flow)
					}
				}
			case unix.EINTR:
			case unix.EAGAIN:
				err = nil
				return got
			default:
				return true
			}
		}
		return true
	})
	return errors.Join(err, waitErr)
}
