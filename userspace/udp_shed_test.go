package userspace

import (
	"net"
	"net/netip"
	"testing"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// originOf is an OriginLookup that knows by the client's address where it was headed.
type originOf func(netip.Addr) netip.AddrPort

func (o originOf) Lookup(_ service.Protocol, _, client netip.AddrPort) (netip.AddrPort, netip.AddrPort, error) {
	return o(client.Addr()), client, nil
}

// Where there is no room for another session, who holds most gives way, sessions without an answer first, and a
// hundred others lose no session that talks and none of its datagrams, and new ones are served.
func TestUDPFloodBesideAHundred(t *testing.T) {
	const hundred, sessions = 100, 320
	silent := listening(t)
	mirror := sourceEndpoint(t)
	other := netip.MustParseAddrPort("10.96.0.2:53")
	tests := []struct {
		name   string
		from   func(i int) net.IP
		to     netip.AddrPort
		asks   int // datagrams of a session
		reason shedReason
	}{
		{"a client of a silent endpoint", func(int) net.IP { return net.IPv4(127, 1, 0, 1) }, addrPort(silent.LocalAddr()), 1, shedClient},
		{"a client that goes on asking one", func(int) net.IP { return net.IPv4(127, 1, 0, 1) }, addrPort(silent.LocalAddr()), 3, shedClient},
		{"many clients of a silent service", func(i int) net.IP { return net.IPv4(127, 1, byte(i>>8), byte(i)) }, addrPort(silent.LocalAddr()), 1, shedService},
		{"a client that gets answers", func(int) net.IP { return net.IPv4(127, 1, 0, 1) }, mirror, 3, shedClient},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			victim, flooded := udpService(mirror), udpService(tt.to)
			flooded.name, flooded.vip = "flooded", other
			origin := originOf(func(a netip.Addr) netip.AddrPort {
				if a.As4()[1] == 1 {
					return other
				}
				return vip
			})
			s := start(t, Config{Origin: origin, MaxSessions: sessions, Loops: 1}, testPlan(victim, flooded))
			clients, seen := make([]*net.UDPConn, hundred), make([]string, hundred)
			for i := range clients {
				clients[i] = udpClientFrom(t, s, net.IPv4(127, 0, 1, byte(i+1)))
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
					if got := udpAskOnce(t, clients[n], "old"); got != seen[n] {
						t.Fatalf("a session that talks was moved: %s, now %s", seen[n], got)
					}
					udpAsk(t, udpClientFrom(t, s, net.IPv4(127, 0, 1, byte(n+1))), "new")
				}
			}
			for i, c := range clients {
				if got := udpAskOnce(t, c, "old"); got != seen[i] {
					t.Fatalf("a session that talks was moved: %s, now %s", seen[i], got)
				}
			}
			for r, n := range s.Shed(service.UDP) {
				if want := r == int(tt.reason); want != (n > 0) {
					t.Errorf("%d gave way: %s", n, plan.ShedReasons[r])
				}
			}
			if got := s.Exhausted(); len(got) != 1 || got[0] != plan.Sessions {
				t.Errorf("exhausted: %v", got)
			}
		})
	}
}

// sourceEndpoint answers with whom it sees ask.
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
