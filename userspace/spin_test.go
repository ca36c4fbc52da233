package userspace

import (
	"net"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A loop spins after many short waits for one connection, and no longer when waits are
// long, for others, or it may not.
func TestSpinningOnlyWhilePaying(t *testing.T) {
	const short, long = int64(spinFor), int64(spinFor) + 1
	a, b := new(tcpConn), new(tcpConn)
	type wait struct {
		times int
		x     *tcpConn
		took  int64
	}
	tests := []struct {
		name  string
		off   bool
		waits []wait
		want  bool
	}{
		{"nothing yet", false, nil, false},
		{"the first meets a connection that isn't known", false, []wait{{spinFrom, a, short}}, false},
		{"short ones", false, []wait{{spinFrom + 1, a, short}}, true},
		{"some long ones after very many", false, []wait{{1000, a, short}, {spinFrom / trustPrice, a, long}}, true},
		{"long ones", false, []wait{{1000, a, short}, {spinFrom/trustPrice + 1, a, long}}, false},
		{"others' events", false, []wait{{1000, a, short}, {spinFrom/trustPrice + 1, nil, short}}, false},
		{"one of four is long", false, []wait{{1000, a, short}, {1, a, long}, {3, a, short}, {1, a, long}, {3, a, short}}, true},
		{"a long silence", false, []wait{{1000, a, short}, {10, nil, int64(time.Second)}}, false},
		{"switched off", true, []wait{{1000, a, short}}, false},
	}
	for _, tt := range tests {
		s := spinning{off: tt.off}
		for _, w := range tt.waits {
			for range w.times {
				s.judge(w.x, w.took)
			}
		}
		if s.pays() != tt.want {
			t.Errorf("%s: spinning pays: %t, want %t", tt.name, s.pays(), tt.want)
		}
	}
	s := spinning{}
	for range 1000 {
		s.judge(a, short)
		s.judge(b, short)
	}
	if s.pays() {
		t.Error("spinning pays for two connections in turn")
	}
}

// What a loop looks at before it sleeps are events.
func TestSpinFindsEvents(t *testing.T) {
	var l loop
	if err := l.init(); err != nil {
		t.Fatal(err)
	}
	defer l.shut()
	events := make([]unix.EpollEvent, eventsAtOnce)
	if n := l.spin(events); n != 0 {
		t.Errorf("%d events where there are none", n)
	}
	l.admitPosts()
	if !l.post(func() {}) {
		t.Fatal("the loop takes no posts")
	}
	if n := l.spin(events); n != 1 || events[0].Fd != bellNumber {
		t.Errorf("%d events, the first of %d; want that of the bell, %d", n, events[0].Fd, bellNumber)
	}
}

// Connections exchange what they exchange otherwise while their loop spins, and new
// ones are accepted.
func TestExchangesOfASpinningLoop(t *testing.T) {
	s := start(t, Config{Loops: 1, EpollOnly: true}, testPlan(testService{name: "s", eps: []netip.AddrPort{tcpEndpoint(t, named("a"))}}))
	l := s.loops[0]
	exchange := func(c net.Conn) {
		t.Helper()
		ready := make(chan bool)
		l.post(func() { l.spinning.trust = trustMost; close(ready) })
		<-ready
		if got := ask(t, c, "x"); got != "a x" {
			t.Errorf("answer %q, want %q", got, "a x")
		}
	}
	first := connect(t, s)
	for range 50 {
		exchange(first)
	}
	exchange(connect(t, s))
	exchange(first)
}
