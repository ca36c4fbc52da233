package load

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// threads is how many event loops there are.
const threads = 2

// maxDescriptors bounds the server's connections.
const maxDescriptors = 1 << 17

// poll is an epoll instance for one thread. Its calls don't tell Go's scheduler
// that they wait, so the process needs processors to spare ([prepareProcess]).
type poll struct {
	fd     int
	events [256]unix.EpollEvent
}

func newPoll() (*poll, error) {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("make epoll: %w", err)
	}
	return &poll{fd: fd}, nil
}

// add watches a socket; slot comes back with its events.
func (p *poll) add(fd int, events uint32, slot int) error {
	ev := unix.EpollEvent{Events: events, Fd: int32(slot)}
	if _, _, e := unix.RawSyscall6(unix.SYS_EPOLL_CTL, uintptr(p.fd), unix.EPOLL_CTL_ADD, uintptr(fd), uintptr(unsafe.Pointer(&ev)), 0, 0); e != 0 {
		return fmt.Errorf("watch socket: %w", e)
	}
	return nil
}

// wait waits for events, milliseconds at most.
func (p *poll) wait(milliseconds int) []unix.EpollEvent {
	n, _, e := unix.RawSyscall6(unix.SYS_EPOLL_PWAIT, uintptr(p.fd), uintptr(unsafe.Pointer(&p.events[0])), uintptr(len(p.events)), uintptr(milliseconds), 0, 0)
	if e != 0 {
		return nil // a signal came
	}
	return p.events[:n]
}

// server serves every kind of load on all addresses of its namespace.
type server struct {
	loops      []*serverLoop
	turn       atomic.Uint32
	got, wrong atomic.Uint64 // large datagrams
	conns      [maxDescriptors]serverConn
}

// serverConn is a connection, by its descriptor. It belongs to one loop.
type serverConn struct {
	// owned is there for the race detector: epoll orders what accept and the loop do.
	owned    atomic.Bool
	kind     Kind
	received uint64
	wrong    uint64
}

// serverLoop is one thread.
type serverLoop struct {
	server *server
	poll   *poll
	tcp    map[int]Kind // listeners
	udp    map[int]Kind
	buffer []byte
	batch  *batch
}

// Serve serves until ctx ends; it calls listening when it does. Its threads end
// with the process.
func Serve(ctx context.Context, listening func()) error {
	prepareProcess(threads)
	s := &server{}
	for range threads {
		l, err := s.newLoop()
		if err != nil {
			return err
		}
		s.loops = append(s.loops, l)
	}
	for _, k := range []Kind{Bulk, Short, Exchange} {
		if err := s.listenTCP(k, k.Port()); err != nil {
			return err
		}
	}
	if err := s.listenTCP(control, controlPort); err != nil {
		return err
	}
	for _, l := range s.loops {
		for _, k := range []Kind{Datagram, Session, Window, Flood} {
			if err := l.listenUDP(k); err != nil {
				return err
			}
		}
	}
	for _, l := range s.loops {
		go l.run()
	}
	listening()
	<-ctx.Done()
	return nil
}

// control is the kind of connection that asks what was received.
const control Kind = "control"

func (s *server) newLoop() (*serverLoop, error) {
	p, err := newPoll()
	if err != nil {
		return nil, err
	}
	return &serverLoop{
		server: s, poll: p, tcp: map[int]Kind{}, udp: map[int]Kind{},
		buffer: make([]byte, streamBuffer), batch: newBatch(2048, true),
	}, nil
}

// listenTCP opens a listener that all loops accept from.
func (s *server) listenTCP(k Kind, port uint16) error {
	fd, err := openSocket(unix.SOCK_STREAM | unix.SOCK_NONBLOCK)
	if err == nil {
		err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
	}
	if err == nil {
		err = unix.Bind(fd, &unix.SockaddrInet4{Port: int(port)})
	}
	if err == nil {
		err = unix.Listen(fd, 1<<15)
	}
	for _, l := range s.loops {
		if err == nil {
			l.tcp[fd] = k
			err = l.poll.add(fd, unix.EPOLLIN|unix.EPOLLEXCLUSIVE, fd)
		}
	}
	if err != nil {
		return fmt.Errorf("listen for %s: %w", k, err)
	}
	return nil
}

// listenUDP opens the loop's own socket; the kernel divides the sessions among
// those of all loops.
func (l *serverLoop) listenUDP(k Kind) error {
	fd, err := openSocket(unix.SOCK_DGRAM | unix.SOCK_NONBLOCK)
	if err == nil {
		err = errors.Join(
			unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1),
			unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 16<<20),
			unix.Bind(fd, &unix.SockaddrInet4{Port: int(k.Port())}),
		)
	}
	if err == nil {
		l.udp[fd] = k
		err = l.poll.add(fd, unix.EPOLLIN, fd)
	}
	if err != nil {
		return fmt.Errorf("listen for %s: %w", k, err)
	}
	return nil
}

func (l *serverLoop) run() {
	runtime.LockOSThread()
	for {
		for _, e := range l.poll.wait(1000) {
			fd := int(e.Fd)
			if k, ok := l.tcp[fd]; ok {
				l.accept(fd, k)
			} else if k, ok := l.udp[fd]; ok {
				l.datagrams(fd, k)
			} else if c := &l.server.conns[fd]; c.owned.Load() && !l.serve(fd, c) {
				c.owned.Store(false)
				closeSocket(fd)
			}
		}
	}
}

// acceptsAtOnce leaves some for the other loops.
const acceptsAtOnce = 16

// accept gives long connections to the loops in turn; short ones stay.
func (l *serverLoop) accept(listener int, k Kind) {
	for range acceptsAtOnce {
		n, _, e := unix.RawSyscall6(unix.SYS_ACCEPT4, uintptr(listener), 0, 0, unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0, 0)
		if e != 0 {
			return
		}
		fd := int(n)
		if fd >= maxDescriptors {
			closeSocket(fd)
			continue
		}
		to := l
		if k == Bulk || k == Exchange {
			to = l.server.loops[l.server.turn.Add(1)%threads]
			_ = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1) // else it is slower, not wrong
		}
		c := &l.server.conns[fd]
		c.owned.Load()
		c.kind, c.received, c.wrong = k, 0, 0
		c.owned.Store(true)
		events := uint32(unix.EPOLLIN)
		if k == control {
			events = unix.EPOLLOUT
		}
		if to.poll.add(fd, events, fd) != nil {
			closeSocket(fd)
		}
	}
}

// serve does what a connection's kind is for; false when it is over.
func (l *serverLoop) serve(fd int, c *serverConn) bool {
	switch c.kind {
	case Exchange, Short:
		return l.answer(fd, c)
	case Bulk:
		return l.drain(fd, c)
	}
	report := binary.BigEndian.AppendUint64(nil, l.server.got.Load())
	_, _ = write(fd, binary.BigEndian.AppendUint64(report, l.server.wrong.Load())) // a client that is gone misses it
	return false
}

// answer answers a request, in as many pieces as it comes. After a whole one it ends a [Short] connection.
func (l *serverLoop) answer(fd int, c *serverConn) bool {
	n, e := read(fd, l.buffer[:messageSize])
	if e == unix.EAGAIN {
		return true
	}
	if e != 0 || n == 0 {
		return false
	}
	wrote, e := write(fd, l.buffer[:n])
	c.received += uint64(n)
	return e == 0 && wrote == n && (c.kind == Exchange || c.received < messageSize) // so little always fits: the client awaits it
}

// drain takes what there is of a stream, and confirms it at the end.
func (l *serverLoop) drain(fd int, c *serverConn) bool {
	n, e := read(fd, l.buffer)
	switch {
	case e == unix.EAGAIN:
		return true
	case e != 0:
		return false
	case n == 0:
		report := binary.BigEndian.AppendUint64(nil, c.received)
		_, _ = write(fd, binary.BigEndian.AppendUint64(report, c.wrong)) // a client that is gone misses it
		return false
	}
	c.check(l.buffer[:n])
	return true
}

// check looks at the marks that are whole in what was read of a stream.
func (c *serverConn) check(part []byte) {
	for at := -int(c.received) & (markEvery - 1); at+8 <= len(part); at += markEvery {
		if binary.BigEndian.Uint64(part[at:]) != c.received+uint64(at) {
			c.wrong++
		}
	}
	c.received += uint64(len(part))
}

// datagrams answers what is there, or counts it.
func (l *serverLoop) datagrams(fd int, k Kind) {
	n := l.batch.receive(fd)
	if n == 0 {
		return
	}
	answers := n
	if k.large() {
		answers = l.count(n)
	} else {
		for i := range n {
			l.batch.setLength(i, len(l.batch.datagram(i)))
		}
	}
	for from := 0; from < answers; {
		sent, e := l.batch.send(fd, from, answers)
		if e != 0 {
			from++ // an error of one client doesn't delay the others
			continue
		}
		from += sent
	}
}

// count counts large datagrams and moves those that ask for an answer to the
// front, as headers alone; it returns their number.
func (l *serverLoop) count(n int) (ask int) {
	wrong := 0
	for i := range n {
		d := l.batch.datagram(i)
		if len(d) != DatagramSize || binary.BigEndian.Uint64(d) != binary.BigEndian.Uint64(d[checkAt:]) {
			wrong++
			continue
		}
		if binary.BigEndian.Uint64(d[flagAt:]) == 0 {
			continue
		}
		copy(l.batch.buffers[ask], d[:headerSize])
		l.batch.addresses[ask] = l.batch.addresses[i]
		l.batch.setLength(ask, headerSize)
		ask++
	}
	l.server.got.Add(uint64(n - wrong))
	l.server.wrong.Add(uint64(wrong))
	return ask
}
