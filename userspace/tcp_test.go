package userspace

import (
	"bytes"
	"crypto/rand"
	"errors"
	"io"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

func TestRoundRobinIsExact(t *testing.T) {
	var eps []netip.AddrPort
	for _, n := range []string{"a", "b", "c"} {
		eps = append(eps, tcpEndpoint(t, named(n)))
	}
	s := start(t, Config{}, testPlan(testService{name: "s", eps: eps}))
	got := map[string]int{}
	for range 30 {
		got[ask(t, connect(t, s), "hi")]++
	}
	if diff := cmp.Diff(map[string]int{"a hi": 10, "b hi": 10, "c hi": 10}, got); diff != "" {
		t.Error(diff)
	}
}

func TestRetry(t *testing.T) {
	tests := []struct {
		name string
		bad  func(t testing.TB) netip.AddrPort
	}{
		{"refused", refusing},
		{"hanging", hanging},
		{"reset before a byte was moved", func(t testing.TB) netip.AddrPort { return tcpEndpoint(t, reset) }},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			good := tcpEndpoint(t, func(c *net.TCPConn) { io.WriteString(c, "good"); c.Close() })
			d := testService{name: "s", eps: []netip.AddrPort{tt.bad(t), good}}
			s := start(t, Config{ConnectTimeout: 200 * time.Millisecond}, testPlan(d))
			for range 4 {
				c := connect(t, s)
				if data, end := readEnd(c); data != "good" || end != "eof" {
					t.Fatalf("client read %q, %s", data, end)
				}
				c.Close()
			}
			eventually(t, "no connection is left", func() bool { return len(s.Connections()) == 0 })
			c := countersOf(s, testServiceKey("s"))
			if c.Retried == 0 || c.Failed != 0 || c.Total != 4 {
				t.Errorf("counters %+v, want 4 in total, some retried, none failed", c)
			}
		})
	}
}

// TestLastRetry: with three retries, a fourth endpoint takes every connection.
func TestLastRetry(t *testing.T) {
	good := tcpEndpoint(t, func(c *net.TCPConn) { io.WriteString(c, "good"); c.Close() })
	s := start(t, Config{}, testPlan(testService{
		name: "s", eps: []netip.AddrPort{refusing(t), refusing(t), refusing(t), good}, port: service.Port{Retries: 3},
	}))
	for range 4 { // each of them is the first to be tried once
		if data, end := readEnd(connect(t, s)); data != "good" || end != "eof" {
			t.Errorf("client read %q, %s", data, end)
		}
	}
}

// TestNoRetryAfterTheEnd: what has been told to the client or to the endpoint, or lasts for longer than a search may, isn't begun anew at another
// endpoint, and a reset then isn't held against the endpoint, which has taken the connection.
func TestNoRetryAfterTheEnd(t *testing.T) {
	for _, tt := range []struct {
		name   string
		search time.Duration // 0: as by default, longer than the test
		asks   string        // what the client sends
		end    func(c *net.TCPConn, told <-chan struct{})
		want   string // how it ends for the client
	}{
		{"a reset after the end", 0, "", func(c *net.TCPConn, told <-chan struct{}) {
			c.CloseWrite()
			<-told // the client knows of the end
			reset(c)
		}, "eof"},
		{"a reset after the request", 0, "x", func(c *net.TCPConn, _ <-chan struct{}) {
			io.ReadFull(c, make([]byte, 1))
			reset(c)
		}, "reset"},
		{"a reset after the search", 100 * time.Millisecond, "", func(c *net.TCPConn, _ <-chan struct{}) {
			time.Sleep(300 * time.Millisecond)
			reset(c)
		}, "reset"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			told, taken := make(chan struct{}), make(chan struct{}, 8)
			var tried atomic.Int32
			serve := func(c *net.TCPConn) {
				tried.Add(1)
				taken <- struct{}{}
				tt.end(c, told)
			}
			ends := make(chan End, 8)
			cfg := Config{ConnectTimeout: tt.search, ConnectTotal: tt.search, OnEnd: func(e End) { ends <- e }}
			s := start(t, cfg, testPlan(testService{name: "s", eps: []netip.AddrPort{tcpEndpoint(t, serve), tcpEndpoint(t, serve)}}))
			c := connect(t, s)
			io.WriteString(c, tt.asks)
			<-taken
			data, end := readEnd(c)
			close(told)
			if data != "" || end != tt.want {
				t.Fatalf("client read %q, %s; want %s", data, end, tt.want)
			}
			if e := <-ends; e.Refused != nil || !e.Reset {
				t.Errorf("it ended like this: %+v; want a reset", e)
			}
			counted := countersOf(s, testServiceKey("s"))
			var failures uint64
			for _, e := range counted.Endpoints {
				failures += e.Failures
			}
			if tried.Load() != 1 || counted.Total != 1 || counted.Failed+counted.Retried+failures != 0 {
				t.Errorf("%d endpoints tried, %d failures of theirs, counters %+v; want one connection, and nothing failed", tried.Load(), failures, counted)
			}
		})
	}
}

func testServiceKey(name string) service.Key {
	return service.Key{Namespace: "test", Name: name, Protocol: service.TCP}
}

func TestNoEndpointTakesIt(t *testing.T) {
	eps := []netip.AddrPort{refusing(t), refusing(t)}
	s := start(t, Config{}, testPlan(testService{name: "s", eps: eps}))
	wantRefused(t, s)
	eventually(t, "the failure is counted", func() bool { return countersOf(s, testServiceKey("s")).Failed == 1 })
}

// Every attempt that an endpoint doesn't take is told, with its client, and every connection that one takes.
func TestOutcomesAreTold(t *testing.T) {
	bad, good := refusing(t), tcpEndpoint(t, named("good"))
	var mu sync.Mutex
	failed, answered := map[netip.AddrPort]int{}, map[netip.AddrPort]int{}
	s := start(t, Config{
		OnFailed: func(p service.Protocol, e netip.AddrPort, client netip.Addr, err error) {
			mu.Lock()
			defer mu.Unlock()
			if failed[e]++; p != service.TCP || !client.IsLoopback() || !errors.Is(err, unix.ECONNREFUSED) {
				t.Errorf("told of %s %s failing for %s: %v", p, e, client, err)
			}
		},
		OnAnswered: func(_ service.Protocol, e netip.AddrPort) {
			mu.Lock()
			defer mu.Unlock()
			answered[e]++
		},
	}, testPlan(testService{name: "s", eps: []netip.AddrPort{bad, good}}))
	for range 20 {
		if got := ask(t, connect(t, s), "x"); got != "good x" {
			t.Fatalf("answer %q", got)
		}
	}
	mu.Lock()
	defer mu.Unlock()
	if failed[bad] == 0 || failed[good] != 0 || answered[good] != 20 || answered[bad] != 0 {
		t.Errorf("failed %v, answered %v; want %s to fail, and %s to answer", failed, answered, bad, good)
	}
}

// Reset ends the connections to one endpoint, at both ends, and no others.
func TestReset(t *testing.T) {
	gone, stays := tcpEndpoint(t, named("gone")), tcpEndpoint(t, named("stays"))
	s := start(t, Config{}, testPlan(testService{name: "s", eps: []netip.AddrPort{gone, stays}}))
	conns := map[string]*net.TCPConn{}
	for len(conns) < 2 {
		c := connect(t, s)
		conns[ask(t, c, "x")] = c
	}
	if n := s.Reset(gone); n == 0 {
		t.Error("no connection was reset")
	}
	if _, err := conns["gone x"].Read(make([]byte, 1)); !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("the client of the endpoint that is gone reads %v, want a reset", err)
	}
	if got := ask(t, conns["stays x"], "y"); got != "stays y" {
		t.Errorf("the other one answers %q", got)
	}
}

// notRedirected is an origin for connections that weren't.
func notRedirected(fd int, _ service.Family) (netip.AddrPort, error) {
	var local rawAddress
	err := failure(sysLocal(fd, &local))
	return local.addrPort(), err
}

func TestRefused(t *testing.T) {
	ep := tcpEndpoint(t, named("a"))
	tests := []struct {
		name   string
		origin func(int, service.Family) (netip.AddrPort, error)
		front  func(*plan.Frontend)
		empty  bool
	}{
		{name: "straight to the listener", origin: notRedirected},
		{name: "not tracked", origin: kernelOrigin},
		{name: "unknown destination", origin: func(int, service.Family) (netip.AddrPort, error) { return netip.MustParseAddrPort("10.96.0.1:81"), nil }},
		{name: "rejected", empty: true, front: func(f *plan.Frontend) { f.Verdict = plan.Reject }},
		{name: "dropped", empty: true, front: func(f *plan.Frontend) { f.Verdict = plan.Drop }},
		{name: "source range", front: func(f *plan.Frontend) { f.SourceRanges = []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")} }},
		{name: "node port of another host", front: func(f *plan.Frontend) {
			f.Kind, f.Address = plan.NodePort, netip.AddrPortFrom(netip.Addr{}, vip.Port())
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			d := testService{name: "s", eps: []netip.AddrPort{ep}, front: tt.front}
			if tt.empty {
				d.eps = nil
			}
			s := start(t, Config{TCPOrigin: tt.origin}, testPlan(d))
			wantRefused(t, s)
		})
	}
}

func TestNodePort(t *testing.T) {
	d := testService{name: "s", eps: []netip.AddrPort{tcpEndpoint(t, named("a"))}, front: func(f *plan.Frontend) {
		f.Kind, f.Address = plan.NodePort, netip.AddrPortFrom(netip.Addr{}, 30080)
	}}
	origin := func(int, service.Family) (netip.AddrPort, error) {
		return netip.MustParseAddrPort("127.0.0.1:30080"), nil
	}
	s := start(t, Config{TCPOrigin: origin}, testPlan(d))
	if got := ask(t, connect(t, s), "x"); got != "a x" {
		t.Errorf("answer %q", got)
	}
}

// After one side has finished, the other may go on.
func TestHalfClose(t *testing.T) {
	t.Run("by the client", func(t *testing.T) {
		ep := tcpEndpoint(t, func(c *net.TCPConn) {
			b, _ := io.ReadAll(c)
			io.WriteString(c, "all "+string(b))
			c.Close()
		})
		c := connect(t, start(t, Config{}, testPlan(testService{name: "s", eps: []netip.AddrPort{ep}})))
		io.WriteString(c, "request")
		c.CloseWrite()
		if data, end := readEnd(c); data != "all request" || end != "eof" {
			t.Errorf("client read %q, %s", data, end)
		}
	})
	t.Run("by the endpoint", func(t *testing.T) {
		got := make(chan string, 1)
		ep := tcpEndpoint(t, func(c *net.TCPConn) {
			io.WriteString(c, "bye")
			c.CloseWrite()
			b, _ := io.ReadAll(c)
			got <- string(b)
		})
		c := connect(t, start(t, Config{}, testPlan(testService{name: "s", eps: []netip.AddrPort{ep}})))
		if data, end := readEnd(c); data != "bye" || end != "eof" {
			t.Errorf("client read %q, %s", data, end)
		}
		io.WriteString(c, "still here")
		c.CloseWrite()
		if b := <-got; b != "still here" {
			t.Errorf("endpoint read %q", b)
		}
	})
}

// A peer that is silent after the other has finished doesn't stay forever, and
// neither side takes what it got for all there was.
func TestHalfCloseIsBounded(t *testing.T) {
	ends := make(chan string, 1)
	silent := tcpEndpoint(t, func(c *net.TCPConn) {
		io.WriteString(c, "half of")
		io.Copy(io.Discard, c)
		for {
			if raw, err := c.SyscallConn(); err != nil || stateOf(raw) == unix.BPF_TCP_CLOSE {
				ends <- "reset"
				return
			}
			time.Sleep(time.Millisecond)
		}
	})
	s := start(t, Config{HalfCloseTimeout: 50 * time.Millisecond}, testPlan(testService{name: "s", eps: []netip.AddrPort{silent}}))
	c := connect(t, s)
	io.WriteString(c, "x")
	receive(t, c, "half of")
	c.CloseWrite()
	if data, end := readEnd(c); data != "" || end != "reset" {
		t.Errorf("client read %q more, %s; want a reset", data, end)
	}
	if end := <-ends; end != "reset" {
		t.Errorf("endpoint saw %s, want a reset", end)
	}
	eventually(t, "the connection has ended", func() bool { return len(s.Connections()) == 0 })
}

// stateOf returns a TCP socket's state.
func stateOf(raw syscall.RawConn) (state uint8) {
	raw.Control(func(fd uintptr) {
		if info, err := unix.GetsockoptTCPInfo(int(fd), unix.SOL_TCP, unix.TCP_INFO); err == nil {
			state = info.State
		}
	})
	return state
}

func TestResetIsPassedOn(t *testing.T) {
	t.Run("client to endpoint", func(t *testing.T) {
		ends := make(chan string, 1)
		ep := tcpEndpoint(t, func(c *net.TCPConn) {
			data, end := readEnd(c)
			ends <- data + " " + end
		})
		s := start(t, Config{}, testPlan(testService{name: "s", eps: []netip.AddrPort{ep}}))
		c := connect(t, s)
		io.WriteString(c, "x")
		eventually(t, "the byte was moved", func() bool { return countersOf(s, testServiceKey("s")).BytesIn == 1 })
		reset(c)
		if got := <-ends; got != "x reset" {
			t.Errorf("endpoint read %q", got)
		}
	})
	t.Run("client to endpoint, after end of data", func(t *testing.T) {
		ends, eof := make(chan error, 1), make(chan struct{})
		ep := tcpEndpoint(t, func(c *net.TCPConn) {
			io.Copy(io.Discard, c)
			close(eof)
			for {
				if _, err := c.Write([]byte("x")); err != nil {
					ends <- err
					return
				}
				time.Sleep(time.Millisecond)
			}
		})
		c := connect(t, start(t, Config{}, testPlan(testService{name: "s", eps: []netip.AddrPort{ep}})))
		c.CloseWrite()
		<-eof
		reset(c)
		if err := <-ends; err == nil {
			t.Error("endpoint could write on")
		}
	})
	t.Run("endpoint to client", func(t *testing.T) {
		ep := tcpEndpoint(t, func(c *net.TCPConn) {
			io.ReadFull(c, make([]byte, 1))
			reset(c)
		})
		c := connect(t, start(t, Config{}, testPlan(testService{name: "s", eps: []netip.AddrPort{ep}})))
		io.WriteString(c, "x")
		if _, end := readEnd(c); end != "reset" {
			t.Errorf("client read %s, want a reset", end)
		}
	})
	// An endpoint that closes with input unread resets; its answer still counts.
	t.Run("endpoint answers, then resets", func(t *testing.T) {
		answer := bytes.Repeat([]byte("0123456789abcdef"), 1<<14)
		ep := tcpEndpoint(t, func(c *net.TCPConn) {
			io.ReadFull(c, make([]byte, 1))
			c.Write(answer)
			raw, _ := c.SyscallConn()
			for unsent := true; unsent; time.Sleep(time.Millisecond) {
				raw.Control(func(fd uintptr) { unsent = (&side{fd: int(fd)}).unsent() })
			}
			c.Close()
		})
		c := connect(t, start(t, Config{}, testPlan(testService{name: "s", eps: []netip.AddrPort{ep}})))
		c.Write(make([]byte, 100000))
		if data, end := readEnd(c); data != string(answer) || end != "reset" {
			t.Errorf("client read %d of %d bytes, then %s; want all, then a reset", len(data), len(answer), end)
		}
	})
}

// A reset reaches the other side also while that takes none of the bytes before it, and
// kproxy lets go of both.
func TestResetBehindBackPressure(t *testing.T) {
	t.Parallel()
	flood := func(c *net.TCPConn) { // until the other end takes no more
		for n := 1; n > 0; {
			c.SetWriteDeadline(time.Now().Add(200 * time.Millisecond))
			n, _ = c.Write(make([]byte, 1<<16))
		}
	}
	endpoints := make(chan *net.TCPConn, 1)
	hung := tcpEndpoint(t, func(c *net.TCPConn) { endpoints <- c })
	flooding := tcpEndpoint(t, func(c *net.TCPConn) { flood(c); reset(c) })
	s := start(t, Config{}, testPlan(testService{name: "hung", eps: []netip.AddrPort{hung}}))
	client := connect(t, s)
	go func() { flood(client); reset(client) }()
	endpoint := <-endpoints
	other := start(t, Config{}, testPlan(testService{name: "flooding", eps: []netip.AddrPort{flooding}}))
	silent := connect(t, other)
	for name, c := range map[string]*net.TCPConn{"endpoint that doesn't read": endpoint, "client that doesn't read": silent} {
		raw, err := c.SyscallConn()
		must(t, err)
		eventually(t, "the reset reaches the "+name, func() bool { return stateOf(raw) == unix.BPF_TCP_CLOSE })
	}
	eventually(t, "no connection is left", func() bool { return len(s.Connections())+len(other.Connections()) == 0 })
}

// TestEndBehindBackPressure: a client that has finished, and that rests while it reads a long answer, gets all of it,
// although the endpoint has closed long before: that is no reset.
func TestEndBehindBackPressure(t *testing.T) {
	t.Parallel()
	sent := make(chan int, 1)
	ep := tcpEndpoint(t, func(c *net.TCPConn) {
		io.ReadAll(c)
		total := 0
		for n := 1; n > 0; total += n { // until the other end takes no more
			c.SetWriteDeadline(time.Now().Add(200 * time.Millisecond))
			n, _ = c.Write(make([]byte, 1<<16))
		}
		sent <- total
		for unacknowledged(t, c) > 0 {
			time.Sleep(time.Millisecond)
		}
		c.Close()
		close(sent)
	})
	c := connect(t, start(t, Config{}, testPlan(testService{name: "s", eps: []netip.AddrPort{ep}})))
	c.CloseWrite()
	want, got, closed := <-sent, 0, false
	for b := make([]byte, 1<<14); !closed; {
		n, err := c.Read(b)
		must(t, err)
		got += n
		select {
		case <-sent:
			closed = true
		case <-time.After(time.Millisecond):
		}
	}
	if got == want {
		t.Fatal("nothing was left to read when the endpoint closed")
	}
	time.Sleep(resetPatience + time.Second)
	data, end := readEnd(c)
	if got += len(data); got != want || end != "eof" {
		t.Errorf("client read %d bytes of %d, %s", got, want, end)
	}
}

func TestIdleTimeout(t *testing.T) {
	t.Parallel()
	ep := tcpEndpoint(t, echo)
	s := start(t, Config{}, testPlan(testService{name: "s", eps: []netip.AddrPort{ep}, port: service.Port{IdleTimeout: 2 * time.Second}}))
	t.Run("never sends", func(t *testing.T) {
		if _, end := readEnd(connect(t, s)); end != "reset" {
			t.Errorf("client read %s, want a reset", end)
		}
	})
	t.Run("stops in the middle", func(t *testing.T) {
		c := connect(t, s)
		io.WriteString(c, "half of")
		if data, end := readEnd(c); data != "half of" || end != "reset" {
			t.Errorf("client read %q, %s; want a reset", data, end)
		}
	})
	t.Run("sends on", func(t *testing.T) {
		c := connect(t, s)
		for range 30 {
			ask(t, c, "x")
			time.Sleep(100 * time.Millisecond)
		}
	})
}

// A client that says nothing is a connection like any other.
func TestSilentClient(t *testing.T) {
	ep := tcpEndpoint(t, echo)
	s := start(t, Config{}, testPlan(testService{name: "s", eps: []netip.AddrPort{ep}}))
	c := connect(t, s)
	eventually(t, "it's in the table", func() bool { l := s.Connections(); return len(l) == 1 && l[0].Endpoint == ep && l[0].Taken })
	want := []Connection{{Protocol: service.TCP, Service: testServiceKey("s"), Client: addrPort(c.LocalAddr()), Address: vip, Endpoint: ep, Taken: true}}
	if diff := cmp.Diff(want, s.Connections(), sameAddresses, cmpopts.IgnoreFields(Connection{}, "Started")); diff != "" {
		t.Error(diff)
	}
	c.Close()
	eventually(t, "it's gone", func() bool { return len(s.Connections()) == 0 })
}

// Bulk data arrives whole, in both directions at once, and is counted while it
// flows and exactly at the end.
func TestBulk(t *testing.T) {
	ep := tcpEndpoint(t, echo)
	s := start(t, Config{}, testPlan(testService{name: "s", eps: []netip.AddrPort{ep}}))
	data := make([]byte, 32<<20)
	rand.Read(data)
	c := connect(t, s)
	go func() {
		c.Write(data)
		c.CloseWrite()
	}()
	got, err := io.ReadAll(c)
	if err != nil || !bytes.Equal(got, data) {
		t.Fatalf("read %d bytes back, %v", len(got), err)
	}
	eventually(t, "the connection has ended", func() bool { return len(s.Connections()) == 0 })
	n := uint64(len(data))
	want := Counters{Total: 1, BytesIn: n, BytesOut: n, Endpoints: []EndpointCounters{{Address: ep, Total: 1, BytesIn: n, BytesOut: n}}}
	if diff := cmp.Diff(want, countersOf(s, testServiceKey("s")), sameAddresses); diff != "" {
		t.Error(diff)
	}
}

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

// unacknowledged returns how many bytes of c's its peer hasn't acknowledged yet.
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
