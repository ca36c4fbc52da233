package userspace

import (
	"errors"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// acceptGrace is how long, once accepting stops, clients that the kernel has
// connected already are still taken in: closing the listener resets the others.
const acceptGrace = 250 * time.Millisecond

// Waits after an accept that failed for want of descriptors or memory.
const (
	acceptWaitMin = 5 * time.Millisecond
	acceptWaitMax = time.Second
)

// run accepts until the listener is stopped. Before each accept it takes the
// descriptors that the connection will need, and waits while there are none:
// clients wait in the kernel's backlog meanwhile. No error ends it.
func (l *tcpListener) run(s *Server) {
	defer l.Close()
	wait := acceptWaitMin
	for {
		if !l.afford(s.tcpBudget) {
			return
		}
		c, err := l.AcceptTCP()
		if err == nil {
			wait = acceptWaitMin
			l.starved.Store(0)
			s.flows.Go(func() {
				defer s.tcpBudget.release(fdsPerConnection)
				s.serveTCP(c)
			})
			continue
		}
		s.tcpBudget.release(fdsPerConnection)
		if errors.Is(err, net.ErrClosed) || errors.Is(err, os.ErrDeadlineExceeded) {
			return
		}
		l.starve(err)
		s.cfg.Logger.Warn("accept failed; waiting", "error", err, "wait", wait)
		time.Sleep(wait)
		wait = min(2*wait, acceptWaitMax)
	}
}

// afford takes the descriptors for a connection, and notes when it had to wait
// for them. It reports false when the listener is to stop.
func (l *tcpListener) afford(b *budget) bool {
	if b.tryAcquire(fdsPerConnection) {
		return true
	}
	l.waiting.Store(sinceEpoch())
	ok := b.acquire(fdsPerConnection)
	l.waited.Store(sinceEpoch())
	l.waiting.Store(0)
	return ok
}

// starve notes the first of several errors that say that the process, or the
// host, has no file descriptors left.
func (l *tcpListener) starve(err error) {
	if errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) {
		l.starved.CompareAndSwap(0, sinceEpoch())
	}
}

// stop makes run return soon.
func (l *tcpListener) stop() { l.SetDeadline(time.Now().Add(acceptGrace)) }
