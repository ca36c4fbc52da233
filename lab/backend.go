package lab

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// The ports every backend serves.
const (
	LinePort uint16 = 9000 // the line protocol, TCP and UDP
	HTTPPort uint16 = 8080
)

// MaxDatagram is the largest UDP payload over IPv4: 65,535 less 20 bytes of IP
// and 8 of UDP header.
const MaxDatagram = 65507

// Backend is a server in a namespace of its own. Its sockets belong to the
// namespace; its goroutines run in this process.
//
// TCP on [LinePort] greets with nothing and answers every line with
// "<name> <peer address> <line>". UDP on the same port answers every datagram
// with "<name> <peer address> <payload>", cut to [MaxDatagram] bytes. HTTP on
// [HTTPPort] answers every request with "<name> <peer address> <path>".
type Backend struct {
	Name      string
	Namespace *Namespace
	Addresses []netip.Addr // IPv4, then IPv6 in a dual-stack lab

	listens []listens
	active  atomic.Int64 // TCP connections

	mu      sync.Mutex // guards what follows: a server is started and stopped as a whole
	fault   Fault
	running *server
}

// listens is a port that a backend serves.
type listens struct {
	network, address string
	serve            func(*server, net.Conn) // nil for UDP
}

func newBackend(name string, ns *Namespace, addresses []netip.Addr) *Backend {
	b := NewBackend(name, ns, LinePort)
	b.Addresses = addresses
	b.listens = append(b.listens, listens{"tcp", fmt.Sprintf(":%d", HTTPPort), (*server).serveHTTP})
	return b
}

// NewBackend describes a further server of lines and datagrams in a namespace, at another
// port. With addresses it speaks SCTP at those instead.
func NewBackend(name string, ns *Namespace, port uint16, sctp ...netip.Addr) *Backend {
	b := &Backend{Name: name, Namespace: ns}
	for _, a := range sctp {
		b.listens = append(b.listens, listens{"sctp", netip.AddrPortFrom(a, port).String(), (*server).serveLines})
	}
	if len(sctp) == 0 {
		any := fmt.Sprintf(":%d", port)
		b.listens = []listens{{"tcp", any, (*server).serveLines}, {"udp", any, nil}}
	}
	return b
}

// Active returns how many TCP connections are open.
func (b *Backend) Active() int64 { return b.active.Load() }

// Address is the backend's IPv6 or IPv4 address with a port; the zero AddrPort
// if it has none of that family.
func (b *Backend) Address(ipv6 bool, port uint16) netip.AddrPort {
	for _, a := range b.Addresses {
		if a.Is6() == ipv6 {
			return netip.AddrPortFrom(a, port)
		}
	}
	return netip.AddrPort{}
}

// Start serves. Starting a backend that serves does nothing.
func (b *Backend) Start(ctx context.Context) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.running != nil {
		return nil
	}
	s, err := b.listen(ctx, b.fault)
	b.running = s
	return err
}

// Stop ends the backend as the death of its process would: listeners and open
// connections are closed. It returns when all of its goroutines have ended.
func (b *Backend) Stop() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.running != nil {
		b.running.close()
		b.running = nil
	}
}

// server is a running backend.
type server struct {
	backend *Backend
	ctx     context.Context // ends with the server
	cancel  context.CancelFunc
	wg      sync.WaitGroup

	mu        sync.Mutex // guards the sockets against close
	listeners []interface{ Close() error }
	conns     map[net.Conn]bool
	closed    bool
	fault     atomic.Int32
}

func (b *Backend) listen(ctx context.Context, f Fault) (*server, error) {
	s := &server{backend: b, conns: map[net.Conn]bool{}}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	if err := s.apply(ctx, f); err != nil {
		s.close()
		return nil, err
	}
	return s, nil
}

// open opens the listeners that serve; the fault decides what they do.
func (s *server) open(ctx context.Context) error {
	for _, at := range s.backend.listens {
		var err error
		if at.serve == nil {
			err = s.listenUDP(ctx, at.address)
		} else {
			err = s.listen(ctx, at)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (s *server) listen(ctx context.Context, at listens) error {
	l, err := s.backend.Namespace.Listen(ctx, at.network, at.address)
	if err != nil {
		return err
	}
	if !s.keep(l) {
		return net.ErrClosed
	}
	s.wg.Go(func() { s.accept(l, func(c net.Conn) { at.serve(s, c) }) })
	return nil
}

func (s *server) listenUDP(ctx context.Context, address string) error {
	pc, err := s.backend.Namespace.ListenPacket(ctx, "udp", address)
	if err != nil {
		return err
	}
	if !s.keep(pc) {
		return net.ErrClosed
	}
	c := pc.(*net.UDPConn)
	if err := wantDestinations(c); err != nil {
		return err
	}
	s.wg.Go(func() { s.serveDatagrams(c) })
	return nil
}

// keep makes close close l; false means that close came first.
func (s *server) keep(l interface{ Close() error }) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		l.Close()
		return false
	}
	s.listeners = append(s.listeners, l)
	return true
}

// closeListeners keeps programs from being started meanwhile: until it executes,
// a new child has copies of this process's sockets, and a copied listener goes on
// listening.
func (s *server) closeListeners() {
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, l := range s.listeners {
		l.Close()
	}
	s.listeners = nil
}

func (s *server) close() {
	s.cancel()
	s.closeListeners()
	s.mu.Lock()
	s.closed = true
	for c := range s.conns {
		c.Close()
	}
	s.mu.Unlock()
	s.wg.Wait()
}

func (s *server) accept(l net.Listener, serve func(net.Conn)) {
	for {
		c, err := l.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			// Out of descriptors, or the peer is gone: neither ends a listener.
			if Sleep(s.ctx, 10*time.Millisecond) != nil {
				return
			}
			continue
		}
		if s.current() == Reset {
			// With linger 0 close sends RST (tcp(7)).
			_ = c.(*net.TCPConn).SetLinger(0)
			c.Close()
			continue
		}
		s.handle(c, serve)
	}
}

func (s *server) handle(c net.Conn, serve func(net.Conn)) {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		c.Close()
		return
	}
	s.conns[c] = true
	s.mu.Unlock()
	s.backend.active.Add(1)
	s.wg.Go(func() {
		defer func() {
			c.Close()
			s.backend.active.Add(-1)
			s.mu.Lock()
			delete(s.conns, c)
			s.mu.Unlock()
		}()
		serve(c)
	})
}

// Sleep waits for d. Where ctx ends before, it returns at once, with ctx's error.
func Sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}
