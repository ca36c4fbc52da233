package userspace

import (
	"bytes"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/service"
)

// exchanging starts a Server with one loop, and returns both ends of a connection
// through it that its ring serves.
func exchanging(t *testing.T, port testService) (s *Server, client, end *net.TCPConn) {
	t.Helper()
	accepted, over := make(chan *net.TCPConn), make(chan struct{})
	t.Cleanup(func() { close(over) })
	ep := tcpEndpoint(t, func(c *net.TCPConn) {
		c.SetDeadline(time.Now().Add(patience))
		accepted <- c
		<-over
	})
	port.name, port.eps = "s", []netip.AddrPort{ep}
	s = start(t, Config{Loops: 1, exchanges: eagerly}, testPlan(port))
	client = connect(t, s)
	end = <-accepted
	for range 2 {
		askAndAnswer(t, client, end)
	}
	if n := members(s); n != 1 {
		t.Fatalf("the ring has %d members, want 1 (io_uring isn't allowed here?)", n)
	}
	return s, client, end
}

// askAndAnswer has both ends send a small message.
func askAndAnswer(t *testing.T, client, end *net.TCPConn) {
	t.Helper()
	send(t, client, "question", 0)
	receive(t, end, "question")
	send(t, end, "answer", 0)
	receive(t, client, "answer")
}

// members is how many connections the rings serve.
func members(s *Server) (n int) {
	s.everyLoop(func(l *loop) { n += l.exchanges.members })
	return n
}

func TestRingServesSmallMessages(t *testing.T) {
	s, client, end := exchanging(t, testService{})
	for range 1000 {
		askAndAnswer(t, client, end)
	}
	if n := members(s); n != 1 {
		t.Errorf("the ring has %d members, want 1", n)
	}
	c := s.Connections()[0]
	if c.BytesIn != 8*1002 || c.BytesOut != 6*1002 {
		t.Errorf("%d bytes were counted in and %d out, want %d and %d", c.BytesIn, c.BytesOut, 8*1002, 6*1002)
	}
}

// A large message, an end of data, a reset: epoll goes on from there.
func TestRingIsLeftForWhatIsNotSmall(t *testing.T) {
	large := bytes.Repeat([]byte("large"), 1<<20)
	for _, test := range []struct {
		name string
		do   func(t *testing.T, from, to *net.TCPConn)
	}{
		{"a large message", func(t *testing.T, from, to *net.TCPConn) {
			go from.Write(large)
			got := make([]byte, len(large))
			if _, err := io.ReadFull(to, got); err != nil || !bytes.Equal(got, large) {
				t.Errorf("it didn't arrive as it was sent: %v", err)
			}
			send(t, to, "thanks", 0)
			receive(t, from, "thanks")
		}},
		{"an end of data", func(t *testing.T, from, to *net.TCPConn) {
			send(t, from, "last", 0)
			from.CloseWrite()
			receive(t, to, "last")
			if _, err := to.Read(make([]byte, 1)); err != io.EOF {
				t.Errorf("after the last byte: %v, want the end", err)
			}
			send(t, to, "answer", 0)
			to.CloseWrite()
			receive(t, from, "answer")
			if _, err := from.Read(make([]byte, 1)); err != io.EOF {
				t.Errorf("after the answer: %v, want the end", err)
			}
		}},
		{"a reset", func(t *testing.T, from, to *net.TCPConn) {
			from.SetLinger(0)
			from.Close()
			if _, err := to.Read(make([]byte, 1)); err == nil || err == io.EOF {
				t.Errorf("after a reset: %v, want one", err)
			}
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			for _, from := range []string{"client", "endpoint"} {
				t.Run(from, func(t *testing.T) {
					_, client, end := exchanging(t, testService{})
					if from == "client" {
						test.do(t, client, end)
					} else {
						test.do(t, end, client)
					}
				})
			}
		})
	}
}

// A reset that the ring meets when it sends is told once, and passed on all the same.
func TestResetMetByTheRing(t *testing.T) {
	for _, dies := range []string{"client", "endpoint"} {
		t.Run(dies, func(t *testing.T) {
			s, dier, asker := exchanging(t, testService{})
			if dies == "endpoint" {
				dier, asker = asker, dier
			}
			l := s.loops[0]
			l.post(func() {
				asker.Write([]byte("question"))
				l.post(func() { // the question has been received, and not been sent yet
					reset(dier)
					time.Sleep(20 * time.Millisecond)
				})
			})
			if data, end := readEnd(asker); data != "" || end != "reset" {
				t.Errorf("who asked reads %q, %s; want a reset", data, end)
			}
		})
	}
}

// Members that always have something to do, and more of it than the ring takes at
// once, keep nobody waiting: not each other, and not the loop.
func TestBusyMembersKeepNobodyWaiting(t *testing.T) {
	usual := ringConfig
	ringConfig.Entries = 16
	t.Cleanup(func() { ringConfig = usual }) // before start's, so after it
	const members = 40
	ep := tcpEndpoint(t, echo)
	s := start(t, Config{Loops: 1, exchanges: eagerly}, testPlan(testService{name: "s", eps: []netip.AddrPort{ep}}))
	for range members {
		c := connect(t, s)
		for range 2 {
			send(t, c, "question", 0)
			receive(t, c, "question")
		}
	}
	var circling []*tcpConn
	s.everyLoop(func(l *loop) {
		for _, x := range l.slots {
			if x != nil && x.member {
				circle(t, x)
				circling = append(circling, x)
			}
		}
	})
	if len(circling) != members {
		t.Fatalf("the ring has %d members, want %d", len(circling), members)
	}
	for i, x := range circling {
		begin := x.meters[clientSide].count.Load()
		eventually(t, "all circle", func() bool { return x.meters[clientSide].count.Load() > begin+1000 })
		if i%10 == 0 {
			s.everyLoop(func(*loop) {}) // is answered
		}
	}
}

// circle makes both sides of a member the two ends of one socket pair, by which a
// message goes round and round.
func circle(t *testing.T, x *tcpConn) {
	x.leaveRing()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Error(err)
		return
	}
	for i, fd := range fds {
		side := &x.sides[i]
		unix.EpollCtl(x.loop.epoll, unix.EPOLL_CTL_DEL, side.fd, nil)
		unix.Dup3(fd, side.fd, unix.O_CLOEXEC)
		unix.Close(fd)
		side.watch(x)
		side.readable = false
	}
	x.join()
	unix.Write(x.sides[endpointSide].fd, []byte("round"))
}

// A sink that doesn't read holds its source up, and nothing is lost.
func TestRingIsLeftBySlowReaders(t *testing.T) {
	_, client, end := exchanging(t, testService{})
	message := bytes.Repeat([]byte("0123456789"), 100)
	sent := make(chan int)
	go func() {
		n := 0
		client.SetWriteDeadline(time.Now().Add(2 * time.Second))
		for {
			m, err := client.Write(message)
			if n += m; err != nil {
				break
			}
		}
		client.CloseWrite()
		sent <- n
	}()
	n := <-sent
	got, err := io.ReadAll(end)
	if err != nil || len(got) != n {
		t.Fatalf("%d bytes arrived of %d: %v", len(got), n, err)
	}
	for i := range got {
		if got[i] != message[i%len(message)] {
			t.Fatalf("byte %d is %q", i, got[i])
		}
	}
}

// Who kills a connection, or waits for silence to end it, finds it in the ring too.
func TestConnectionsInTheRingEnd(t *testing.T) {
	for name, test := range map[string]struct {
		port testService
		end  func(*Server)
	}{
		"killed": {end: func(s *Server) { s.live.all()[0].kill() }},
		"silent": {port: testService{port: service.Port{IdleTimeout: time.Second}}, end: func(*Server) {}},
	} {
		t.Run(name, func(t *testing.T) {
			s, client, end := exchanging(t, test.port)
			test.end(s)
			for _, c := range []*net.TCPConn{client, end} {
				if _, err := c.Read(make([]byte, 1)); err == nil || err == io.EOF {
					t.Errorf("a read says %v, want a reset", err)
				}
			}
			if n := members(s); n != 0 {
				t.Errorf("the ring has %d members, want none", n)
			}
		})
	}
}

// A byte of urgent data that nobody reads doesn't keep the kernel busy: a receive
// that waits for readiness itself would end up in a thread of the kernel's.
func TestUrgentDataInTheRing(t *testing.T) {
	_, client, end := exchanging(t, testService{})
	send(t, client, "before", 0)
	send(t, client, "!", unix.MSG_OOB)
	receive(t, end, "before")
	for range 3 {
		send(t, end, "answer", 0)
		receive(t, client, "answer")
	}
	threads, err := filepath.Glob("/proc/self/task/*/comm")
	if err != nil || len(threads) == 0 {
		t.Fatalf("threads: %v, %v", threads, err)
	}
	for _, f := range threads {
		if name, _ := os.ReadFile(f); strings.HasPrefix(string(name), "iou-wrk") {
			t.Errorf("there is a thread %s", name)
		}
	}
	send(t, client, "behind", 0)
	receive(t, end, "behind")
}

// When few messages come, members go back to epoll; later the ring is given back, and a
// new one made when there is need.
func TestRingIsLeftWhenLittleIsToDo(t *testing.T) {
	s, client, end := exchanging(t, testService{})
	s.everyLoop(func(l *loop) {
		l.exchanges.rules = usualExchanges
		l.exchanges.turns, l.exchanges.arrivals = 0, 0
	})
	eventually(t, "the ring has no members", func() bool {
		send(t, client, "question", 0)
		receive(t, end, "question")
		return members(s) == 0
	})
	s.everyLoop(func(l *loop) { l.exchanges.left -= int64(ringRest) + 1 })
	eventually(t, "there is no ring", func() (none bool) {
		send(t, client, "question", 0)
		receive(t, end, "question")
		s.everyLoop(func(l *loop) { none = l.exchanges.ring == nil })
		return none
	})
	s.everyLoop(func(l *loop) { l.exchanges.rules, l.exchanges.crowded = eagerly, true })
	for range 3 {
		send(t, end, "answer", 0)
		receive(t, client, "answer")
	}
	if n := members(s); n != 1 {
		t.Errorf("the ring has %d members, want 1", n)
	}
}

// Where the kernel refuses a ring, epoll goes on, and the log says so once.
func TestRingIsRefused(t *testing.T) {
	usual := ringConfig
	ringConfig.Entries = 0 // EINVAL
	t.Cleanup(func() { ringConfig = usual })
	var log bytes.Buffer
	ep := tcpEndpoint(t, echo)
	s := start(t, Config{Loops: 1, exchanges: eagerly, Logger: slog.New(slog.NewTextHandler(&log, nil))}, testPlan(testService{name: "s", eps: []netip.AddrPort{ep}}))
	for range 2 {
		c := connect(t, s)
		for range 10 {
			send(t, c, "question", 0)
			receive(t, c, "question")
		}
	}
	if n := members(s); n != 0 {
		t.Errorf("the ring has %d members, want none", n)
	}
	if said := log.String(); strings.Count(said, "epoll alone") != 1 || !strings.Contains(said, "invalid argument") {
		t.Errorf("the log says %q; want once that epoll serves alone, and why", said)
	}
}

func TestNoRing(t *testing.T) {
	ep := tcpEndpoint(t, echo)
	s := start(t, Config{Loops: 1, EpollOnly: true, exchanges: eagerly}, testPlan(testService{name: "s", eps: []netip.AddrPort{ep}}))
	c := connect(t, s)
	for range 10 {
		send(t, c, "question", 0)
		receive(t, c, "question")
	}
	if n := members(s); n != 0 {
		t.Errorf("the ring has %d members, want none", n)
	}
}

// When a ring fails, its connections are reset, and others are served by epoll.
func TestRingFails(t *testing.T) {
	ep := tcpEndpoint(t, echo)
	s := start(t, Config{Loops: 1, exchanges: eagerly}, testPlan(testService{name: "s", eps: []netip.AddrPort{ep}}))
	exchange := func(c *net.TCPConn) {
		for range 10 {
			send(t, c, "question", 0)
			receive(t, c, "question")
		}
	}
	c := connect(t, s)
	exchange(c)
	if n := members(s); n != 1 {
		t.Fatalf("the ring has %d members, want 1", n)
	}
	breakRing(t)
	send(t, c, "question", 0) // wakes the loop
	if _, end := readEnd(c); end != "reset" {
		t.Errorf("the ring's connection ended by %s, want a reset", end)
	}
	exchange(connect(t, s))
	if n := members(s); n != 0 {
		t.Errorf("the ring has %d members, want none", n)
	}
}

// breakRing has the descriptors of this process's rings be something else.
func breakRing(t *testing.T) {
	t.Helper()
	null, err := os.Open(os.DevNull)
	must(t, err)
	defer null.Close()
	fds, err := os.ReadDir("/proc/self/fd")
	must(t, err)
	broken := 0
	for _, f := range fds {
		if to, err := os.Readlink("/proc/self/fd/" + f.Name()); err == nil && to == "anon_inode:[io_uring]" {
			fd, err := strconv.Atoi(f.Name())
			must(t, err)
			must(t, unix.Dup3(int(null.Fd()), fd, unix.O_CLOEXEC))
			broken++
		}
	}
	if broken != 1 {
		t.Fatalf("%d rings are open, want 1", broken)
	}
}
