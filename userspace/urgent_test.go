package userspace

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Bytes behind urgent data arrive, though a read stops there: while the loop was
// busy elsewhere they all came together, and nothing will say so again.
func TestBytesBehindUrgentData(t *testing.T) {
	for _, from := range []string{"client", "endpoint"} {
		t.Run(from, func(t *testing.T) {
			accepted, over := make(chan *net.TCPConn), make(chan struct{})
			defer close(over)
			ep := tcpEndpoint(t, func(c *net.TCPConn) {
				c.SetDeadline(time.Now().Add(patience))
				accepted <- c
				<-over
			})
			s := start(t, Config{Loops: 1}, testPlan(testService{name: "s", eps: []netip.AddrPort{ep}}))
			sender := connect(t, s)
			receiver := <-accepted
			if from == "endpoint" {
				sender, receiver = receiver, sender
			}
			send(t, sender, "begin", 0)
			receive(t, receiver, "begin")
			goOn := holdLoop(s)
			send(t, sender, "before", 0)
			send(t, sender, "!", unix.MSG_OOB)
			send(t, sender, "behind", 0)
			eventually(t, "all of it is there", func() bool { return unacknowledged(t, sender) == 0 })
			goOn()
			receive(t, receiver, "beforebehind")
			send(t, sender, "end", 0)
			receive(t, receiver, "end")
			eventually(t, "the stream to be one without urgent data", func() bool {
				urgent := false
				everyPoller(s.loops, func(*loop) {
					x := s.live.all()[0].(*tcpConn)
					urgent = x.sides[clientSide].urgent || x.sides[endpointSide].urgent
				})
				return !urgent
			})
		})
	}
}

// holdLoop keeps a Server's only loop busy until the function that it returns is called.
func holdLoop(s *Server) func() {
	held, free := make(chan struct{}), make(chan struct{})
	s.loops[0].post(func() { close(held); <-free })
	<-held
	return func() { close(free) }
}

func send(t *testing.T, c *net.TCPConn, text string, flags int) {
	t.Helper()
	onSocket(t, c, func(fd int) error { return unix.Sendto(fd, []byte(text), flags, nil) })
}

func receive(t *testing.T, c *net.TCPConn, want string) {
	t.Helper()
	got := make([]byte, len(want))
	if n, err := io.ReadFull(c, got); string(got) != want {
		t.Fatalf("received %q, %v; want %q", got[:n], err, want)
	}
}

// unacknowledged is how many bytes c's peer hasn't got yet.
func unacknowledged(t *testing.T, c *net.TCPConn) (n int) {
	t.Helper()
	onSocket(t, c, func(fd int) (err error) { n, err = unix.IoctlGetInt(fd, unix.SIOCOUTQ); return err })
	return n
}

func onSocket(t *testing.T, c *net.TCPConn, f func(fd int) error) {
	t.Helper()
	raw, err := c.SyscallConn()
	if err == nil {
		controlErr := raw.Control(func(fd uintptr) { err = f(int(fd)) })
		err = errors.Join(controlErr, err)
	}
	must(t, err)
}

// A direction that has ended holds no pipe, while the other goes on.
func TestEndedDirectionHoldsNoPipe(t *testing.T) {
	got, over := make(chan struct{}), make(chan struct{})
	ep := tcpEndpoint(t, func(c *net.TCPConn) {
		defer c.Close()
		io.Copy(io.Discard, c)
		close(got)
		<-over
	})
	s := start(t, Config{Loops: 1}, testPlan(testService{name: "s", eps: []netip.AddrPort{ep}}))
	c := connect(t, s)
	if _, err := c.Write(make([]byte, 4<<20)); err != nil {
		t.Fatal(err)
	}
	c.CloseWrite()
	<-got
	defer close(over)
	x := s.live.all()[0].(*tcpConn)
	held := make(chan bool)
	x.loop.post(func() { held <- x.pumps[clientSide].piped })
	if <-held {
		t.Error("it holds a pipe")
	}
	if len(s.pipes.free) == 0 {
		t.Error("no pipe was used")
	}
}
