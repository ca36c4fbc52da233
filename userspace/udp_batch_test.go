package userspace

import (
	"crypto/sha256"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// sum is a datagram's size and checksum.
type sum struct {
	size int
	hash [sha256.Size]byte
}

func sumOf(b []byte) sum { return sum{len(b), sha256.Sum256(b)} }

// listening is a socket on loopback.
func listening(t testing.TB) *net.UDPConn {
	t.Helper()
	c, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	must(t, err)
	t.Cleanup(func() { c.Close() })
	return c
}

// receiveSums receives n datagrams; from is the sender of the last one.
func receiveSums(t testing.TB, c *net.UDPConn, n int) (got []sum, from netip.AddrPort) {
	t.Helper()
	b := make([]byte, datagramSize)
	c.SetReadDeadline(time.Now().Add(patience))
	for range n {
		size, a, err := c.ReadFromUDPAddrPort(b)
		if err != nil {
			t.Errorf("after %d datagrams of %d: %v", len(got), n, err)
			break
		}
		got, from = append(got, sumOf(b[:size])), a
	}
	return got, from
}

// window is how many bytes are on their way at a time: kernels' buffers hold
// 208 kB by default, and reckon small datagrams as larger.
const window = 70_000

// carry sends datagrams of sizes, as many at a time as buffers hold for certain, and
// expects to receive the same.
func carry(t testing.TB, sizes []int, send func([]byte) error, to *net.UDPConn) {
	t.Helper()
	random := rand.NewChaCha8([32]byte{1})
	for len(sizes) > 0 {
		var sent []sum
		for room := window; len(sizes) > 0 && len(sent) < 64 && (len(sent) == 0 || sizes[0] <= room); sizes = sizes[1:] {
			b := make([]byte, sizes[0])
			random.Read(b)
			sent = append(sent, sumOf(b))
			must(t, send(b))
			room -= len(b)
		}
		got, _ := receiveSums(t, to, len(sent))
		if diff := cmp.Diff(sent, got, cmp.AllowUnexported(sum{})); diff != "" {
			t.Fatalf("received (-want +got):\n%s", diff)
		}
	}
}

// Datagrams arrive as they were sent, each with its own bounds, and in order, in
// both directions, however they are batched on the way.
func TestUDPDatagramsKeepTheirBounds(t *testing.T) {
	mixed := rand.New(rand.NewPCG(1, 2))
	var random []int
	for range 400 {
		random = append(random, mixed.IntN(3000))
	}
	times := func(n int, sizes ...int) (out []int) {
		for range n {
			out = append(out, sizes...)
		}
		return out
	}
	tests := []struct {
		name  string
		mtu   string
		sizes []int
	}{
		{"equal", "65536", times(500, 1400)},
		{"the last of some is shorter", "65536", times(50, 1400, 1400, 1400, 200)},
		{"without bytes in between", "65536", times(50, 100, 0, 0, 100, 100, 0)},
		{"of any size", "65536", random},
		{"large", "65536", times(20, 65507, 60000, 1)},
		{"fit the MTU exactly", "1500", times(200, 1472)},
		{"larger than the MTU", "1500", times(200, 1473)},
		{"fragments", "1500", times(50, 8000, 8000, 1472, 10)},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			run(t, "ip", "link", "set", "lo", "mtu", tt.mtu)
			t.Cleanup(func() { run(t, "ip", "link", "set", "lo", "mtu", "65536") })
			ep := listening(t)
			s := start(t, Config{Origin: newOrigins()}, testPlan(udpService(addrPort(ep.LocalAddr()))))
			c := udpClient(t, s)
			c.Write([]byte("first"))
			_, proxy := receiveSums(t, ep, 1)
			carry(t, tt.sizes, func(b []byte) error { _, err := c.Write(b); return err }, ep)
			carry(t, tt.sizes, func(b []byte) error { _, err := ep.WriteToUDPAddrPort(b, proxy); return err }, c)
		})
	}
}

// A client and an endpoint that send many datagrams as one message (UDP_SEGMENT).
func TestUDPSegments(t *testing.T) {
	ep := listening(t)
	s := start(t, Config{Origin: newOrigins()}, testPlan(udpService(addrPort(ep.LocalAddr()))))
	c := udpClient(t, s)
	c.Write([]byte("first"))
	_, proxy := receiveSums(t, ep, 1)
	for _, tt := range []struct{ bytes, segment int }{{1400 * 40, 1400}, {1400*40 + 1, 1400}, {64, 1}, {2000, 1999}, {65000, 1100}} {
		data := make([]byte, tt.bytes)
		rand.NewChaCha8([32]byte{2}).Read(data)
		var want []sum
		for b := range slices.Chunk(data, tt.segment) {
			want = append(want, sumOf(b))
		}
		oob := appendSegmentSize(nil, tt.segment)
		_, _, err := c.WriteMsgUDPAddrPort(data, oob, netip.AddrPort{})
		must(t, err)
		got, _ := receiveSums(t, ep, len(want))
		if diff := cmp.Diff(want, got, cmp.AllowUnexported(sum{})); diff != "" {
			t.Errorf("endpoint received of %+v (-want +got):\n%s", tt, diff)
		}
		for range 3 {
			_, _, err = ep.WriteMsgUDPAddrPort(data, oob, proxy)
			must(t, err)
			got, _ = receiveSums(t, c, len(want))
			if diff := cmp.Diff(want, got, cmp.AllowUnexported(sum{})); diff != "" {
				t.Errorf("client received of %+v (-want +got):\n%s", tt, diff)
			}
		}
	}
}

// Sessions that end make room for others at once where descriptors are short, as
// long as theirs were single exchanges.
func TestUDPExchangesMakeRoom(t *testing.T) {
	ep, _ := udpEndpoint(t, "a")
	s := start(t, Config{Origin: newOrigins(), MaxSessions: 32, Loops: 1}, testPlan(udpService(ep)))
	for range 40 {
		for range 5 {
			udpAskOnce(t, udpClient(t, s), "x")
		}
		time.Sleep(spentAfter / 5)
	}
	if c := countersOf(s, udpKey()); c.Total != 200 || c.Active > 32 {
		t.Errorf("counters %+v, want 200 sessions, 32 at a time", c)
	}
	if used := s.Budget(unix.IPPROTO_UDP).Used; used > 32 {
		t.Errorf("%d descriptors in use, want 32 at most", used)
	}
}

// A socket that served one exchange serves another of its host after a silence,
// and no other host's; what comes for the first one meanwhile reaches no client.
func TestUDPSocketPool(t *testing.T) {
	ep := listening(t)
	d := udpService(addrPort(ep.LocalAddr()))
	d.port.IdleTimeout = time.Second
	s := start(t, Config{Origin: newOrigins(), Loops: 1}, testPlan(d))
	first, late := exchangeOnce(t, udpClient(t, s), ep), exchangeOnce(t, udpClient(t, s), ep)
	eventually(t, "the sessions have ended", func() bool { return sessionsOf(s) == 0 })
	ep.WriteToUDPAddrPort([]byte("late"), late)
	time.Sleep(trustFor + trustFor/4)
	if other := exchangeOnce(t, udpClientFrom(t, s, net.IPv4(127, 0, 0, 2)), ep); other == first || other == late {
		t.Errorf("the endpoint saw another host's session come from %s as well", other)
	}
	if second := exchangeOnce(t, udpClient(t, s), ep); first != second {
		t.Errorf("the endpoint saw %s, then %s", first, second)
	}
	if third := exchangeOnce(t, udpClient(t, s), ep); third == first || third == late {
		t.Errorf("the endpoint saw %s again", third)
	}
}

// exchangeOnce has a client ask an endpoint and get its answer, nothing else, and
// returns who asked as the endpoint sees it.
func exchangeOnce(t *testing.T, c, ep *net.UDPConn) netip.AddrPort {
	t.Helper()
	c.Write([]byte("question"))
	_, from := receiveSums(t, ep, 1)
	ep.WriteToUDPAddrPort([]byte("answer"), from)
	if got, _ := receiveSums(t, c, 1); len(got) != 1 || got[0] != sumOf([]byte("answer")) {
		t.Error("the client received what was another's")
	}
	return from
}

// What an endpoint still owes a client, or may go on telling it, reaches no other
// session of the same address, however late it comes: another host may be behind it.
func TestUDPLateAnswersStayTheirClients(t *testing.T) {
	t.Parallel()
	for name, first := range map[string]func(c, ep *net.UDPConn) netip.AddrPort{
		"unanswered": func(c, ep *net.UDPConn) netip.AddrPort {
			c.Write([]byte("question"))
			_, from := receiveSums(t, ep, 1)
			return from
		},
		"asked again": func(c, ep *net.UDPConn) netip.AddrPort {
			exchangeOnce(t, c, ep)
			c.Write([]byte("another"))
			_, from := receiveSums(t, ep, 1)
			return from
		},
		"a conversation": func(c, ep *net.UDPConn) netip.AddrPort {
			exchangeOnce(t, c, ep)
			return exchangeOnce(t, c, ep)
		},
		"told more": func(c, ep *net.UDPConn) netip.AddrPort {
			from := exchangeOnce(t, c, ep)
			ep.WriteToUDPAddrPort([]byte("more"), from)
			receiveSums(t, c, 1)
			return from
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ep := listening(t)
			s := start(t, Config{Origin: newOrigins(), Loops: 1}, testPlan(udpService(addrPort(ep.LocalAddr()))))
			from := first(udpClient(t, s), ep)
			everyPoller(s.workers, func(w *udpWorker) {
				for _, x := range w.sessions {
					x.end()
				}
			})
			time.Sleep(trustFor + trustFor/4)
			c := udpClient(t, s)
			c.Write([]byte("question"))
			_, second := receiveSums(t, ep, 1)
			ep.WriteToUDPAddrPort([]byte("late"), from)
			ep.WriteToUDPAddrPort([]byte("answer"), second)
			if got, _ := receiveSums(t, c, 1); len(got) != 1 || got[0] != sumOf([]byte("answer")) {
				t.Error("the client received what was another's")
			}
		})
	}
}

func TestSegments(t *testing.T) {
	tests := []struct {
		name  string
		sizes []int
		want  int
	}{
		{"one datagram", []int{100}, 1},
		{"one without bytes", []int{0, 0}, 1},
		{"nothing goes behind one without bytes", []int{0, 5}, 1},
		{"one without bytes goes behind none", []int{5, 0, 5}, 1},
		{"equal", []int{5, 5, 5}, 3},
		{"the last is shorter", []int{5, 5, 3, 5}, 3},
		{"the next is longer", []int{5, 5, 6}, 2},
		{"too many", slices.Repeat([]int{5}, 70), maxSegments},
		{"too many bytes", slices.Repeat([]int{1400}, 70), maxSegmented / 1400},
		{"the largest", slices.Repeat([]int{65507}, 3), 1},
	}
	for _, tt := range tests {
		var ds [][]byte
		for _, n := range tt.sizes {
			ds = append(ds, make([]byte, n))
		}
		if n := segments(ds); n != tt.want {
			t.Errorf("%s: %d, want %d", tt.name, n, tt.want)
		}
	}
}

// Cut up again, segments are the same datagrams.
func FuzzSegments(f *testing.F) {
	f.Add([]byte{5, 5, 3, 0, 5})
	f.Add(slices.Repeat([]byte{255}, 100))
	f.Fuzz(func(t *testing.T, plan []byte) {
		var ds [][]byte
		for _, n := range plan {
			ds = append(ds, make([]byte, int(n)*7))
		}
		for len(ds) > 0 {
			n, total := segments(ds), 0
			for i, d := range ds[:n] {
				if total += len(d); i < n-1 && len(d) != len(ds[0]) || len(d) > len(ds[0]) || n > 1 && len(d) == 0 {
					t.Fatalf("datagram %d of %d has %d bytes, the first %d", i, n, len(d), len(ds[0]))
				}
			}
			if n > maxSegments || n > 1 && total > maxSegmented {
				t.Fatalf("%d datagrams of %d bytes are one message", n, total)
			}
			ds = ds[n:]
		}
	})
}
