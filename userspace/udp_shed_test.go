package userspace

import (
	"fmt"
	"math"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// originOf is an OriginLookup that knows by the client's address where it was headed.
type originOf func(netip.Addr) netip.AddrPort

func (o originOf) LookupAll(_ service.Protocol, flows [][2]netip.AddrPort, found func(i int, orig, client netip.AddrPort, err error)) {
	for i, f := range flows {
		found(i, o(f[1].Addr()), f[1], nil)
	}
}

// Where there is no room for another session, who holds most gives way, sessions without an answer first, and a
// hundred others lose no session that talks and none of its datagrams, and new ones are served.
func TestUDPFloodBesideAHundred(t *testing.T) {
	const hundred, sessions = 100, 320
	silent := listening(t)
	mirror := sourceEndpoint(t)
	other := netip.MustParseAddrPort("10.96.0.2:53")
	tests := []struct {
		name    string
		polite  int // addresses of the hundred
		from    func(i int) net.IP
		to      netip.AddrPort
		asks    int // datagrams of a session
		reasons []shedReason
	}{
		{"a client of a silent endpoint", hundred, func(int) net.IP { return net.IPv4(127, 1, 0, 1) }, addrPort(silent.LocalAddr()), 1, []shedReason{shedClient}},
		{"a client that goes on asking one", hundred, func(int) net.IP { return net.IPv4(127, 1, 0, 1) }, addrPort(silent.LocalAddr()), 3, []shedReason{shedClient}},
		{"many clients of a silent service", hundred, func(i int) net.IP { return net.IPv4(127, 1, byte(i>>8), byte(i)) }, addrPort(silent.LocalAddr()), 1, []shedReason{shedService}},
		{"clients of one that hold more or less, beside some that hold as much", 5, func(i int) net.IP { return net.IPv4(127, 1, 0, byte(math.Sqrt(float64(i)))) }, addrPort(silent.LocalAddr()), 1, []shedReason{shedClient, shedService}},
		{"a client that gets answers", hundred, func(int) net.IP { return net.IPv4(127, 1, 0, 1) }, mirror, 3, []shedReason{shedClient}},
	}
	for i, tt := range slices.Repeat(tests, 2) {
		workers := 1 + i/len(tests)
		t.Run(fmt.Sprintf("%s/%d workers", tt.name, workers), func(t *testing.T) {
			victim, flooded := udpService(mirror), udpService(tt.to)
			flooded.name, flooded.vip = "flooded", other
			origin := originOf(func(a netip.Addr) netip.AddrPort {
				if a.As4()[1] == 1 {
					return other
				}
				return vip
			})
			s := start(t, Config{Origin: origin, MaxSessions: sessions, Loops: workers}, testPlan(victim, flooded))
			clients, seen := make([]*net.UDPConn, hundred), make([]string, hundred)
			for i := range clients {
				clients[i] = udpClientFrom(t, s, net.IPv4(127, 0, 1, byte(i%tt.polite+1)))
				for range 3 {
					seen[i] = udpAsk(t, clients[i], "x")
				}
			}
			flood := make([]*net.UDPConn, 2*sessions)
			for i := range flood {
				flood[i] = udpClientFrom(t, s, tt.from(i))
			}
			for i := range flood {
				for range tt.asks {
					if flood[i].Write([]byte("x")); tt.to == mirror {
						udpAsk(t, flood[i], "x")
					}
				}
				if i >= sessions && i%4 == 0 {
					n := i / 4 % hundred
					caughtUp(t, s)
					if got := udpAskOnce(t, clients[n], "old"); got != seen[n] {
						t.Fatalf("a session that talks was moved: %s, now %s", seen[n], got)
					}
					udpAskOnce(t, udpClientFrom(t, s, net.IPv4(127, 0, 1, byte(n%tt.polite+1))), "new")
				}
			}
			caughtUp(t, s)
			if got := s.Exhausted(); len(got) != 1 || got[0] != plan.Sessions {
				t.Errorf("exhausted: %v", got)
			}
			for i, c := range clients {
				if got := udpAskOnce(t, c, "old"); got != seen[i] {
					t.Fatalf("a session that talks was moved: %s, now %s", seen[i], got)
				}
			}
			for r, n := range s.Shed(service.UDP) {
				if want := slices.Contains(tt.reasons, shedReason(r)); want != (n > 0) {
					t.Errorf("%d gave way: %s", n, plan.ShedReasons[r])
				}
			}
		})
	}
}

// caughtUp waits until s has read what clients sent: while others have the processors, a listener's buffer is soon full.
func caughtUp(t *testing.T, s *Server) {
	t.Helper()
	eventually(t, "datagrams to be read", func() bool {
		for _, l := range s.udp {
			for _, fd := range l.fds {
				if n, err := unix.IoctlGetInt(fd, unix.SIOCINQ); err != nil || n > 0 {
					return false
				}
			}
		}
		return true
	})
}

// Where room is short, idle sockets of all workers give way.
func TestIdleSocketsOfOthersGiveWay(t *testing.T) {
	ep, _ := udpEndpoint(t, "a")
	s := start(t, Config{Loops: 2, Origin: newOrigins()}, testPlan(udpService(ep)))
	w, other := s.workers[0], s.workers[1]
	eventually(t, "both run", func() bool { return w.post(func() {}) && other.post(func() {}) })
	idle := func() (n int) {
		everyPoller(s.workers[1:], func(w *udpWorker) { n = int(w.pool.n.Load()) })
		return n
	}
	everyPoller(s.workers[1:], func(w *udpWorker) {
		u, err := w.upstream(socketKey{to: ep})
		if err != nil {
			t.Error(err)
			return
		}
		w.now = sinceEpoch()
		w.pool.put(u, false)
	})
	if n := idle(); n != 1 {
		t.Fatalf("%d idle sockets, want 1", n)
	}
	w.post(w.makeRoom)
	eventually(t, "idle sockets to be closed", func() bool { return idle() == 0 })
}

// Sessions that have ended since they were chosen aren't taken for victims, and one that lives is, whichever worker has it.
func TestEndedSessionsAreNoVictims(t *testing.T) {
	ep, _ := udpEndpoint(t, "a")
	s := start(t, Config{Loops: 2, Origin: newOrigins()}, testPlan(udpService(ep)))
	for range 20 {
		udpAsk(t, udpClient(t, s), "x")
	}
	time.Sleep(2 * spentAfter)
	take := func() (v victim, found bool) {
		everyPoller(s.workers[:1], func(w *udpWorker) {
			w.now = sinceEpoch()
			v, found = s.victims.take(w)
		})
		return v, found
	}
	if _, found := take(); !found {
		t.Fatal("no victims of 20 sessions that are spent")
	}
	chosen := s.victims.of[0].queue
	for _, v := range chosen[1:] {
		v.flow.kill()
	}
	eventually(t, "they end", func() bool { return len(s.live.all()) == 20-len(chosen)+1 })
	if v, found := take(); !found || v.flow != chosen[0].flow {
		t.Errorf("%t, %v, want the one that hasn't ended", found, v.flow)
	}
}

// A worker with very many sessions chooses among some of its own, or all clients would wait for it; those of the client that
// holds most still give way.
func TestVictimsAmongManySessions(t *testing.T) {
	s, d := &Server{}, &sessionVictims{}
	w, other := &udpWorker{server: s, now: int64(time.Hour), sessions: map[sessionKey]*session{}}, &udpWorker{server: s}
	s.workers = []*udpWorker{w, other}
	const greedy = 9
	for i := range 16 * sessionsChosenFrom {
		x := &session{worker: w}
		x.state = &serviceState{}
		x.key.client, x.key.port = [16]byte{10, 0, byte(i >> 8), byte(i)}, uint16(i)
		if i%4 == 0 {
			x.key.client = [16]byte{greedy}
		}
		x.class.Store(int32(talking))
		x.active.Store(w.now)
		w.sessions[x.key] = x
		s.live.add(x)
		s.live.add(&session{worker: other})
	}
	chosen := d.choose(w)
	if len(chosen) != sessionsChosenFrom/sessionParts {
		t.Errorf("%d chosen, want %d", len(chosen), sessionsChosenFrom/sessionParts)
	}
	for _, v := range chosen {
		if v.flow.(*session).worker != w || v.reason != shedClient || v.client.AsSlice()[0] != greedy {
			t.Fatalf("%s gives way: %s", v.client, plan.ShedReasons[v.reason])
		}
	}
}

// A session moves on to another endpoint where no descriptor is free: it keeps its own.
func TestSessionMovesWithoutFreeDescriptors(t *testing.T) {
	a, _ := udpEndpoint(t, "a")
	b, _ := udpEndpoint(t, "b")
	s := start(t, Config{Loops: 1, Origin: newOrigins()}, testPlan(udpService(a, b)))
	udpAsk(t, udpClient(t, s), "hi")
	moved := make(chan bool)
	w := s.workers[0]
	w.post(func() {
		for _, x := range w.sessions {
			failed, free := x.endpoint.Load(), s.udpBudget.free
			s.udpBudget.tryAcquire(free)
			x.move(unix.ECONNREFUSED)
			s.udpBudget.release(free)
			moved <- x.phase == ready && x.upstream != nil && x.endpoint.Load() != failed
		}
	})
	if !<-moved {
		t.Error("the session has no socket towards the other endpoint")
	}
}

// sourceEndpoint answers with the address that it sees ask.
func sourceEndpoint(t testing.TB) netip.AddrPort {
	t.Helper()
	c, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	must(t, err)
	t.Cleanup(func() { c.Close() })
	go func() {
		b := make([]byte, 100)
		for {
			_, from, err := c.ReadFromUDPAddrPort(b)
			if err != nil {
				return
			}
			c.WriteToUDPAddrPort([]byte(from.String()), from)
		}
	}()
	return addrPort(c.LocalAddr())
}
