package userspace

import (
	"io"
	"net"
	"net/netip"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
)

// A loop spins after many short waits for one connection, and no longer when waits are
// long, for others, or it may not.
func TestSpinningOnlyWhilePaying(t *testing.T) {
	const short, long = int64(shortSleep), int64(shortSleep) + 1
	const found, vain = -int64(spinFor), -int64(spinFor) - 1
	a, b := new(tcpConn), new(tcpConn)
	type wait struct {
		x    *tcpConn
		took int64 // negative if it looked before it slept
	}
	for _, tt := range []struct {
		name   string
		off    bool
		before int    // short waits for a
		waits  []wait // after them
		times  int    // so often
		want   bool
	}{
		{"nothing yet", false, 0, nil, 0, false},
		{"too few, as the first meets a connection that isn't known", false, spinFrom, nil, 0, false},
		{"enough", false, spinFrom + 1, nil, 0, true},
		{"some long ones", false, 1000, []wait{{a, long}}, spinFrom / trustPrice, true},
		{"too many long ones", false, 1000, []wait{{a, long}}, spinFrom/trustPrice + 1, false},
		{"others' events", false, 1000, []wait{{nil, short}}, spinFrom/trustPrice + 1, false},
		{"one of five is long", false, 1000, []wait{{a, long}, {a, short}, {a, short}, {a, short}, {a, short}}, 1000, true},
		{"one of four is long", false, 1000, []wait{{a, long}, {a, short}, {a, short}, {a, short}}, 1000, false},
		{"one of five is another's", false, 1000, []wait{{nil, short}, {a, short}, {a, short}, {a, short}, {a, short}}, 1000, true},
		{"two connections in turn", false, 1000, []wait{{a, short}, {b, short}}, 1000, false},
		{"some looks in vain", false, 1000, []wait{{a, vain}}, trustMost - spinFrom, true},
		{"too many looks in vain", false, 1000, []wait{{a, vain}}, trustMost - spinFrom + 1, false},
		{"half of them in vain", false, 1000, []wait{{a, vain}, {a, found}}, 1000, true},
		{"more than half", false, 1000, []wait{{a, vain}, {a, vain}, {a, vain}, {a, found}, {a, found}}, 1000, false},
		{"after too many, a few short ones", false, spinFrom + 1, append([]wait{{a, vain}}, slices.Repeat([]wait{{a, short}}, spinFrom-1)...), 1, false},
		{"after too many, more short ones", false, spinFrom + 1, append([]wait{{a, vain}}, slices.Repeat([]wait{{a, short}}, spinFrom)...), 1, true},
		{"switched off", true, 1000, nil, 0, false},
	} {
		s := spinning{off: tt.off}
		for range tt.before {
			s.judge(a, short, false)
		}
		for range tt.times {
			for _, w := range tt.waits {
				s.judge(w.x, max(w.took, -w.took), w.took < 0)
			}
		}
		if s.pays(0) != tt.want {
			t.Errorf("%s: spinning pays: %t, want %t", tt.name, s.pays(0), tt.want)
		}
		if s.pause = 1; s.pays(0) {
			t.Errorf("%s: spinning pays before its pause has ended", tt.name)
		}
	}
}

// Spinning is for a connection that exchanges small messages and alone has an event.
func TestSoleExchange(t *testing.T) {
	var small, few, bulk tcpConn
	small.small, few.small, bulk.small = usualExchanges.after, usualExchanges.after-1, 0
	l := loop{slots: []*tcpConn{&small, &few, &bulk, nil}}
	for _, tt := range []struct {
		name  string
		slots []int32
		want  *tcpConn
	}{
		{"nothing", nil, nil},
		{"small messages", []int32{0}, &small},
		{"too few of them", []int32{1}, nil},
		{"none of them", []int32{2}, nil},
		{"a connection that has ended", []int32{3}, nil},
		{"both of its sides", []int32{0, 0}, nil},
		{"somebody else besides", []int32{0, 1}, nil},
		{"the bell", []int32{bellNumber}, nil},
		{"a listener", []int32{listenerSlot(0)}, nil},
	} {
		var events []unix.EpollEvent
		for _, slot := range tt.slots {
			events = append(events, unix.EpollEvent{Fd: slot})
		}
		if got := l.sole(events); got != tt.want {
			t.Errorf("%s: %p, want %p", tt.name, got, tt.want)
		}
	}
}

// A loop lets go of a connection when that ends, and isn't told to spin where it may not.
func TestSpinningKnowsItsConnections(t *testing.T) {
	ep := tcpEndpoint(t, named("a"))
	for _, off := range []bool{false, true} {
		s := start(t, Config{Loops: 1, EpollOnly: true, NoSpin: off}, testPlan(testService{name: "s", eps: []netip.AddrPort{ep}}))
		last := func() (out *tcpConn) {
			s.everyLoop(func(l *loop) { out = l.spinning.last })
			return out
		}
		c := connect(t, s)
		for range 2*usualExchanges.after + 2 {
			ask(t, c, "x")
		}
		if got, want := last() != nil, !off; got != want {
			t.Errorf("NoSpin %t: the loop knows the connection that exchanges small messages: %t, want %t", off, got, want)
		}
		c.Close()
		eventually(t, "the connection to end", func() bool { return len(s.live.all()) == 0 })
		if last() != nil {
			t.Errorf("NoSpin %t: the loop knows a connection that has ended", off)
		}
	}
}

// Bytes in bulk aren't small messages, whatever came before.
func TestBulkEndsSmallMessages(t *testing.T) {
	s := start(t, Config{Loops: 1, EpollOnly: true}, testPlan(testService{name: "s", eps: []netip.AddrPort{tcpEndpoint(t, echo)}}))
	c := connect(t, s)
	for range usualExchanges.after {
		ask(t, c, "x")
	}
	const size = 64 * copySize
	small := func() (n uint8) {
		s.everyLoop(func(*loop) { n = s.live.all()[0].(*tcpConn).small })
		return n
	}
	for range 2 {
		go c.Write(make([]byte, size))
		if _, err := io.CopyN(io.Discard, c, size); err != nil {
			t.Fatal(err)
		}
		if n := small(); n >= usualExchanges.after {
			t.Errorf("after %d bytes in bulk it counts %d small messages in a row", size, n)
		}
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
	if l.spinning.pays(sinceEpoch()) {
		t.Error("a new loop spins")
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
