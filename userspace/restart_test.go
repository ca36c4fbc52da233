package userspace

import (
	"net"
	"net/netip"
	"testing"
	"time"

	"kproxy.dev/kproxy/lb"
	"kproxy.dev/kproxy/userspace/handover"
)

// TestRestart: a Server that begins where another one has ended gives clients the endpoints that they had, where these still serve and it
// isn't too long ago.
func TestRestart(t *testing.T) {
	a, _ := udpEndpoint(t, "a")
	b, _ := udpEndpoint(t, "b")
	for name, c := range map[string]struct {
		age      time.Duration
		affinity bool
		left     []netip.AddrPort
		again    bool
		keeps    func(had string) bool
	}{
		"soon":                     {time.Second, false, []netip.AddrPort{a, b}, false, func(string) bool { return true }},
		"late":                     {rememberedFor + time.Second, false, []netip.AddrPort{a, b}, false, func(string) bool { return false }},
		"again, and a takeover":    {time.Second, false, []netip.AddrPort{a, b}, true, func(string) bool { return true }},
		"again, together too late": {rememberedFor/2 + time.Second, false, []netip.AddrPort{a, b}, true, func(string) bool { return false }},
		"late, with affinity":      {rememberedFor + time.Second, true, []netip.AddrPort{a, b}, false, func(string) bool { return true }},
		"one endpoint has gone":    {time.Second, false, []netip.AddrPort{b}, false, func(had string) bool { return had == "b x" }},
		"the same, with affinity":  {time.Second, true, []netip.AddrPort{b}, false, func(had string) bool { return had == "b x" }},
		"after affinity has ended": {2 * time.Hour, true, []netip.AddrPort{a, b}, false, func(string) bool { return false }},
	} {
		t.Run(name, func(t *testing.T) {
			sticks := func(s *Server) {
				if c.affinity {
					s.plans.views[udpKey()].state.affinity.Store(lb.NewAffinity(time.Hour))
				}
			}
			first := start(t, Config{Origin: newOrigins()}, testPlan(udpService(a, b)))
			sticks(first)
			_, port := first.Ports()
			clients, had := make([]*net.UDPConn, 8), make([]string, 8)
			for i := range clients {
				clients[i] = udpClientFrom(t, first, net.IPv4(127, 0, 0, byte(i+1)))
				had[i] = udpAsk(t, clients[i], "x")
			}
			raw, err := handover.Encode(first.Remember())
			must(t, err)
			must(t, first.Drain(t.Context()))
			var state handover.Userspace
			must(t, handover.Decode(raw, &state))
			cfg, p := Config{Origin: newOrigins(), UDPPort: port}, testPlan(udpService(c.left...))
			second := start(t, cfg, p)
			sticks(second)
			second.Restore(&state, c.age)
			if c.again { // before clients say anything
				state = *second.Remember()
				must(t, second.Drain(t.Context()))
				second = start(t, cfg, p)
				second.Restore(&state, c.age)
				second = succeed(t, second, cfg, p)
			}
			last := len(clients) - 1
			for n := byte(1); len(c.left) > 1 && udpAsk(t, udpClientFrom(t, second, net.IPv4(127, 0, 1, n)), "x") != had[last]; n++ {
			} // by turns, each gets the other one from here on
			for i := range clients {
				i = last - i
				if got := udpAsk(t, clients[i], "x"); (got == had[i]) != c.keeps(had[i]) {
					t.Errorf("client %d is answered %q, and was %q before", i, got, had[i])
				}
			}
		})
	}
}
