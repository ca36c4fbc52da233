package userspace

import (
	"net/netip"
	"testing"
	"time"
)

// A session that goes on to another endpoint isn't the one that is given up for a
// descriptor.
func TestMovingSessionIsNotEvicted(t *testing.T) {
	a, _ := udpEndpoint(t, "a")
	b, _ := udpEndpoint(t, "b")
	s := start(t, Config{Loops: 1, Origin: newOrigins()}, testPlan(udpService([]netip.AddrPort{a, b}...)))
	mover, idler := udpClient(t, s), udpClient(t, s)
	udpAsk(t, mover, "hi")
	udpAsk(t, idler, "hi")
	time.Sleep(trustFor + 200*time.Millisecond)
	w := s.workers[0]
	type result struct{ ended, socket, listed bool }
	got := make(chan result)
	w.post(func() {
		var x *session
		for _, y := range w.sessions {
			if y.key.clientAddress() == addrPort(mover.LocalAddr()) {
				x = y
			}
		}
		failed := x.endpoint
		x.disconnect(false)
		free := s.udpBudget.free
		s.udpBudget.tryAcquire(free) // another worker takes what x gave back
		x.connect(failed)
		s.udpBudget.release(free)
		got <- result{x.phase == over, x.upstream != nil, x.older != nil}
	})
	if r := <-got; r != (result{socket: true, listed: true}) {
		t.Errorf("the moving session: %+v; want it to have a socket", r)
	}
}
