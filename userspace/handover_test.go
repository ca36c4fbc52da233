package userspace

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fxamacker/cbor/v2"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/lb"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/userspace/handover"
)

// copies are other descriptors of the same files, as another process gets them.
func copies(t testing.TB, files []int) []int {
	t.Helper()
	var out []int
	for _, fd := range files {
		c, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
		must(t, err)
		out = append(out, c)
	}
	return out
}

// heir is a Server that has inherited s's listeners, and p.
func heir(t testing.TB, s *Server, cfg Config, p *plan.Plan) *Server {
	t.Helper()
	if cfg.TCPOrigin == nil {
		cfg.TCPOrigin = func(int, service.Family) (netip.AddrPort, error) { return vip, nil }
	}
	next := New(cfg)
	listeners, files := s.Listeners()
	must(t, next.Inherit(listeners, copies(t, files)))
	drainAtEnd(t, next)
	serve(next, p)
	return next
}

// freeze hands s over, and returns what another process would read of its state, which might be of a later release.
func freeze(t testing.TB, s *Server) (*Handover, *handover.Userspace) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	h, err := s.HandOver(ctx)
	must(t, err)
	t.Cleanup(func() { // of a test that has failed: loops that nobody thaws end never
		select {
		case <-h.thaw:
		default:
			h.Release()
		}
	})
	b, err := cbor.Marshal(h.State)
	must(t, err)
	var all any
	must(t, cbor.Unmarshal(b, &all))
	addUnknown(all)
	b, err = cbor.Marshal(all)
	must(t, err)
	state := &handover.Userspace{}
	must(t, cbor.Unmarshal(b, state))
	return h, state
}

// addUnknown adds to all messages in m a field that this release doesn't know.
func addUnknown(m any) {
	switch m := m.(type) {
	case map[any]any:
		for _, v := range m {
			addUnknown(v)
		}
		m[1000] = "more"
	case []any:
		for _, v := range m {
			addUnknown(v)
		}
	}
}

// succeed has a new Server take over from s.
func succeed(t testing.TB, s *Server, cfg Config, p *plan.Plan) *Server {
	t.Helper()
	next := heir(t, s, cfg, p)
	h, state := freeze(t, s)
	must(t, next.TakeOver(state, copies(t, h.Files)))
	h.Release()
	go next.Run(context.Background())
	return next
}

// agreed are the figures that two Servers have to agree about.
type agreed struct {
	Connections []Connection
	Counters    map[service.Key]Counters
	TCP, UDP    BudgetUse
}

func agreedBy(s *Server) agreed {
	counters := map[service.Key]Counters{}
	for k := range s.plans.views {
		counters[k] = countersOf(s, k)
	}
	return agreed{s.Connections(), counters, s.Budget(service.TCP), s.Budget(service.UDP)}
}

var sameAddresses = cmpopts.EquateComparable(netip.Addr{}, netip.AddrPort{})

// TestHandover has one connection in each state that it can be in, and sessions, taken over twice. Servers agree about
// what they have, and each connection goes on.
func TestHandover(t *testing.T) {
	proceed := make(chan struct{})
	// What the endpoint does is the first line that it gets.
	ep := tcpEndpoint(t, func(c *net.TCPConn) {
		defer c.Close()
		line := make([]byte, 5)
		if _, err := io.ReadFull(c, line); err != nil {
			return
		}
		switch string(line) {
		case "echo\n":
			io.Copy(c, c)
		case "wait\n": // says nothing before
			<-proceed
			io.WriteString(c, "waited")
		case "half\n": // finishes first
			io.WriteString(c, "half")
			c.CloseWrite()
			b, _ := io.ReadAll(c)
			if string(b) != "rest" {
				t.Errorf("endpoint got %q behind its end", b)
			}
		case "all\n\n": // after the client has finished
			b, _ := io.ReadAll(c)
			<-proceed
			fmt.Fprintf(c, "%d bytes", len(b))
		case "push\n": // more than the buffers between hold
			io.Copy(c, io.LimitReader(stream(1), 16<<20))
		case "pull\n":
			<-proceed
			got := checker{want: stream(2)}
			n, err := io.Copy(&got, c)
			fmt.Fprintf(c, "%d %t %v", n, got.wrong, err)
		case "die\n\n": // answers, and resets
			io.WriteString(c, strings.Repeat("x", 1<<20))
			<-proceed
			reset(c)
		}
	})
	udp, _ := udpEndpoint(t, "u")
	gone := tcpEndpoint(t, echo)
	// Where connections were headed goes by the client's address.
	hangs, goneAt := netip.MustParseAddrPort("10.96.0.2:80"), netip.MustParseAddrPort("10.96.0.9:80")
	to := map[[4]byte]netip.AddrPort{{127, 0, 0, 1}: vip, {127, 0, 0, 2}: hangs, {127, 0, 0, 3}: goneAt}
	cfg := Config{Origin: newOrigins(), ConnectTimeout: patience, ConnectTotal: patience, TCPOrigin: func(fd int, _ service.Family) (netip.AddrPort, error) {
		peer, err := unix.Getpeername(fd)
		if err != nil {
			return netip.AddrPort{}, err
		}
		return to[peer.(*unix.SockaddrInet4).Addr], nil
	}}
	service1 := testService{name: "s", eps: []netip.AddrPort{ep}, port: service.Port{Affinity: time.Hour}}
	service2 := testService{name: "hangs", vip: hangs, eps: []netip.AddrPort{hanging(t)}}
	service3 := testService{name: "gone", vip: goneAt, eps: []netip.AddrPort{gone}}
	p := testPlan(service1, service2, udpService(udp))
	s := start(t, cfg, testPlan(service1, service2, service3, udpService(udp)))
	tcp, _ := s.Ports()
	open := func(what string, from byte) *net.TCPConn {
		c, err := net.DialTCP("tcp4", &net.TCPAddr{IP: net.IPv4(127, 0, 0, from)}, &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: int(tcp)})
		must(t, err)
		t.Cleanup(func() { c.Close() })
		c.SetDeadline(time.Now().Add(lifetime))
		_, err = io.WriteString(c, what)
		must(t, err)
		return c
	}
	echoing, waiting, half, all := open("echo\n", 1), open("wait\n", 1), open("half\n", 1), open("all\n\nrequest", 1)
	must(t, all.CloseWrite())
	pushed, pulled, dying := open("push\n", 1), open("pull\n", 1), open("die\n\n", 1)
	orphan := open("", 3)
	if got := ask(t, orphan, "x"); got != "x" {
		t.Fatal(got)
	}
	open("", 2)
	receive(t, half, "half")
	pulling := make(chan error, 1)
	go func() {
		_, err := io.Copy(pulled, io.LimitReader(stream(2), 16<<20))
		pulling <- errors.Join(err, pulled.CloseWrite())
	}()
	talker := udpClient(t, s)
	answers(t, talker, "one", "u one")
	eventually(t, "all clients are at their endpoints", func() bool { return len(s.Connections()) == 10 })
	for i := range 2 {
		next := heir(t, s, cfg, p)
		var h *Handover
		var state *handover.Userspace
		eventually(t, "bytes of bulk wait for their receiver", func() bool {
			if h, state = freeze(t, s); !pending(state) {
				h.Resume()
				return false
			}
			return true
		})
		before := agreedBy(s)
		delete(before.Counters, testServiceKey("gone"))
		must(t, next.TakeOver(state, copies(t, h.Files)))
		if diff := cmp.Diff(before, agreedBy(next), sameAddresses); diff != "" {
			t.Errorf("takeover %d (-before +after):\n%s", i+1, diff)
		}
		h.Release()
		go next.Run(context.Background())
		s = next
		answers(t, talker, "again", "u again")
		if got := ask(t, echoing, "hello"); got != "hello" {
			t.Errorf("echo is %q", got)
		}
	}
	if a := s.Affinity(testServiceKey("s")); a.Len() != 1 {
		t.Errorf("%d clients have affinity, want 1", a.Len())
	}
	close(proceed)
	receive(t, waiting, "waited")
	io.WriteString(half, "rest")
	must(t, half.CloseWrite())
	receive(t, all, "7 bytes")
	got := checker{want: stream(1)}
	if n, err := io.Copy(&got, pushed); n != 16<<20 || err != nil || got.wrong {
		t.Errorf("client got %d bytes, %v, wrong %t", n, err, got.wrong)
	}
	must(t, <-pulling)
	if data, end := readEnd(pulled); data != fmt.Sprintf("%d false <nil>", 16<<20) || end != "eof" {
		t.Errorf("endpoint says %q, %s", data, end)
	}
	if _, end := readEnd(dying); end != "reset" {
		t.Errorf("the endpoint's reset is %s", end)
	}
	if got := ask(t, orphan, "y"); got != "y" {
		t.Errorf("without a service, echo is %q", got)
	}
}

// pending returns whether bytes are on their way in pipes or buffers; which, is a matter of how they came.
func pending(state *handover.Userspace) bool {
	return slices.ContainsFunc(state.Connections, func(c *handover.Connection) bool {
		return c.Client.Piped+c.Endpoint.Piped > 0 || len(c.Client.Copied)+len(c.Endpoint.Copied) > 0
	})
}

// TestSoakOfTakeovers is TestSoak with one Server after another. Some of them fail to take over.
func TestSoakOfTakeovers(t *testing.T) {
	d, clients := soak(t)
	var far soakEndpoint
	p := testPlan(testService{name: "s", eps: []netip.AddrPort{tcpEndpoint(t, far.serve), refusing(t), hanging(t)}}, udpService(first(udpEndpoint(t, "a"))))
	cfg := Config{Origin: newOrigins()}
	s := start(t, cfg, p)
	ctx, cancel := context.WithTimeout(t.Context(), d)
	defer cancel()
	var ended atomic.Int64
	var wg sync.WaitGroup
	for i := range clients {
		wg.Go(func() {
			for ctx.Err() == nil {
				kind := behaviour(rand.IntN(int(behaviours)))
				if err := behave(s, kind); err != nil {
					t.Errorf("client %d, who %s: %v", i, kind, err)
					return
				}
				ended.Add(1)
			}
		})
	}
	for range clients / 4 {
		talker := udpClient(t, s)
		wg.Go(func() {
			for i := 0; ctx.Err() == nil; i++ {
				if line := fmt.Sprint("datagram ", i); !answers(t, talker, line, "a "+line) {
					return
				}
			}
		})
	}
	last, takeovers := s, 0
	for ctx.Err() == nil {
		time.Sleep(time.Duration(rand.IntN(40)) * time.Millisecond)
		next := heir(t, last, cfg, p)
		h, state := freeze(t, last)
		files := copies(t, h.Files)
		if rand.IntN(3) == 0 {
			if n := len(files); n > 0 {
				unix.Close(files[n-1])
				if next.TakeOver(state, files[:n-1]) == nil {
					t.Error("a descriptor was missing, and TakeOver succeeded")
				}
			}
			h.Resume()
			continue
		}
		must(t, next.TakeOver(state, files))
		h.Release()
		go next.Run(context.Background())
		last, takeovers = next, takeovers+1
	}
	wg.Wait()
	t.Logf("%d connections, %d takeovers", ended.Load(), takeovers)
	if n := far.wrong.Load(); n > 0 {
		t.Errorf("the endpoint got wrong bytes on %d connections", n)
	}
	if ended.Load() == 0 || takeovers == 0 {
		t.Error("nothing happened")
	}
	eventually(t, "every connection has ended", func() bool { return last.Budget(service.TCP).Used == 0 })
}

// answers reports whether c gets the answer it wants to a datagram that it sends once: none may be lost.
func answers(t testing.TB, c *net.UDPConn, line, want string) bool {
	b := make([]byte, datagramSize)
	c.SetReadDeadline(time.Now().Add(patience))
	_, err := c.Write([]byte(line))
	n := 0
	if err == nil {
		n, err = c.Read(b)
	}
	if got := string(b[:n]); err != nil || got != want {
		t.Errorf("answer to %q is %q, %v", line, got, err)
		return false
	}
	return true
}

func first[T, U any](v T, _ U) T { return v }

// TestNoByteIsOnlyInTheProcess: between two turns, what was received from a socket has been sent to the
// other one or is described, however busy the loops are.
func TestNoByteIsOnlyInTheProcess(t *testing.T) {
	s := start(t, Config{Origin: newOrigins()}, testPlan(testService{name: "s", eps: []netip.AddrPort{tcpEndpoint(t, echo)}}))
	for i := range 16 {
		c := connect(t, s)
		go io.Copy(c, stream(byte(i)))
		go io.Copy(io.Discard, slowly{c})
	}
	eventually(t, "all have sent", func() bool { return countersOf(s, testServiceKey("s")).BytesIn > 16<<20 })
	for range 10 {
		h, state := freeze(t, s)
		for _, c := range state.Connections {
			for i, side := range []*handover.Side{&c.Client, &c.Endpoint} {
				fd := h.Files[side.File-1]
				info, err := unix.GetsockoptTCPInfo(fd, unix.SOL_TCP, unix.TCP_INFO)
				must(t, err)
				unread, err := unix.IoctlGetInt(fd, unix.SIOCINQ)
				must(t, err)
				passed := int([]uint64{c.Flow.BytesIn, c.Flow.BytesOut}[i]) + len(side.Copied) + int(side.Piped)
				// More may come between the two questions, so the first answer can't be more than the second one explains.
				if read := int(info.Bytes_received) - unread; read > passed {
					t.Errorf("side %d: %d bytes were read, %d passed on or described", i, read, passed)
				}
			}
		}
		for _, w := range s.workers {
			if w.replies.n+len(w.received)+len(w.unresolved) > 0 {
				t.Error("a worker holds datagrams")
			}
		}
		h.Resume()
		time.Sleep(5 * time.Millisecond)
	}
}

// TestCopiedBytesAreHandedOver: without pipes, what a slow receiver leaves waits in the process.
func TestCopiedBytesAreHandedOver(t *testing.T) {
	p := testPlan(testService{name: "s", eps: []netip.AddrPort{tcpEndpoint(t, echo)}})
	s := start(t, Config{}, p)
	s.pipes.room.Store(0)
	c := connect(t, s)
	const size = 8 << 20
	go io.Copy(c, io.LimitReader(stream(1), size))
	eventually(t, "bytes are copied", func() bool {
		h, state := freeze(t, s)
		defer h.Resume()
		return len(state.Connections) == 1 && len(state.Connections[0].Endpoint.Copied) > 0
	})
	succeed(t, s, Config{}, p)
	got := checker{want: stream(1)}
	if n, err := io.CopyN(&got, c, size); err != nil || got.wrong {
		t.Errorf("got %d bytes, %v, wrong %t", n, err, got.wrong)
	}
}

// TestHandoverThatFails: whatever stops the successor, the one before goes on, and serves who has come meanwhile.
func TestHandoverThatFails(t *testing.T) {
	p := testPlan(testService{name: "s", eps: []netip.AddrPort{tcpEndpoint(t, echo)}})
	s := start(t, Config{Loops: 1}, p)
	var conns []*net.TCPConn
	check := func() {
		t.Helper()
		for _, c := range append(conns, connect(t, s)) {
			if got := ask(t, c, "x"); got != "x" {
				t.Errorf("echo is %q", got)
			}
		}
	}
	for range 60 {
		conns = append(conns, connect(t, s))
	}
	check()
	small := heir(t, s, Config{MaxFDs: minFDs}, p)
	h, state := freeze(t, s)
	if _, err := s.HandOver(t.Context()); err == nil {
		t.Error("a Server is handed over twice")
	}
	if err := small.TakeOver(state, copies(t, h.Files)); err == nil || !strings.Contains(err.Error(), "too few file descriptors for 61 connections") {
		t.Errorf("TakeOver() with %d descriptors = %v", minFDs, err)
	}
	waits := connect(t, s) // in the listener's queue
	h.Resume()
	if got := ask(t, waits, "x"); got != "x" {
		t.Errorf("echo is %q", got)
	}
	check()

	for name, damage := range map[string]func(*handover.Userspace){
		"no endpoint":      func(u *handover.Userspace) { u.Connections[30].Flow.Endpoint = nil },
		"no socket":        func(u *handover.Userspace) { u.Connections[30].Endpoint = handover.Side{} },
		"a file twice":     func(u *handover.Userspace) { u.Connections[30].Endpoint.File = u.Connections[3].Endpoint.File },
		"an unknown phase": func(u *handover.Userspace) { u.Connections[30].Phase = 99 },
		"an unknown worker": func(u *handover.Userspace) {
			u.Sessions = append(u.Sessions, &handover.Session{Flow: u.Connections[0].Flow, Worker: 9})
		},
		"no service":         func(u *handover.Userspace) { u.Services = nil },
		"a buffer too large": func(u *handover.Userspace) { u.Connections[30].Client.Copied = make([]byte, copySize+1) },
	} {
		next := heir(t, s, Config{}, p)
		before := openFiles(t)
		h, state := freeze(t, s)
		damage(state)
		if next.TakeOver(state, copies(t, h.Files)) == nil {
			t.Errorf("%s: taken over", name)
		}
		h.Resume()
		if n := openFiles(t); n > before {
			t.Errorf("%s: %d descriptors are left open", name, n-before)
		}
		check()
	}

	release := holdLoop(s) // a loop that doesn't come round
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if _, err := s.HandOver(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("HandOver() = %v", err)
	}
	release()
	check()
}

// TestSuccessorsPlan: connections live on without their service, sessions end, and what is known of endpoints and clients
// is kept as far as the plan has them.
func TestSuccessorsPlan(t *testing.T) {
	bad, good := refusing(t), tcpEndpoint(t, named("good"))
	a, _ := udpEndpoint(t, "a")
	b, _ := udpEndpoint(t, "b")
	affine := testService{name: "s", eps: []netip.AddrPort{bad, good}, port: service.Port{Affinity: time.Hour}}
	cfg := Config{Origin: newOrigins()}
	s := start(t, cfg, testPlan(affine, udpService(a)))
	c := connect(t, s)
	for range 20 {
		ask(t, connect(t, s), "x") // which bad refuses at times
		s.Affinity(testServiceKey("s")).Forget(good)
	}
	ask(t, connect(t, s), "x") // which stays with good
	ask(t, c, "x")
	talker := udpClient(t, s)
	answers(t, talker, "x", "a x")
	before := countersOf(s, testServiceKey("s")).Endpoints
	next := succeed(t, s, cfg, testPlan(affine, udpService(b)))
	after := countersOf(next, testServiceKey("s")).Endpoints
	for i := range before {
		if before[i].Failures != after[i].Failures {
			t.Errorf("endpoint %+v, before %+v", after[i], before[i])
		}
	}
	if e, ok := next.Affinity(testServiceKey("s")).Peek(netip.MustParseAddr("127.0.0.1"), time.Now()); !ok || e != good {
		t.Errorf("the client stays with %s, want %s", e, good)
	}
	answers(t, talker, "y", "b y")
	answers(t, talker, "z", "b z")
	last := succeed(t, next, cfg, testPlan(testService{name: "other", vip: netip.MustParseAddrPort("10.96.0.3:80"), eps: []netip.AddrPort{good}}))
	if got := ask(t, c, "z"); got != "good z" {
		t.Errorf("without its service, a connection's endpoint answered %q", got)
	}
	if n := sessionsOf(last); n != 0 {
		t.Errorf("%d sessions live without their service", n)
	}
	if got := last.Budget(service.UDP).Used; got != 0 {
		t.Errorf("%d descriptors are counted for sessions", got)
	}
}

func TestHandoverOfThousands(t *testing.T) {
	p := testPlan(testService{name: "s", eps: []netip.AddrPort{startProcess(t, "echoes", netip.AddrPort{}).addr}})
	s := start(t, Config{}, p)
	conns := make([]net.Conn, 2000)
	for i := range conns {
		conns[i] = connect(t, s)
		ask(t, conns[i], "x")
	}
	for _, c := range conns {
		_, err := io.WriteString(c, "y\n") // in flight
		must(t, err)
	}
	s = succeed(t, s, Config{}, p)
	for i, c := range conns {
		if got, err := tryAsk(c, ""); got != "y" || err != nil {
			t.Fatalf("connection %d: echo is %q, %v", i, got, err)
		}
	}
	if n := len(s.Connections()); n != len(conns) {
		t.Errorf("%d connections, want %d", n, len(conns))
	}
}

// TestDrainInsteadOfRun: a Server that took over and never ran ends, and the other one goes on.
func TestDrainInsteadOfRun(t *testing.T) {
	p := testPlan(testService{name: "s", eps: []netip.AddrPort{tcpEndpoint(t, echo)}})
	s := start(t, Config{}, p)
	c := connect(t, s)
	if got := ask(t, c, "x"); got != "x" {
		t.Fatal(got)
	}
	next := heir(t, s, Config{}, p)
	h, state := freeze(t, s)
	must(t, next.TakeOver(state, copies(t, h.Files)))
	over, cancel := context.WithCancel(context.Background())
	cancel()
	must(t, next.Drain(over))
	if n := next.Budget(service.TCP).Used; n != 0 {
		t.Errorf("%d descriptors are left", n)
	}
	h.Resume()
	if got := ask(t, c, "y"); got != "y" {
		t.Errorf("answer %q of the one that goes on", got)
	}
}

// TestWhatWasBegunGoesOn: what a connection or session waits for when it is taken over happens in the successor.
func TestWhatWasBegunGoesOn(t *testing.T) {
	// phase has the only connection reach a phase, and a successor take over.
	phase := func(t *testing.T, s *Server, cfg Config, p *plan.Plan, want handover.Phase) *Server {
		t.Helper()
		eventually(t, fmt.Sprint("a connection is in phase ", want), func() bool {
			h, state := freeze(t, s)
			defer h.Resume()
			if len(state.Connections) != 1 || state.Connections[0].Phase != want {
				return false
			}
			if want == handover.Leaving { // whatever closes it
				linger, err := unix.GetsockoptLinger(h.Files[state.Connections[0].Client.File-1], unix.SOL_SOCKET, unix.SO_LINGER)
				if err != nil || linger.Onoff != 1 || linger.Linger != 0 {
					t.Errorf("a crash would end it by a FIN: %+v (%v)", linger, err)
				}
			}
			return true
		})
		return succeed(t, s, cfg, p)
	}
	t.Run("an attempt times out", func(t *testing.T) {
		cfg := Config{ConnectTimeout: time.Second}
		hung := hanging(t)
		p := testPlan(testService{name: "s", eps: []netip.AddrPort{hung, tcpEndpoint(t, named("good"))}})
		s := start(t, cfg, p)
		s.plans.views[testServiceKey("s")].state.affinity.Store(lb.NewAffinity(time.Hour))
		s.Affinity(testServiceKey("s")).Set(netip.MustParseAddr("127.0.0.1"), hung, time.Now())
		c := connect(t, s)
		s = phase(t, s, cfg, p, handover.Dialing)
		if got := ask(t, c, "x"); got != "good x" {
			t.Errorf("answer %q", got)
		}
		if n := countersOf(s, testServiceKey("s")).Retried; n != 1 {
			t.Errorf("%d attempts on a further endpoint, want 1", n)
		}
	})
	t.Run("an endpoint resets first thing", func(t *testing.T) {
		var resets atomic.Int64
		proceed := make(chan struct{})
		serve := func(c *net.TCPConn) {
			if resets.Add(1) == 1 {
				<-proceed
				reset(c)
				return
			}
			named("other")(c)
		}
		p := testPlan(testService{name: "s", eps: []netip.AddrPort{tcpEndpoint(t, serve), tcpEndpoint(t, serve)}})
		s := start(t, Config{}, p)
		c := connect(t, s)
		phase(t, s, Config{}, p, handover.Relaying)
		close(proceed)
		eventually(t, "the other one is tried", func() bool { return resets.Load() == 2 })
		if got := ask(t, c, "x"); got != "other x" {
			t.Errorf("answer %q", got)
		}
	})
	t.Run("a half-closed connection is silent", func(t *testing.T) {
		cfg := Config{HalfCloseTimeout: time.Second}
		p := testPlan(testService{name: "s", eps: []netip.AddrPort{tcpEndpoint(t, func(c *net.TCPConn) {
			io.WriteString(c, "half of")
			io.Copy(io.Discard, c)
		})}})
		s := start(t, cfg, p)
		c := connect(t, s)
		receive(t, c, "half of")
		must(t, c.CloseWrite())
		s = phase(t, s, cfg, p, handover.Relaying)
		if _, end := readEnd(c); end != "reset" {
			t.Errorf("client met %s, want a reset", end)
		}
		eventually(t, "it has ended", func() bool { return s.Budget(service.TCP).Used == 0 })
	})
	t.Run("a reset waits for the client", func(t *testing.T) {
		const size = 1 << 20
		p := testPlan(testService{name: "s", eps: []netip.AddrPort{tcpEndpoint(t, func(c *net.TCPConn) {
			io.CopyN(c, stream(1), size)
			onSocket(t, c, func(fd int) error { // until all has been taken
				for n := 1; n > 0; {
					n, _ = unix.IoctlGetInt(fd, unix.SIOCOUTQ)
				}
				return nil
			})
			reset(c)
		})}})
		s := start(t, Config{}, p)
		c := connect(t, s)
		must(t, c.SetReadBuffer(1<<16))
		s = phase(t, s, Config{}, p, handover.Leaving)
		got := checker{want: stream(1)}
		if n, err := io.Copy(&got, c); n != size || got.wrong || !errors.Is(err, unix.ECONNRESET) {
			t.Errorf("client got %d bytes, wrong %t, and %v; want %d and a reset", n, got.wrong, err, size)
		}
		eventually(t, "it has ended", func() bool { return s.Budget(service.TCP).Used == 0 })
	})
	t.Run("a session is silent", func(t *testing.T) {
		cfg := Config{Origin: newOrigins(), UDPIdleTimeout: time.Second}
		p := testPlan(udpService(first(udpEndpoint(t, "a"))))
		s := start(t, cfg, p)
		answers(t, udpClient(t, s), "x", "a x")
		s = succeed(t, s, cfg, p)
		if n := len(s.Connections()); n != 1 {
			t.Errorf("%d sessions, want 1", n)
		}
		eventually(t, "it has ended", func() bool { return len(s.Connections()) == 0 })
	})
}

// TestRecordsEndWithTheHandover: what a Server has recorded doesn't count once it has handed over, as numbers of descriptors
// are others' soon.
func TestRecordsEndWithTheHandover(t *testing.T) {
	p := testPlan(testService{name: "s", eps: []netip.AddrPort{tcpEndpoint(t, echo)}})
	cfg := Config{Recorded: func(int) {}}
	s := start(t, cfg, p)
	ask(t, connect(t, s), "x")
	if s.records.head.layout != layoutOf() {
		t.Fatal("there are no records of this program")
	}
	next := heir(t, s, Config{}, p)
	h, state := freeze(t, s)
	must(t, next.TakeOver(state, copies(t, h.Files)))
	records := s.records
	h.Release()
	if records.head.layout == layoutOf() {
		t.Error("records still count after Release")
	}
	go next.Run(context.Background())
}

// TestRestDoesntCount: while connections are at rest, as their Server is frozen, or has taken over and doesn't run yet, what bounds their
// silence stands still. The clock goes on by hours meanwhile.
func TestRestDoesntCount(t *testing.T) {
	p := testPlan(testService{name: "s", eps: []netip.AddrPort{tcpEndpoint(t, echo)}, port: service.Port{IdleTimeout: time.Hour}})
	s := start(t, Config{}, p)
	c := connect(t, s)
	alive := func(s *Server, after string) {
		t.Helper()
		for range 3 { // turns, before it moves something
			everyPoller(s.loops, func(*loop) {})
		}
		if got := ask(t, c, "x"); got != "x" {
			t.Errorf("after %s the echo is %q", after, got)
		}
	}
	alive(s, "the start")
	passes := func() { rested.Add(-int64(2 * time.Hour)) }
	h, _ := freeze(t, s)
	passes()
	h.Resume()
	alive(s, "a freeze")
	next := heir(t, s, Config{}, p)
	h, state := freeze(t, s)
	must(t, next.TakeOver(state, copies(t, h.Files)))
	passes()
	h.Release()
	go next.Run(context.Background())
	alive(next, "a takeover")
}
