package userspace

import (
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// What connections may hold is known too where the network namespace has no net.ipv4.tcp_mem, as tests' and labs' don't.
func TestMemoryIsBoundedInEveryNamespace(t *testing.T) {
	var host unix.Sysinfo_t
	if err := unix.Sysinfo(&host); err != nil {
		t.Fatal(err)
	}
	s := &Server{cfg: Config{Logger: slog.New(slog.DiscardHandler)}}
	all := int(uint64(host.Totalram) * uint64(host.Unit))
	if got := s.memoryBound(); got < all/64 || got > all/16 {
		t.Errorf("%d bytes of %d, want about a 32nd", got, all)
	}
}

func TestChooseVictims(t *testing.T) {
	web, dns := &serviceState{}, &serviceState{}
	address := func(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}) }
	var crowd []holding // hundred clients of each service, two connections each
	for i := range 400 {
		crowd = append(crowd, holding{weight: 1, client: address(i / 2), service: []*serviceState{web, dns}[i%2], active: int64(i)})
	}
	hoard := func(n int, client func(i int) int, s *serviceState) []holding {
		out := slices.Clone(crowd)
		for i := range n {
			out = append(out, holding{weight: 1, client: address(client(i)), service: s, active: int64(1000 - i)})
		}
		return out
	}
	one := func(int) int { return 1000 }
	anybody := func(*holding, share) int { return 0 }
	greedyOnly := func(_ *holding, is share) int { return int(is) - int(serviceOver) }
	tests := []struct {
		name string
		hs   []holding
		want int
		rank func(*holding, share) int
		out  map[string]int // by client or "crowd", and reason
	}{
		{"nobody", nil, 5, anybody, map[string]int{}},
		{"nobody holds much", crowd, 5, anybody, map[string]int{"crowd idle": 5}},
		{"one client", hoard(50, one, web), 5, greedyOnly, map[string]int{"10.0.3.232 client_share": 5}},
		{"as far as its share", hoard(50, one, web), 500, greedyOnly, map[string]int{"10.0.3.232 client_share": 42}},
		{"the one that holds most", hoard(70, func(i int) int { return 1000 + i%7/5 }, web), 5, greedyOnly, map[string]int{"10.0.3.232 client_share": 5}},
		{"two clients", hoard(70, func(i int) int { return 1000 + i%2 }, web), 10, greedyOnly, map[string]int{"10.0.3.232 client_share": 5, "10.0.3.233 client_share": 5}},
		{"one service", hoard(300, func(i int) int { return 1000 + i }, web), 7, greedyOnly, map[string]int{"crowd service_share": 7}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got := map[string]int{}
			for _, v := range chooseVictims(tt.hs, tt.want, shareLeast, true, tt.rank) {
				who := "crowd"
				if v.client.Compare(address(1000)) >= 0 && tt.name != "one service" {
					who = v.client.String()
				}
				if tt.name == "one service" && v.service != web {
					t.Errorf("%v of another service gave way", v.client)
				}
				got[who+" "+plan.ShedReasons[v.reason]]++
			}
			if diff := cmp.Diff(tt.out, got); diff != "" {
				t.Error(diff)
			}
		})
	}
	t.Run("lowest rank first, then the longest silent", func(t *testing.T) {
		hs := []holding{{weight: 1, active: 1}, {weight: 1, active: 2, reset: true}, {weight: 1, active: 4}, {weight: 1, active: 3, reset: true}}
		var got []int64
		for _, v := range chooseVictims(hs, 3, shareLeast, true, func(h *holding, _ share) int {
			if h.reset {
				return 0
			}
			return 1
		}) {
			got = append(got, v.active)
		}
		if diff := cmp.Diff([]int64{2, 3, 1}, got); diff != "" {
			t.Error(diff)
		}
	})
}

// Where descriptors are short, who holds most gives way, and a hundred others lose nothing: neither a connection
// that they have, however long it is silent, nor a new one.
func TestGreedBesideAHundred(t *testing.T) {
	const hundred = 100
	if limit, err := raiseFDs(); err != nil || limit < 4096 {
		t.Skipf("needs 4096 file descriptors, may have %d (%v)", limit, err)
	}
	var origins [2]netip.AddrPort
	origins[0], origins[1] = vip, netip.MustParseAddrPort("10.96.0.2:80")
	tests := []struct {
		name   string
		from   func(i int) net.IP // of the greedy connections
		to     int                // their service
		busy   bool               // they are never silent
		reason shedReason
	}{
		{"a silent client", func(int) net.IP { return net.IPv4(127, 1, 0, 1) }, 0, false, shedClient},
		{"a busy client", func(int) net.IP { return net.IPv4(127, 1, 0, 1) }, 0, true, shedClient},
		{"many clients of a hung service", func(i int) net.IP { return net.IPv4(127, 1, byte(i>>8), byte(i)) }, 1, false, shedService},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			hung := tcpEndpoint(t, func(c *net.TCPConn) {})
			services := []testService{
				{name: "within", eps: []netip.AddrPort{tcpEndpoint(t, named("a"))}},
				{name: "greedy", vip: origins[1], eps: []netip.AddrPort{hung}},
			}
			s := start(t, Config{MaxFDs: 1024, TCPOrigin: func(fd int, _ service.Family) (netip.AddrPort, error) {
				peer, err := unix.Getpeername(fd)
				if from, ok := peer.(*unix.SockaddrInet4); ok && from.Addr[1] == 1 {
					return origins[tt.to], err
				}
				return origins[0], err
			}}, testPlan(services...))
			var kept []*net.TCPConn
			for i := range hundred {
				c := connectFrom(t, s, net.IPv4(127, 0, 1, byte(i+1)))
				ask(t, c, "x")
				kept = append(kept, c)
			}
			room := divide(1024).tcp / fdsPerConnection
			for i := range 2 * room {
				c := connectFrom(t, s, tt.from(i))
				if tt.busy {
					go trickle(c)
				}
			}
			eventually(t, "descriptors are short", func() bool { return slices.Contains(s.Exhausted(), plan.Descriptors) })
			for i := range hundred {
				c := connectFrom(t, s, net.IPv4(127, 0, 1, byte(i+1)))
				if got := ask(t, c, "new"); got != "a new" {
					t.Fatalf("a new connection got %q", got)
				}
				c.Close()
			}
			for _, c := range kept {
				if got := ask(t, c, "old"); got != "a old" {
					t.Fatalf("an old connection got %q", got)
				}
			}
			for r, n := range s.Shed(service.TCP) {
				if want := r == int(tt.reason); want != (n > 0) {
					t.Errorf("%d gave way: %s", n, plan.ShedReasons[r])
				}
			}
		})
	}
}

// trickle lets a connection never be silent.
func trickle(c net.Conn) {
	for {
		if _, err := c.Write([]byte(strings.Repeat("x", 8))); err != nil {
			return
		}
		time.Sleep(100 * time.Millisecond)
	}
}

// connectFrom is connect from one of the loopback addresses.
func connectFrom(t testing.TB, s *Server, from net.IP) *net.TCPConn {
	t.Helper()
	tcp, _ := s.Ports()
	d := net.Dialer{Timeout: patience, LocalAddr: &net.TCPAddr{IP: from}}
	c, err := d.Dial("tcp4", fmt.Sprintf("127.0.0.1:%d", tcp))
	must(t, err)
	t.Cleanup(func() { c.Close() })
	must(t, c.SetDeadline(time.Now().Add(lifetime)))
	return c.(*net.TCPConn)
}

// Where sockets hold too much memory, those who hold most give way: clients that don't read what they asked for, or
// too slowly, and those who send what an endpoint doesn't read. A hundred others lose nothing.
func TestMemoryBesideAHundred(t *testing.T) {
	const hundred, greedy, bound = 100, 64, 16 << 20
	flooded := netip.MustParseAddrPort("10.96.0.2:80")
	block := make([]byte, 1<<16)
	flood := func(c *net.TCPConn) {
		defer c.Close()
		for {
			if _, err := c.Write(block); err != nil {
				return
			}
		}
	}
	one, many := func(int) net.IP { return net.IPv4(127, 1, 0, 1) }, func(i int) net.IP { return net.IPv4(127, 1, 0, byte(i+1)) }
	sip := func(c *net.TCPConn) { // a byte at a time, so that it is never silent
		for b := make([]byte, 1); ; time.Sleep(100 * time.Millisecond) {
			if _, err := c.Read(b); err != nil {
				return
			}
		}
	}
	tests := []struct {
		name     string
		from     func(i int) net.IP
		endpoint func(*net.TCPConn)
		client   func(*net.TCPConn)
	}{
		{"a client that doesn't read", one, flood, func(*net.TCPConn) {}},
		{"a client that reads slowly", one, flood, sip},
		{"a client that sends what isn't read", one, func(*net.TCPConn) {}, flood},
		{"many clients that read slowly", many, flood, sip},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			services := []testService{
				{name: "within", eps: []netip.AddrPort{tcpEndpoint(t, named("a"))}},
				{name: "flooded", vip: flooded, eps: []netip.AddrPort{tcpEndpoint(t, tt.endpoint)}},
			}
			s := start(t, Config{MaxSocketMemory: bound, TCPOrigin: func(fd int, _ service.Family) (netip.AddrPort, error) {
				peer, err := unix.Getpeername(fd)
				if from, ok := peer.(*unix.SockaddrInet4); ok && from.Addr[1] == 1 {
					return flooded, err
				}
				return vip, err
			}}, testPlan(services...))
			var kept []*net.TCPConn
			for i := range hundred {
				c := connectFrom(t, s, net.IPv4(127, 0, 1, byte(i+1)))
				ask(t, c, strings.Repeat("x", 50000)) // it has carried something as well
				kept = append(kept, c)
			}
			for i := range greedy {
				go tt.client(connectFrom(t, s, tt.from(i)))
			}
			held := func() (n int) {
				for _, h := range s.connections((*tcpConn).memory) {
					n += h.weight
				}
				return n
			}
			eventually(t, "memory to be short", func() bool { return slices.Contains(s.Exhausted(), plan.Memory) })
			eventually(t, "sockets to hold less than the bound", func() bool { return s.Shed(service.TCP)[shedClient] > 0 && held() <= bound })
			for _, c := range kept {
				if got := ask(t, c, "old"); got != "a old" {
					t.Fatalf("a connection got %q", got)
				}
			}
			for r, n := range s.Shed(service.TCP) {
				if r != int(shedClient) && n > 0 {
					t.Errorf("%d gave way: %s", n, plan.ShedReasons[r])
				}
			}
		})
	}
}
