package userspace

import (
	"io"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// ringer notes which timer went off.
type ringer struct {
	name string
	rang *[]string
}

func (r ringer) expired() { *r.rang = append(*r.rang, r.name) }

func TestTimersGoOffInOrder(t *testing.T) {
	var ts timers
	var rang []string
	timer := func(name string) *timer { return &timer{owner: ringer{name, &rang}} }
	a, b, c, d := timer("a"), timer("b"), timer("c"), timer("d")
	ts.set(a, 30)
	ts.set(b, 10)
	ts.set(c, 20)
	ts.set(d, 40)
	ts.set(b, 35) // put off
	ts.stop(c)
	ts.stop(c)
	ts.expire(9)
	if len(rang) > 0 {
		t.Errorf("%v went off early", rang)
	}
	ts.expire(35)
	if want := []string{"a", "b"}; !slices.Equal(rang, want) {
		t.Errorf("%v went off by 35, want %v", rang, want)
	}
	ts.set(a, 36) // again
	ts.expire(100)
	if want := []string{"a", "b", "a", "d"}; !slices.Equal(rang, want) || len(ts) != 0 {
		t.Errorf("%v went off in all, %d are left; want %v, 0", rang, len(ts), want)
	}
}

// Sockets towards endpoints keep alive once they are old enough for it to matter, and send at once whatever is written.
func TestOptionsOfEndpointSockets(t *testing.T) {
	s := start(t, Config{KeepAlive: 77 * time.Second}, testPlan(testService{name: "s", eps: []netip.AddrPort{tcpEndpoint(t, named("a"))}}))
	ask(t, connect(t, s), "x")
	x := s.live.all()[0].(*tcpConn)
	young := make(chan int)
	x.loop.post(func() {
		v, _ := unix.GetsockoptInt(x.sides[endpointSide].fd, unix.SOL_SOCKET, unix.SO_KEEPALIVE)
		x.alive = x.loop.now // as it is 77 s later
		x.expire()
		young <- v
	})
	if v := <-young; v != 0 {
		t.Errorf("SO_KEEPALIVE is %d from the beginning, which costs short connections four calls", v)
	}
	for _, o := range []struct {
		name          string
		level, option int
		want          int
	}{
		{"SO_KEEPALIVE", unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1},
		{"TCP_KEEPIDLE", unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, 77},
		{"TCP_NODELAY", unix.IPPROTO_TCP, unix.TCP_NODELAY, 1},
	} {
		for _, side := range []int{clientSide, endpointSide} {
			got := make(chan int)
			x.loop.post(func() {
				v, err := unix.GetsockoptInt(x.sides[side].fd, o.level, o.option)
				if err != nil {
					v = -1
				}
				got <- v
			})
			if v := <-got; v != o.want {
				t.Errorf("%s of side %d is %d, want %d", o.name, side, v, o.want)
			}
		}
	}
}

// A client that sends and reads nothing holds up neither its loop's others, nor
// itself for ever: what it is owed arrives whole when it reads.
func TestSlowReaderHoldsUpNobody(t *testing.T) {
	const size = 32 << 20
	flood := tcpEndpoint(t, func(c *net.TCPConn) {
		defer c.Close()
		b := make([]byte, 1<<16)
		for n := 0; n < size; n += len(b) {
			for i := range b {
				b[i] = byte((n + i) >> 8)
			}
			if _, err := c.Write(b); err != nil {
				return
			}
		}
	})
	s := start(t, Config{Loops: 1}, testPlan(testService{name: "s", eps: []netip.AddrPort{flood}}))
	var slow []*net.TCPConn
	for range 20 {
		slow = append(slow, connect(t, s))
	}
	fast := connect(t, s)
	checkFlood(t, fast, size)
	for _, c := range slow[:3] {
		checkFlood(t, c, size)
	}
}

func checkFlood(t *testing.T, c net.Conn, size int) {
	t.Helper()
	b := make([]byte, 1<<16)
	got := 0
	for {
		// A stall is what fails, not a slow machine.
		if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
			t.Fatal(err)
		}
		n, err := c.Read(b)
		for i, v := range b[:n] {
			if want := byte((got + i) >> 8); v != want {
				t.Fatalf("byte %d is %d, want %d", got+i, v, want)
			}
		}
		got += n
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatalf("after %d bytes: %v", got, err)
		}
	}
	if got != size {
		t.Errorf("got %d bytes, want %d", got, size)
	}
}

// An endpoint that speaks first gets to, though its client says nothing.
func TestEndpointSpeaksFirst(t *testing.T) {
	greeting := tcpEndpoint(t, func(c *net.TCPConn) {
		io.WriteString(c, "hello")
		c.Close()
	})
	s := start(t, Config{}, testPlan(testService{name: "s", eps: []netip.AddrPort{greeting}}))
	if data, end := readEnd(connect(t, s)); data != "hello" || end != "eof" {
		t.Errorf("client read %q, %s; want hello, eof", data, end)
	}
}

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
