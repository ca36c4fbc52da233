package userspace

import (
	"net"
	"net/netip"
	"testing"
)

// However the kernel wakes loops for a burst of clients: connections that stay are
// shared out evenly, and all of them work. Of several bursts, as a loop may get its
// share by luck.
func TestLoopsShareABurst(t *testing.T) {
	const loops, clients, bursts = 2, 64, 3
	s := start(t, Config{Loops: loops}, testPlan(testService{name: "s", eps: []netip.AddrPort{tcpEndpoint(t, named("a"))}}))
	for range bursts {
		var open []*net.TCPConn
		for range clients {
			open = append(open, connect(t, s))
		}
		for _, c := range open {
			ask(t, c, "x")
		}
		fewest, most := clients, 0
		for _, l := range s.loops {
			fewest, most = min(fewest, int(l.assigned.Load())), max(most, int(l.assigned.Load()))
		}
		// Two that accept at once don't know of each other's last one.
		if bound := fewest + fewest/unevenShare + unevenBy + loops; most > bound {
			t.Errorf("of %d connections a loop has %d and another %d, want %d at most", clients, most, fewest, bound)
		}
		for _, c := range open {
			c.Close()
		}
		eventually(t, "all to end", func() bool { return len(s.live.all()) == 0 })
	}
	for _, l := range s.loops {
		eventually(t, "a loop to have none, as all have ended", func() bool { return l.assigned.Load() == 0 })
	}
}

// Two connections are served by two loops, so that neither waits for the other.
func TestLoopsShareTwoConnections(t *testing.T) {
	s := start(t, Config{Loops: 2}, testPlan(testService{name: "s", eps: []netip.AddrPort{tcpEndpoint(t, named("a"))}}))
	for range 2 {
		ask(t, connect(t, s), "x")
	}
	for i, l := range s.loops {
		if n := l.assigned.Load(); n != 1 {
			t.Errorf("loop %d has %d of two connections, want one", i, n)
		}
	}
}
