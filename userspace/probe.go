package userspace

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/service"
)

// prober is the Server's own client, for Probe.
type prober struct {
	mu    sync.Mutex // one probe at a time; guards the listeners' prober too
	count uint64
}

// Probe proves that the Server serves: every loop answers, it connects to each TCP listener and is
// refused by what an accepted connection meets, and sends a datagram to each
// UDP listener and gets it back from the loop that serves all clients. It
// fails when one doesn't, within ctx.
//
// A TCP listener that waits for file descriptors isn't expected to accept: its
// clients wait in the backlog, and are served as soon as others leave. But
// where the kernel could take new connections instead, Probe fails when that
// has taken too long, until there are descriptors again.
func (s *Server) Probe(ctx context.Context) error {
	s.prober.mu.Lock()
	defer s.prober.mu.Unlock()
	if len(s.tcp) == 0 || s.isStopped() {
		return errors.New("probe userspace: not serving")
	}
	for _, l := range s.loops {
		if err := l.probe(ctx); err != nil {
			return fmt.Errorf("probe event loop: %w", err)
		}
	}
	for _, l := range s.tcp {
		if err := s.probeTCP(ctx, l); err != nil {
			return fmt.Errorf("probe TCP listener (%s): %w", l.family, err)
		}
	}
	for _, w := range s.workers {
		if err := w.probe(ctx); err != nil {
			return fmt.Errorf("probe UDP worker: %w", err)
		}
	}
	for _, l := range s.udp {
		if err := s.probeUDP(ctx, l); err != nil {
			return fmt.Errorf("probe UDP listener (%s): %w", l.family, err)
		}
	}
	return nil
}

func (s *Server) probeTCP(ctx context.Context, l *listener) error {
	start := sinceEpoch()
	if s.waiting.Load() != 0 {
		return s.exhaustion()
	}
	err := s.refusal(ctx, l)
	if err == nil {
		s.starved.Store(0)
		return nil
	}
	if absent(err) {
		return nil
	}
	s.starve(err)
	if s.waiting.Load() == 0 && s.waited.Load() < start && s.starved.Load() == 0 {
		return err
	}
	return s.exhaustion()
}

// exhaustionPatience is how long clients wait for file descriptors before the
// kernel is to take the new ones.
const exhaustionPatience = 2 * time.Second

// exhaustion returns an error if clients have waited for file descriptors for too
// long, and the kernel has rules to serve new connections by.
func (s *Server) exhaustion() error {
	since := s.waitingSince(true)
	if since == 0 || !s.fallback.Load() || time.Duration(sinceEpoch()-since) <= exhaustionPatience {
		return nil
	}
	return fmt.Errorf("out of file descriptors: %d connections are open", s.Budget(service.TCP).Used/fdsPerConnection)
}

// refusal connects to l and expects to be refused.
func (s *Server) refusal(ctx context.Context, l *listener) error {
	c, err := s.dialers.own.DialTCP(ctx, "tcp", netip.AddrPort{}, netip.AddrPortFrom(loopback(l.family), l.port))
	if errors.Is(err, unix.ECONNRESET) {
		return nil // refused so soon that connect saw it
	}
	if err != nil {
		return err
	}
	defer c.Close()
	stop := context.AfterFunc(ctx, func() { c.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	switch _, err := c.Read(make([]byte, 1)); {
	case errors.Is(err, unix.ECONNRESET), errors.Is(err, io.EOF):
		return nil
	case err != nil:
		return err
	}
	return errors.New("the listener's own port is served as if it were a service")
}

// probeResend is how long a UDP probe waits before it sends again: datagrams
// may be lost.
const probeResend = 100 * time.Millisecond

// probeUDP sends a datagram to l from a socket whose address l knows. While all
// is well it's the same one each time: a new one would be a new flow for the
// kernel to track.
func (s *Server) probeUDP(ctx context.Context, l *listener) error {
	if l.prober == nil {
		c, err := s.dialers.own.DialUDP(context.Background(), "udp", netip.AddrPort{}, netip.AddrPortFrom(loopback(l.family), l.port))
		if absent(err) {
			return nil
		}
		if err != nil {
			return err
		}
		from := c.LocalAddr().(*net.UDPAddr).AddrPort()
		l.prober = c
		l.probe.Store(&from)
	}
	err := s.exchange(ctx, l.prober)
	if err != nil {
		l.closeProber()
	}
	return err
}

// closeProber closes the socket of l's probes; the next one opens another.
func (l *listener) closeProber() {
	l.probe.Store(nil)
	if l.prober != nil {
		l.prober.Close()
		l.prober = nil
	}
}

// exchange sends a datagram until it comes back.
func (s *Server) exchange(ctx context.Context, c *net.UDPConn) error {
	s.prober.count++
	want := binary.BigEndian.AppendUint64(nil, s.prober.count)
	for {
		if _, err := c.Write(want); err != nil {
			return err
		}
		err := expect(c, want)
		if err == nil || !errors.Is(err, os.ErrDeadlineExceeded) {
			return err
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if s.isStopped() {
			return errors.New("not serving")
		}
	}
}

// expect reads until it gets want.
func expect(c *net.UDPConn, want []byte) error {
	c.SetReadDeadline(time.Now().Add(probeResend))
	defer c.SetReadDeadline(time.Time{}) // or a timer wakes an idle process up
	got := make([]byte, len(want)+1)
	for {
		n, err := c.Read(got)
		if err != nil {
			return err
		}
		if string(got[:n]) == string(want) {
			return nil
		}
	}
}

// absent reports whether a probe failed because the host has no loopback
// address of the family, so that nothing can be said.
func absent(err error) bool {
	return errors.Is(err, unix.EADDRNOTAVAIL) || errors.Is(err, unix.EAFNOSUPPORT)
}

func loopback(f service.Family) netip.Addr {
	if f == service.IPv6 {
		return netip.IPv6Loopback()
	}
	return netip.AddrFrom4([4]byte{127, 0, 0, 1})
}
