package lab

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// Fault is a way in which a backend fails.
type Fault int32

// The faults. TCP connections that are open when a fault sets in stay open.
const (
	// Healthy is no fault.
	Healthy Fault = iota
	// Refuse closes the sockets: TCP answers with RST, UDP with ICMP port unreachable.
	Refuse
	// Hang answers no SYN: the accept queues are full, as those of a process
	// that is stuck are. UDP is received and not answered, and so are lines on
	// open connections.
	Hang
	// Reset accepts TCP connections and resets them at once. UDP is answered.
	Reset
	// Silent accepts and reads, and answers nothing.
	Silent
	// Failing answers HTTP with status 500; TCP and UDP are healthy.
	Failing
)

var faultNames = [...]string{"healthy", "refuse", "hang", "reset", "silent", "failing"}

// String returns the fault's name in lower case.
func (f Fault) String() string {
	if f >= 0 && int(f) < len(faultNames) {
		return faultNames[f]
	}
	return fmt.Sprintf("fault(%d)", int32(f))
}

// Fail puts the backend into a fault, or out of it with [Healthy]. When Fail
// returns, new connections meet the fault. A backend that is stopped takes it
// up when it is started.
func (b *Backend) Fail(ctx context.Context, f Fault) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.fault = f
	if b.running == nil {
		return nil
	}
	if err := b.running.apply(ctx, f); err != nil {
		return fmt.Errorf("put backend %s into fault %s: %w", b.Name, f, err)
	}
	return nil
}

func (s *server) current() Fault { return Fault(s.fault.Load()) }

// apply brings the sockets into the state that f needs. Only Refuse and Hang
// need other sockets than serving does.
func (s *server) apply(ctx context.Context, f Fault) error {
	was := Fault(s.fault.Swap(int32(f)))
	s.mu.Lock()
	open := len(s.listeners) > 0
	s.mu.Unlock()
	if open && sockets(was) == sockets(f) {
		return nil
	}
	s.closeListeners()
	switch sockets(f) {
	case Refuse:
		return s.whenFree(ctx, s.takeNone)
	case Hang:
		return s.whenFree(ctx, s.hang)
	}
	return s.whenFree(ctx, s.open)
}

// freeWait is how long ports may be taken by listeners that are closed already.
const freeWait = 5 * time.Second

// whenFree opens listeners as soon as the former ones are gone. A program that has just
// been started closes its copies of them a moment after vfork(2) has ended, which is all
// that ForkLock knows of (begin_new_exec in the kernel's fs/exec.c).
func (s *server) whenFree(ctx context.Context, open func(context.Context) error) error {
	for end := time.Now().Add(freeWait); ; time.Sleep(time.Millisecond) {
		err := open(ctx)
		if !errors.Is(err, unix.EADDRINUSE) || ctx.Err() != nil || time.Now().After(end) {
			return err
		}
		s.closeListeners()
	}
}

// sockets is the fault that stands for all with the same sockets.
func sockets(f Fault) Fault {
	if f == Refuse || f == Hang {
		return f
	}
	return Healthy
}

// fillWait is how long the filler of an accept queue may wait: one that gets no answer
// for so long finds it full, of a client that was quicker.
const fillWait = 10 * time.Second

// hang opens listeners whose accept queues are full. A backlog of 0 holds one
// connection; while it is there, the kernel drops every further SYN
// (tcp_conn_request in net/ipv4/tcp_input.c).
func (s *server) hang(ctx context.Context) error {
	for _, port := range []uint16{LinePort, HTTPPort} {
		var fd int
		err := s.backend.Namespace.Do(func() (err error) {
			if fd, err = bind(port, len(s.backend.Addresses) > 1); err != nil {
				return err
			}
			if err = unix.Listen(fd, 0); err != nil {
				unix.Close(fd)
			}
			return err
		})
		if err != nil {
			return err
		}
		s.keep(os.NewFile(uintptr(fd), "full listener"))
		filling, cancel := context.WithTimeout(ctx, fillWait)
		filler, err := s.backend.Namespace.Dial(filling, "tcp", fmt.Sprintf("127.0.0.1:%d", port))
		cancel()
		switch {
		case err == nil:
			s.keep(filler)
		case ctx.Err() != nil || !errors.Is(err, os.ErrDeadlineExceeded) && !errors.Is(err, context.DeadlineExceeded):
			return fmt.Errorf("fill accept queue: %w", err)
		}
	}
	return s.listenUDP(ctx, fmt.Sprintf(":%d", LinePort))
}

// takeNone shows that nothing listens for TCP any more: what did would take connections, and reset them when it ends.
func (s *server) takeNone(context.Context) error {
	for _, at := range s.backend.listens {
		if at.network != "tcp" {
			continue
		}
		_, text, _ := net.SplitHostPort(at.address)
		port, err := strconv.ParseUint(text, 10, 16)
		if err != nil {
			return err
		}
		err = s.backend.Namespace.Do(func() error {
			fd, err := bind(uint16(port), len(s.backend.Addresses) > 1)
			if err == nil {
				unix.Close(fd)
			}
			return err
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// bind returns a socket that is bound to a port, in IPv4 or both families; EADDRINUSE while another one listens.
func bind(port uint16, ipv6 bool) (int, error) {
	family, address := unix.AF_INET, unix.Sockaddr(&unix.SockaddrInet4{Port: int(port)})
	if ipv6 { // with V6ONLY off it serves both families
		family, address = unix.AF_INET6, &unix.SockaddrInet6{Port: int(port)}
	}
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("open socket: %w", err)
	}
	err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
	if err == nil && ipv6 {
		err = unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 0)
	}
	if err == nil {
		err = unix.Bind(fd, address)
	}
	if err != nil {
		unix.Close(fd)
		return -1, fmt.Errorf("bind to port %d: %w", port, err)
	}
	return fd, nil
}
