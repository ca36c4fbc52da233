package userspace

import (
	"bufio"
	"context"
	"encoding/binary"
	"io"
	"net"
	"net/netip"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/userspace/handover"
)

// keeping answers as the keeper of this very process would.
func keeping(t *testing.T) *handover.Kept {
	t.Helper()
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	must(t, err)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for ask := make([]byte, 4096); ; {
			n, _, err := unix.Recvfrom(pair[1], ask, 0)
			if err == unix.EINTR {
				continue
			} else if err != nil || n < 4 {
				return
			}
			var numbers []int
			for b := ask[:n]; len(b) > 0; b = b[4:] {
				numbers = append(numbers, int(binary.NativeEndian.Uint32(b)))
			}
			if unix.Sendmsg(pair[1], []byte{0}, unix.UnixRights(numbers...), nil, unix.MSG_NOSIGNAL) != nil {
				_ = unix.Sendto(pair[1], []byte{0}, unix.MSG_NOSIGNAL, nil)
			}
		}
	}()
	t.Cleanup(func() {
		unix.Close(pair[0])
		<-done
		unix.Close(pair[1])
	})
	return &handover.Kept{Socket: pair[0], Keeper: os.Getpid()}
}

// TestRecover: what a Server has left that stopped at any moment goes on in another one, with the limits of its service.
func TestRecover(t *testing.T) {
	t.Parallel()
	const idle = 3 * time.Second
	ep := tcpEndpoint(t, echo)
	of := func(limit time.Duration) testService {
		return testService{name: "s", eps: []netip.AddrPort{ep}, port: service.Port{IdleTimeout: limit}}
	}
	s := start(t, Config{Recorded: func(int) {}}, testPlan(of(time.Hour)))
	c := connect(t, s)
	ask(t, c, "before")
	h, _ := freeze(t, s) // as if it had crashed
	remains, err := Salvage(keeping(t), s.records.fd)
	must(t, err)
	next := New(Config{TCPOrigin: s.cfg.TCPOrigin})
	must(t, next.Inherit(remains.Listeners()))
	drainAtEnd(t, next)
	serve(next, testPlan(of(idle)))
	must(t, next.Recover(remains))
	h.Release()
	go next.Run(context.Background())
	if got := ask(t, c, "y"); got != "y" {
		t.Errorf("echo is %q", got)
	}
	eventually(t, "a line each way is counted, and nothing of before", func() bool {
		n := countersOf(next, testServiceKey("s"))
		return n.Total == 0 && n.BytesIn == 2 && n.BytesOut == 2
	})
	if _, end := readEnd(c); end != "reset" {
		t.Errorf("a client that is silent for longer than its service allows met %s, want a reset", end)
	}
}

// TestRecoverBeforeTheRecord: a client that a Server had accepted when it crashed, and not recorded, is served in the next one
// from the beginning; one that bytes were read from isn't.
func TestRecoverBeforeTheRecord(t *testing.T) {
	p := testPlan(testService{name: "s", eps: []netip.AddrPort{tcpEndpoint(t, echo)}})
	s := start(t, Config{Recorded: func(int) {}}, p)
	h, _ := freeze(t, s)
	accept := func() (*net.TCPConn, int) {
		c := connect(t, s)
		var fd int
		eventually(t, "a client to accept", func() bool {
			n, err := sysAccept(s.tcp[0].fds[0], new(rawAddress))
			fd = n
			return err == 0
		})
		return c, fd
	}
	silent, a := accept()
	spoke, b := accept()
	_, err := io.WriteString(spoke, "hello\n")
	must(t, err)
	ended, c := accept()
	_, err = io.WriteString(ended, "hello\n")
	must(t, err)
	must(t, ended.CloseWrite())
	late, d := accept()
	_, err = io.WriteString(late, "hello\n")
	must(t, err)
	eventually(t, "a byte to read", func() bool {
		n, err := unix.Read(d, make([]byte, 1))
		return n == 1 && err == nil
	})
	s.records.head.moving[0].Store(accepting)
	remains, err := Salvage(keeping(t), s.records.fd)
	must(t, err)
	for _, fd := range []int{a, b, c, d} { // the keeper's
		unix.Close(fd)
	}
	next := New(Config{TCPOrigin: s.cfg.TCPOrigin})
	must(t, next.Inherit(remains.Listeners()))
	drainAtEnd(t, next)
	serve(next, p)
	must(t, next.Recover(remains))
	h.Release()
	go next.Run(context.Background())
	if got := ask(t, silent, "x"); got != "x" {
		t.Errorf("of a client that was silent, echo is %q", got)
	}
	for what, c := range map[string]*net.TCPConn{"spoke": spoke, "spoke and ended": ended} {
		if got, err := bufio.NewReader(c).ReadString('\n'); got != "hello\n" {
			t.Errorf("of a client that %s, echo is %q, %v", what, got, err)
		}
	}
	if got, end := readEnd(late); got != "" {
		t.Errorf("a client that a byte was read from got %q, and %s", got, end)
	}
}

// TestEndsLeaveRecordsOfOthers: a connection whose client is gone and whose endpoint still has to take what was sent leaves alone
// the record of another one, which has the descriptor that the client had.
func TestEndsLeaveRecordsOfOthers(t *testing.T) {
	const size = 512 << 10 // more than an endpoint takes that doesn't read
	var first atomic.Bool
	read := make(chan struct{})
	ep := tcpEndpoint(t, func(c *net.TCPConn) {
		if first.CompareAndSwap(false, true) {
			<-read
		}
		echo(c)
	})
	s := start(t, Config{Recorded: func(int) {}, Loops: 1}, testPlan(testService{name: "s", eps: []netip.AddrPort{ep}}))
	inLoop := func(f func(*tcpConn)) {
		everyPoller(s.loops, func(l *loop) {
			for _, x := range l.conns.items {
				if x != nil {
					f(x)
				}
			}
		})
	}
	c := connect(t, s)
	_, err := c.Write(make([]byte, size))
	must(t, err)
	eventually(t, "all is on its way to the endpoint", func() bool { return countersOf(s, testServiceKey("s")).BytesIn == size })
	var left *tcpConn
	var fd int
	inLoop(func(x *tcpConn) { left, fd = x, x.sides[clientSide].fd })
	reset(c)
	eventually(t, "it waits for its endpoint", func() (is bool) {
		inLoop(func(x *tcpConn) { is = x.phase == leaving })
		return is
	})
	var other *tcpConn
	for tries := 0; other == nil; tries++ {
		if tries == 20 {
			t.Fatalf("of %d further connections none has descriptor %d", tries, fd)
		}
		ask(t, connect(t, s), "x")
		inLoop(func(x *tcpConn) {
			if x != left && x.sides[clientSide].fd == fd {
				other = x
			}
		})
	}
	close(read)
	eventually(t, "it ends", func() bool {
		there := false
		inLoop(func(x *tcpConn) { there = there || x == left })
		return !there
	})
	inLoop(func(x *tcpConn) {
		if x == other && x.record.state() != recordRelaying {
			t.Errorf("the record of a connection is in phase %d, want %d", x.record.state(), recordRelaying)
		}
	})
}

// TestNothingToRecover: a Server that hasn't confirmed that it has taken over leaves nothing, as another one goes on; one that has does.
func TestNothingToRecover(t *testing.T) {
	p := testPlan(testService{name: "s", eps: []netip.AddrPort{tcpEndpoint(t, echo)}})
	s := start(t, Config{}, p)
	ask(t, connect(t, s), "x")
	recorded := 0
	next := heir(t, s, Config{Recorded: func(int) { recorded++ }}, p)
	h, state := freeze(t, s)
	must(t, next.TakeOver(state, copies(t, h.Files)))
	if recorded > 0 {
		t.Error("before it confirmed, it says that there are records")
	}
	kept := keeping(t)
	if remains, err := Salvage(kept, next.records.fd); remains != nil || err != nil {
		t.Errorf("before it confirmed, there are %+v (%v)", remains, err)
	}
	next.Confirm()
	if recorded != 1 {
		t.Errorf("once it has, it says %d times that there are records", recorded)
	}
	remains, err := Salvage(kept, next.records.fd)
	if err != nil || remains == nil || len(remains.state.Connections) != 1 {
		t.Errorf("once it has, there are %+v (%v)", remains, err)
	} else {
		remains.Close()
	}
	h.Release()
	go next.Run(context.Background())
}

// TestMoreThanRecords: a connection whose descriptor's number is too high for a record is served as others, and Salvage finds the others.
func TestMoreThanRecords(t *testing.T) {
	s := New(Config{Recorded: func(int) {}, TCPOrigin: func(int, service.Family) (netip.AddrPort, error) { return vip, nil }})
	must(t, s.Listen())
	serve(s, testPlan(testService{name: "s", eps: []netip.AddrPort{tcpEndpoint(t, echo)}}))
	go s.Run(context.Background())
	drainAtEnd(t, s)
	low := connect(t, s)
	ask(t, low, "x")
	h, state := freeze(t, s)
	s.records.number = s.records.number[:h.Files[state.Connections[0].Client.File-1]+1]
	h.Resume()
	high := connect(t, s)
	ask(t, high, "y")
	h, _ = freeze(t, s)
	defer h.Resume()
	remains, err := Salvage(keeping(t), s.records.fd)
	must(t, err)
	defer remains.Close()
	if len(remains.state.Connections) != 1 || remains.Broken != 0 {
		t.Errorf("of two connections, one of which can't be recorded, %d are there, and %d broken", len(remains.state.Connections), remains.Broken)
	}
}
