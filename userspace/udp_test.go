package userspace

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"kproxy.dev/kproxy/service"
)

// origins is an OriginLookup for tests on loopback, where nothing redirects.
type origins struct {
	mu    sync.Mutex
	to    map[netip.AddrPort]netip.AddrPort // client → original destination; vip where it has none
	asked map[netip.AddrPort]int
}

func newOrigins() *origins {
	return &origins{to: map[netip.AddrPort]netip.AddrPort{}, asked: map[netip.AddrPort]int{}}
}

func (o *origins) set(client, orig netip.AddrPort) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.to[client] = orig
}

func (o *origins) lookups(client netip.AddrPort) int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.asked[client]
}

// LookupAll implements OriginLookup.
func (o *origins) LookupAll(_ service.Protocol, flows [][2]netip.AddrPort, found func(i int, orig, client netip.AddrPort, err error)) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for i, f := range flows {
		client := f[1]
		orig, ok := o.to[client]
		o.asked[client]++
		switch {
		case !ok:
			found(i, vip, client, nil)
		case !orig.IsValid():
			found(i, netip.AddrPort{}, netip.AddrPort{}, errors.New("no such flow"))
		default:
			found(i, orig, client, nil)
		}
	}
}

// udpClient is a socket that talks to the Server.
func udpClient(t testing.TB, s *Server) *net.UDPConn {
	t.Helper()
	return udpClientFrom(t, s, net.IPv4(127, 0, 0, 1))
}

func udpClientFrom(t testing.TB, s *Server, from net.IP) *net.UDPConn {
	t.Helper()
	_, port := s.Ports()
	c, err := net.DialUDP("udp4", &net.UDPAddr{IP: from}, &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1), Port: int(port)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// udpEndpoint answers each datagram with name, a space, and the datagram. It
// serves until the returned function is called or the test ends.
func udpEndpoint(t testing.TB, name string) (netip.AddrPort, func()) {
	t.Helper()
	c, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	c.SetReadBuffer(4 << 20)
	t.Cleanup(func() { c.Close() })
	go func() {
		b := make([]byte, datagramSize)
		for {
			n, from, err := c.ReadFromUDPAddrPort(b)
			if err != nil {
				return
			}
			answer := b[:n]
			if name != "" {
				answer = append([]byte(name+" "), answer...)
			}
			c.WriteToUDPAddrPort(answer, from)
		}
	}()
	return addrPort(c.LocalAddr()), func() { c.Close() }
}

// udpAsk sends line until there is an answer: datagrams may be lost.
func udpAsk(t testing.TB, c *net.UDPConn, line string) string {
	t.Helper()
	b := make([]byte, datagramSize)
	for end := time.Now().Add(patience); time.Now().Before(end); {
		c.Write([]byte(line))
		c.SetReadDeadline(time.Now().Add(500 * time.Millisecond))
		if n, err := c.Read(b); err == nil {
			return string(b[:n])
		}
	}
	t.Fatalf("no answer to %q", line)
	return ""
}

// udpAskOnce is udpAsk without a second try.
func udpAskOnce(t testing.TB, c *net.UDPConn, line string) string {
	t.Helper()
	c.Write([]byte(line))
	b := make([]byte, datagramSize)
	c.SetReadDeadline(time.Now().Add(patience))
	n, err := c.Read(b)
	if err != nil {
		t.Fatal(err)
	}
	return string(b[:n])
}

func udpService(eps ...netip.AddrPort) testService {
	return testService{name: "u", proto: service.UDP, eps: eps}
}

func udpKey() service.Key { return udpService().key() }

func TestUDPSession(t *testing.T) {
	a, _ := udpEndpoint(t, "a")
	b, _ := udpEndpoint(t, "b")
	s := start(t, Config{Origin: newOrigins()}, testPlan(udpService(a, b)))
	first, second := udpClient(t, s), udpClient(t, s)
	name := udpAskOnce(t, first, "x")[:1]
	if other := udpAskOnce(t, second, "x")[:1]; other == name {
		t.Errorf("both clients got %s", name)
	}
	for range 5 {
		if got := udpAskOnce(t, first, "x"); got != name+" x" {
			t.Errorf("answer %q, want the session's endpoint %s", got, name)
		}
	}
	c := countersOf(s, udpKey())
	if c.Active != 2 || c.Total != 2 || c.Failed != 0 || c.BytesIn != 7 || c.BytesOut != 21 {
		t.Errorf("counters %+v", c)
	}
}

func TestUDPIdleTimeout(t *testing.T) {
	ep, _ := udpEndpoint(t, "a")
	d := udpService(ep)
	d.port.IdleTimeout = time.Second
	s := start(t, Config{Origin: newOrigins()}, testPlan(d))
	c := udpClient(t, s)
	udpAsk(t, c, "x")
	eventually(t, "the session has ended", func() bool { return countersOf(s, udpKey()).Active == 0 })
	udpAsk(t, c, "x")
	if got := countersOf(s, udpKey()).Total; got != 2 {
		t.Errorf("%d sessions, want 2", got)
	}
}

// A session ends with the last of the answers that its service says each datagram has, and its socket is the next one's; where it
// says nothing, with silence.
func TestUDPResponses(t *testing.T) {
	for _, c := range []struct {
		name                    string
		number, responses, left int // of the service's port; sessions that are left after two questions and an answer to each
	}{
		{"DNS has one", 53, -1, 0}, {"others' aren't known", 80, -1, 1}, {"one by annotation", 80, 1, 0}, {"not known by annotation", 53, 0, 1}, {"more than there are", 80, 2, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			endpoint, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
			if err != nil {
				t.Fatal(err)
			}
			defer endpoint.Close()
			d := udpService(addrPort(endpoint.LocalAddr()))
			d.port.Number, d.port.Responses = uint16(c.number), c.responses
			s := start(t, Config{Origin: newOrigins()}, testPlan(d))
			client := udpClient(t, s)
			b := make([]byte, 10)
			var from netip.AddrPort
			for _, c := range []*net.UDPConn{client, endpoint} {
				c.SetReadDeadline(time.Now().Add(patience))
			}
			must := func(err error) {
				t.Helper()
				if err != nil {
					t.Fatal(err)
				}
			}
			for range 2 { // questions, and none is answered before the other one has come
				_, err := client.Write([]byte("x"))
				must(err)
				_, from, err = endpoint.ReadFromUDPAddrPort(b)
				must(err)
			}
			for range 2 { // answers, one after the other
				_, err := endpoint.WriteToUDPAddrPort([]byte("y"), from)
				must(err)
				_, err = client.Read(b)
				must(err)
			}
			eventually(t, fmt.Sprintf("%d sessions are left", c.left), func() bool { return countersOf(s, udpKey()).Active == int64(c.left) })
			if total := countersOf(s, udpKey()).Total; total != 1 {
				t.Errorf("there were %d sessions, want one", total)
			}
			again := false
			for range 20 { // clients, of whom some meet the same worker
				_, err := udpClient(t, s).Write([]byte("x"))
				must(err)
				_, next, err := endpoint.ReadFromUDPAddrPort(b)
				must(err)
				again = again || next == from
			}
			if again != (c.left == 0) {
				t.Errorf("another session had the same socket: %v", again)
			}
		})
	}
}

// A port that nothing listens on is found out by ICMP; the datagram goes to
// another endpoint.
func TestUDPPortUnreachable(t *testing.T) {
	dead, stop := udpEndpoint(t, "dead")
	stop()
	alive, _ := udpEndpoint(t, "alive")
	s := start(t, Config{Origin: newOrigins()}, testPlan(udpService(dead, alive)))
	for range 10 {
		c := udpClient(t, s)
		if got := udpAskOnce(t, c, "x"); got != "alive x" {
			t.Fatalf("answer %q", got)
		}
	}
	c := countersOf(s, udpKey())
	if c.Total != 10 || c.Retried == 0 || c.Failed != 0 {
		t.Errorf("counters %+v, want all 10 sessions to be answered, with retries", c)
	}
	for _, e := range c.Endpoints {
		if e.Address == dead && e.Failures != c.Retried {
			t.Errorf("dead endpoint %+v, want %d failures", e, c.Retried)
		}
	}
}

// When every endpoint is dead, a datagram isn't sent around for ever.
func TestUDPAllDead(t *testing.T) {
	a, stopA := udpEndpoint(t, "a")
	b, stopB := udpEndpoint(t, "b")
	stopA()
	stopB()
	s := start(t, Config{Origin: newOrigins()}, testPlan(udpService(a, b)))
	udpClient(t, s).Write([]byte("x"))
	failures := func() (n uint64) {
		for _, e := range countersOf(s, udpKey()).Endpoints {
			n += e.Failures
		}
		return n
	}
	eventually(t, "the datagram and its retries have failed", func() bool { return failures() == 4 })
	time.Sleep(50 * time.Millisecond)
	if n := failures(); n != 4 {
		t.Errorf("%d failures of one datagram, want 4", n)
	}
}

// A session whose endpoint dies goes on with another one.
func TestUDPEndpointDies(t *testing.T) {
	a, stop := udpEndpoint(t, "a")
	s := start(t, Config{Origin: newOrigins()}, testPlan(udpService(a)))
	c := udpClient(t, s)
	udpAsk(t, c, "x")
	b, _ := udpEndpoint(t, "b")
	prepare(s, testPlan(udpService(a, b)))
	stop()
	if got := udpAskOnce(t, c, "x"); got != "b x" {
		t.Errorf("answer %q", got)
	}
	if got := countersOf(s, udpKey()); got.Retried == 0 || got.Total != 1 {
		t.Errorf("counters %+v, want one session that was retried", got)
	}
}

// TestUDPEndpointOfAHashDies: the client goes to another endpoint, though the dead one is its own by the algorithm.
func TestUDPEndpointOfAHashDies(t *testing.T) {
	a, stop := udpEndpoint(t, "a")
	b, stopB := udpEndpoint(t, "b")
	d := udpService(a, b)
	d.port.Algorithm = service.SourceHash
	s := start(t, Config{Origin: newOrigins()}, testPlan(d))
	c, want := udpClient(t, s), "b x"
	if udpAsk(t, c, "x") == want {
		stop, want = stopB, "a x"
	}
	stop()
	if got := udpAskOnce(t, c, "x"); got != want {
		t.Errorf("answer %q, want %q", got, want)
	}
}

// Many clients at once get answers from several workers, while endpoints come and go, one refuses, sessions make
// room for others, and counts are read.
func TestUDPBesideChanges(t *testing.T) {
	a, _ := udpEndpoint(t, "a")
	b, _ := udpEndpoint(t, "b")
	gone, stop := udpEndpoint(t, "gone")
	stop()
	s := start(t, Config{Origin: newOrigins(), Loops: 4, MaxSessions: 64}, testPlan(udpService(a, b)))
	var clients sync.WaitGroup
	for range 20 {
		clients.Go(func() {
			for range 10 {
				c := udpClient(t, s)
				for range 3 {
					if got := udpAsk(t, c, "x"); got != "a x" && got != "b x" {
						t.Errorf("answer %q", got)
					}
				}
			}
		})
	}
	done := make(chan struct{})
	go func() { clients.Wait(); close(done) }()
	for i := 0; ; i++ {
		select {
		case <-done:
			return
		case <-time.After(time.Millisecond):
		}
		serve(s, testPlan(udpService([][]netip.AddrPort{{a}, {a, b}, {b, gone}}[i%3]...)))
		s.Budget(service.UDP)
		s.Shed(service.UDP)
		s.everySession(func(x *session) { x.holding() })
	}
}

// An endpoint that reads nothing keeps no other client waiting.
func TestUDPSlownessStaysWithItsClient(t *testing.T) {
	fast, _ := udpEndpoint(t, "fast")
	deaf, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)}) // never read
	if err != nil {
		t.Fatal(err)
	}
	defer deaf.Close()
	other := netip.MustParseAddrPort("10.96.0.2:53")
	o := newOrigins()
	s := start(t, Config{Origin: o}, testPlan(
		testService{name: "u", proto: service.UDP, eps: []netip.AddrPort{fast}},
		testService{name: "v", proto: service.UDP, vip: other, eps: []netip.AddrPort{addrPort(deaf.LocalAddr())}},
	))
	stuck := udpClient(t, s)
	o.set(addrPort(stuck.LocalAddr()), other)
	for range 2000 {
		stuck.Write(make([]byte, 1400))
	}
	for range 100 {
		udpAsk(t, udpClient(t, s), "x")
	}
}

// observedOrigins calls after before it returns.
type observedOrigins struct {
	*origins
	after func()
}

func (o observedOrigins) LookupAll(p service.Protocol, flows [][2]netip.AddrPort, found func(i int, orig, client netip.AddrPort, err error)) {
	o.origins.LookupAll(p, flows, found)
	o.after()
}

// A worker that looks up origins does nothing else meanwhile: others may wait to do so.
func TestUDPLooksUpOnly(t *testing.T) {
	ep, _ := udpEndpoint(t, "a")
	var server atomic.Pointer[Server]
	var looked, begun atomic.Int64
	o := observedOrigins{newOrigins(), func() {
		looked.Add(1)
		begun.Add(int64(len(server.Load().live.all())))
	}}
	s := start(t, Config{Origin: o}, testPlan(udpService(ep)))
	server.Store(s)
	if got := udpAsk(t, udpClient(t, s), "x"); got != "a x" {
		t.Errorf("answer %q, want %q", got, "a x")
	}
	if looked.Load() != 1 || begun.Load() != 0 {
		t.Errorf("%d look-ups, %d sessions begun before they were over; want 1, 0", looked.Load(), begun.Load())
	}
}

// After a silence, a session asks again whether its flow is still the same.
func TestUDPRevalidates(t *testing.T) {
	a, _ := udpEndpoint(t, "a")
	b, _ := udpEndpoint(t, "b")
	other := netip.MustParseAddrPort("10.96.0.2:53")
	o := newOrigins()
	s := start(t, Config{Origin: o}, testPlan(
		testService{name: "u", proto: service.UDP, eps: []netip.AddrPort{a}},
		testService{name: "v", proto: service.UDP, vip: other, eps: []netip.AddrPort{b}},
	))
	c := udpClient(t, s)
	client := addrPort(c.LocalAddr())
	udpAsk(t, c, "x")
	if n := o.lookups(client); n != 1 {
		t.Errorf("%d lookups for one session", n)
	}
	age := func() {
		for _, f := range s.live.all() {
			f.(*session).active.Add(-int64(2 * trustFor))
		}
	}
	age()
	if got := udpAsk(t, c, "x"); got != "a x" || o.lookups(client) != 2 {
		t.Errorf("answer %q after %d lookups, want a second one", got, o.lookups(client))
	}
	age()
	o.set(client, other)
	if got := udpAsk(t, c, "x"); got != "b x" {
		t.Errorf("answer %q, want the new flow's service", got)
	}
	age()
	o.set(client, netip.AddrPort{})
	c.Write([]byte("x"))
	eventually(t, "the session without a flow has ended", func() bool { return len(s.live.all()) == 0 })
}

// sessionsOf returns how many sessions the workers have.
func sessionsOf(s *Server) (n int) {
	everyPoller(s.workers, func(w *udpWorker) {
		w.server.gate.Lock() // workers answer at the same time
		n += len(w.sessions)
		w.server.gate.Unlock()
	})
	return n
}

func TestUDPRefused(t *testing.T) {
	ep, _ := udpEndpoint(t, "a")
	o := newOrigins()
	s := start(t, Config{Origin: o}, testPlan(udpService(ep)))
	_, port := s.Ports()
	for name, orig := range map[string]netip.AddrPort{
		"no flow":                  {},
		"unknown destination":      netip.MustParseAddrPort("10.96.0.9:9"),
		"straight to the listener": netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), port),
	} {
		c := udpClient(t, s)
		o.set(addrPort(c.LocalAddr()), orig)
		c.Write([]byte("x"))
		eventually(t, name+" was looked up", func() bool { return o.lookups(addrPort(c.LocalAddr())) == 1 })
	}
	eventually(t, "no session is left", func() bool { return sessionsOf(s) == 0 })
	if c := countersOf(s, udpKey()); c.Total != 0 {
		t.Errorf("counters %+v", c)
	}
}

// Sessions are bounded; the one that was silent longest makes room.
func TestUDPSessionsAreBounded(t *testing.T) {
	t.Parallel()
	ep, _ := udpEndpoint(t, "a")
	s := start(t, Config{Origin: newOrigins(), MaxSessions: 4}, testPlan(udpService(ep)))
	for range 20 {
		udpAsk(t, udpClient(t, s), "x")
		eventually(t, "no more than 4 sessions are left", func() bool { return len(s.live.all()) <= 4 })
		for _, f := range s.live.all() {
			f.(*session).active.Add(-int64(2 * trustFor))
		}
	}
}

func TestUDPCommitEndsSessions(t *testing.T) {
	a, _ := udpEndpoint(t, "a")
	b, _ := udpEndpoint(t, "b")
	s := start(t, Config{Origin: newOrigins()}, testPlan(udpService(a)))
	c := udpClient(t, s)
	udpAsk(t, c, "x")
	next := testPlan(udpService(b))
	prepare(s, next)
	if got := udpAsk(t, c, "x"); got != "a x" {
		t.Errorf("answer %q between Prepare and Commit", got)
	}
	s.Commit()
	if got := udpAsk(t, c, "x"); got != "b x" {
		t.Errorf("answer %q after the endpoint is gone", got)
	}
}

func TestUDPFragmentsOfManyClientsArriveWhole(t *testing.T) {
	ep, _ := udpEndpoint(t, "")
	s := start(t, Config{Origin: newOrigins()}, testPlan(udpService(ep)))
	var wg sync.WaitGroup
	for i := range 16 {
		c := udpClient(t, s)
		wg.Go(func() {
			for range 20 {
				want := bytes.Repeat([]byte{byte(i)}, 9000)
				if got := udpAsk(t, c, string(want)); got != string(want) {
					t.Errorf("client %d got another's datagram", i)
				}
			}
		})
	}
	wg.Wait()
}

func TestProbe(t *testing.T) {
	s := start(t, Config{Origin: newOrigins(), TCPOrigin: kernelOrigin}, testPlan())
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	var prober *net.UDPConn
	for range 3 {
		if err := s.Probe(ctx); err != nil {
			t.Fatal(err)
		}
		if s.udp[0].prober != prober && prober != nil {
			t.Error("each probe is a new flow")
		}
		prober = s.udp[0].prober
	}
	stuck := func() bool {
		short, stop := context.WithTimeout(ctx, 100*time.Millisecond)
		defer stop()
		return s.Probe(short) != nil
	}
	for _, w := range s.workers {
		release := make(chan struct{})
		w.post(func() { <-release })
		eventually(t, "a stuck UDP worker fails the probe", stuck)
		close(release)
		eventually(t, "it serves again", func() bool { return s.Probe(ctx) == nil })
	}
	s.tcpBudget.mu.Lock()
	eventually(t, "a stuck accept loop fails the probe", stuck)
	s.tcpBudget.mu.Unlock()
	eventually(t, "it serves again", func() bool { return s.Probe(ctx) == nil })
}

// A host whose addresses are all IPv4 passes the probe.
func TestProbeWithoutIPv6(t *testing.T) {
	const sysctl = "/proc/sys/net/ipv6/conf/all/disable_ipv6"
	must(t, os.WriteFile(sysctl, []byte("1"), 0))
	t.Cleanup(func() { must(t, os.WriteFile(sysctl, []byte("0"), 0)) })
	s := start(t, Config{Origin: newOrigins(), TCPOrigin: kernelOrigin}, testPlan())
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := s.Probe(ctx); err != nil {
		t.Error(err)
	}
}
