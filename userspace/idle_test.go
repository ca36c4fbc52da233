package userspace

import (
	"bufio"
	"io"
	"net"
	"net/netip"
	"runtime"
	"testing"
	"time"
)

// A connection that is idle has its two sockets and nothing else: no goroutine, pipe or
// buffer, whatever it has carried before.
func TestIdleConnectionsHoldSocketsOnly(t *testing.T) {
	const clients, size = 100, 64 * copySize
	s := start(t, Config{Loops: 1}, testPlan(testService{name: "s", eps: []netip.AddrPort{floodingInTurn(t, size)}}))
	carry := func() {
		c := connect(t, s)
		for range 3 { // small messages and bulk
			if _, err := io.WriteString(c, "x\n"); err != nil {
				t.Fatal(err)
			}
			if _, err := io.CopyN(io.Discard, c, size); err != nil {
				t.Fatal(err)
			}
		}
	}
	carry() // what is opened once is open
	goroutines, files := runtime.NumGoroutine(), openFiles(t)
	for range clients {
		carry()
	}
	eventually(t, "goroutines to be no more than before", func() bool { return runtime.NumGoroutine() <= goroutines })
	// The client's socket, kproxy's two, and the endpoint's; the loop may have made a ring.
	eventually(t, "descriptors to be sockets only", func() bool { return openFiles(t) <= files+4*clients+1 })
	eventually(t, "connections to hold neither pipes nor buffers", func() bool {
		seen, idle := 0, 0
		everyPoller(s.loops, func(l *loop) {
			for _, x := range l.conns.items {
				if x == nil {
					continue
				}
				seen++
				if holdsNothing(&x.pumps[0]) && holdsNothing(&x.pumps[1]) {
					idle++
				}
			}
		})
		if seen != clients+1 {
			t.Fatalf("%d connections, want %d", seen, clients+1)
		}
		return idle == seen
	})
}

func holdsNothing(p *pump) bool { return !p.piped && p.buf == nil && p.pending == 0 }

// floodingInTurn is an endpoint of one goroutine, which answers lines with size
// bytes, three on each connection, and then goes on with the next one.
func floodingInTurn(t *testing.T, size int) netip.AddrPort {
	t.Helper()
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	must(t, err)
	t.Cleanup(func() { l.Close() })
	go func() {
		answer := make([]byte, size)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			t.Cleanup(func() { c.Close() })
			in := bufio.NewReader(c)
			for range 3 {
				if _, err := in.ReadString('\n'); err != nil {
					return
				}
				if _, err := c.Write(answer); err != nil {
					return
				}
			}
		}
	}()
	return addrPort(l.Addr())
}

// Datagrams of a session that is there are forwarded both ways without an allocation,
// one at a time or in bulk.
func TestDatagramsAreNotAllocated(t *testing.T) {
	const rounds, burst = 300, batchSize + batchSize/2
	ep, _ := udpEndpoint(t, "") // which doesn't allocate either
	s := start(t, Config{Origin: newOrigins(), Loops: 1}, testPlan(udpService(ep)))
	c := udpClient(t, s)
	message := make([]byte, 100)
	exchange := func(at int) {
		c.SetReadDeadline(time.Now().Add(patience))
		for range at {
			if _, err := c.Write(message); err != nil {
				t.Fatal(err)
			}
		}
		for range at {
			if _, err := c.Read(message); err != nil {
				t.Fatal(err)
			}
		}
	}
	udpAsk(t, c, "x")
	for _, at := range []int{1, burst} {
		for range 50 { // until all that grows has grown
			exchange(at)
		}
		// It leaves out fractions, so what else the process does doesn't count.
		if n := testing.AllocsPerRun(rounds, func() { exchange(at) }); n > 0 {
			t.Errorf("%.0f allocations for %d datagrams", n, at)
		}
	}
}

// Nor is the list of those who had more to receive than one turn does.
func TestAnotherTurnIsNotAllocated(t *testing.T) {
	var w udpWorker
	us := make([]*upstream, 10)
	for i := range us {
		us[i] = &upstream{fd: -1} // has nothing
	}
	turn := func() {
		for _, u := range us {
			u.queued = true
			w.readable = append(w.readable, u)
		}
		w.resume()
	}
	for range 2 { // the lists grow
		turn()
	}
	if n := testing.AllocsPerRun(100, turn); n > 0 {
		t.Errorf("%.0f allocations for another turn", n)
	}
	if us[0].queued || len(w.readable) > 0 {
		t.Error("it had no turn")
	}
}
