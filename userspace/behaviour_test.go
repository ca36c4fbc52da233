package userspace

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/pires/go-proxyproto"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// The endpoint learns the client's address and the one it connected to, and
// what follows is the client's own data, also when it is split in a buffer's
// worth and more.
func TestProxyProtocol(t *testing.T) {
	for _, version := range []service.ProxyProtocol{1, 2} {
		type seen struct {
			version byte
			from    netip.AddrPort
			to      netip.AddrPort
			data    string
		}
		got := make(chan seen, 1)
		ep := tcpEndpoint(t, func(c *net.TCPConn) {
			in := bufio.NewReader(c)
			h, err := proxyproto.Read(in)
			if err != nil {
				t.Error(err)
				c.Close()
				return
			}
			data, _ := io.ReadAll(in)
			got <- seen{h.Version, addrPort(h.SourceAddr), addrPort(h.DestinationAddr), string(data)}
			c.Close()
		})
		s := start(t, Config{}, testPlan(testService{name: "s", eps: []netip.AddrPort{ep}, port: service.Port{ProxyProtocol: version}}))
		c := connect(t, s)
		io.WriteString(c, "hello")
		c.CloseWrite()
		want := seen{byte(version), addrPort(c.LocalAddr()), vip, "hello"}
		if diff := cmp.Diff(want, <-got, cmp.AllowUnexported(seen{}), sameAddresses); diff != "" {
			t.Error(diff)
		}
	}
}

// A client keeps its endpoint, and moves for good when that fails.
func TestAffinity(t *testing.T) {
	stops := map[netip.AddrPort]func(){}
	names := map[string]netip.AddrPort{}
	var eps []netip.AddrPort
	for _, n := range []string{"a", "b", "c"} {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { l.Close() })
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				go named(n)(c.(*net.TCPConn))
			}
		}()
		ep := addrPort(l.Addr())
		eps, stops[ep], names[n+" x"] = append(eps, ep), func() { l.Close() }, ep
	}
	d := testService{name: "s", eps: eps, port: service.Port{Affinity: time.Hour}}
	s := start(t, Config{}, testPlan(d))
	first := ask(t, connect(t, s), "x")
	for range 5 {
		if got := ask(t, connect(t, s), "x"); got != first {
			t.Fatalf("client moved from %q to %q", first, got)
		}
	}
	stops[names[first]]()
	second := ask(t, connect(t, s), "x")
	if second == first {
		t.Fatal("the endpoint that was stopped answered")
	}
	for range 5 {
		if got := ask(t, connect(t, s), "x"); got != second {
			t.Fatalf("client moved on from %q to %q", second, got)
		}
	}
	for e := range s.Affinity(testServiceKey("s")).All(time.Now()) {
		if e.Endpoint != names[second] {
			t.Errorf("the table says %s, want %s", e.Endpoint, names[second])
		}
	}
	s.Affinity(testServiceKey("s")).Set(netip.MustParseAddr("127.0.0.1"), names[thirdOf(first, second)], time.Now())
	if got := ask(t, connect(t, s), "x"); got != thirdOf(first, second) {
		t.Errorf("a seeded client got %q", got)
	}
}

func thirdOf(first, second string) string {
	for _, n := range []string{"a x", "b x", "c x"} {
		if n != first && n != second {
			return n
		}
	}
	return ""
}

// Counters live as long as their service, not as long as a plan.
func TestCountersSurvivePlans(t *testing.T) {
	a, b := tcpEndpoint(t, named("a")), tcpEndpoint(t, named("b"))
	p := testPlan(testService{name: "s", eps: []netip.AddrPort{a}})
	s := start(t, Config{}, p)
	ask(t, connect(t, s), "x")
	for _, eps := range [][]netip.AddrPort{{a, b}, {b}, nil, {a}} {
		next := testPlan(testService{name: "s", eps: eps})
		serve(s, next)
	}
	var c Counters
	eventually(t, "the counters of one exchange", func() bool { // bytes are counted once they have been sent
		c = countersOf(s, testServiceKey("s"))
		return c.Active == 1 && c.Total == 1 && c.BytesIn == 2 && c.BytesOut == 4
	})
	traffic := map[service.Key]Counters{}
	s.Traffic(func(k service.Key, c Counters) { traffic[k] = c })
	if of := traffic[testServiceKey("s")]; of.Total != 1 || of.BytesOut != 4 || len(traffic) != 1 {
		t.Errorf("traffic %+v, want what the counters say", traffic)
	}
	if len(c.Endpoints) != 1 || c.Endpoints[0].Address != a || c.Endpoints[0].Active != 1 || c.Endpoints[0].BytesOut != 4 {
		t.Errorf("endpoints %+v, want the one that has a connection", c.Endpoints)
	}
}

func TestOnFirst(t *testing.T) {
	var mu sync.Mutex
	got := map[service.Key]int{}
	cfg := Config{OnFirst: func(k service.Key) {
		mu.Lock()
		got[k]++
		mu.Unlock()
	}}
	s := start(t, cfg, testPlan(testService{name: "s", eps: []netip.AddrPort{tcpEndpoint(t, named("a"))}}))
	for range 5 {
		ask(t, connect(t, s), "x")
	}
	mu.Lock()
	defer mu.Unlock()
	if diff := cmp.Diff(map[service.Key]int{testServiceKey("s"): 1}, got); diff != "" {
		t.Error(diff)
	}
}

func TestDrain(t *testing.T) {
	newServer := func(t *testing.T) (*Server, *net.TCPConn) {
		s := start(t, Config{}, testPlan(testService{name: "s", eps: []netip.AddrPort{tcpEndpoint(t, named("a"))}}))
		c := connect(t, s)
		ask(t, c, "x")
		return s, c
	}
	t.Run("waits for connections", func(t *testing.T) {
		s, c := newServer(t)
		drained := make(chan error, 1)
		go func() { drained <- s.Drain(context.Background()) }()
		eventually(t, "the listener is closed", func() bool {
			tcp, _ := s.Ports()
			x, err := tryDial(netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), tcp))
			if err == nil {
				x.Close()
			}
			return err != nil
		})
		if got := ask(t, c, "y"); got != "a y" {
			t.Errorf("answer %q while draining", got)
		}
		select {
		case err := <-drained:
			t.Errorf("Drain() = %v with a connection left", err)
		default:
		}
		c.Close()
		if err := <-drained; err != nil {
			t.Errorf("Drain() = %v", err)
		}
	})
	t.Run("is bounded", func(t *testing.T) {
		s, c := newServer(t)
		ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
		defer cancel()
		if err := s.Drain(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Drain() = %v", err)
		}
		if _, end := readEnd(c); end != "reset" {
			t.Errorf("the connection that was left ended with %s, want a reset", end)
		}
		if n := len(s.Connections()); n != 0 {
			t.Errorf("%d connections left", n)
		}
	})
	t.Run("ends silent sessions", func(t *testing.T) {
		ep, _ := udpEndpoint(t, "a")
		s := start(t, Config{Origin: newOrigins()}, testPlan(udpService(ep)))
		udpAsk(t, udpClient(t, s), "x")
		if err := s.Drain(context.Background()); err != nil {
			t.Errorf("Drain() = %v", err)
		}
	})
	t.Run("doesn't wait for sessions that are never silent", func(t *testing.T) {
		ep, _ := udpEndpoint(t, "a")
		s := start(t, Config{Origin: newOrigins()}, testPlan(udpService(ep)))
		c := udpClient(t, s)
		udpAsk(t, c, "x")
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		var asks sync.WaitGroup
		defer asks.Wait()
		defer c.Close()
		asks.Go(func() {
			for range time.Tick(50 * time.Millisecond) {
				if _, err := c.Write([]byte("x")); errors.Is(err, net.ErrClosed) {
					return
				}
			}
		})
		if err := s.Drain(ctx); err != nil {
			t.Errorf("Drain() = %v", err)
		}
	})
	t.Run("of a server that never ran", func(t *testing.T) {
		s := New(Config{})
		if err := s.Drain(context.Background()); err != nil {
			t.Errorf("Drain() = %v", err)
		}
	})
}

// A dial that hangs doesn't hold the end up.
func TestDrainWhileDialing(t *testing.T) {
	s := start(t, Config{ConnectTimeout: time.Hour, ConnectTotal: time.Hour}, testPlan(testService{name: "s", eps: []netip.AddrPort{hanging(t)}}))
	c := connect(t, s)
	eventually(t, "it's in the table", func() bool { return len(s.Connections()) == 1 })
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	s.Drain(ctx)
	if _, end := readEnd(c); end != "reset" {
		t.Errorf("client read %s", end)
	}
}

// Local and Cluster groups have pickers of their own, found by what the plan
// returns for a client.
func TestGroups(t *testing.T) {
	local, far := tcpEndpoint(t, named("local")), tcpEndpoint(t, named("far"))
	p := testPlan(testService{name: "s", eps: []netip.AddrPort{local, far}, front: func(f *plan.Frontend) { f.Local = true }})
	g := &p.Services[0].Groups[service.IPv4]
	g.Local = g.Cluster[:1:1]
	s := start(t, Config{}, p)
	for range 4 {
		if got := ask(t, connect(t, s), "x"); got != "local x" {
			t.Errorf("answer %q", got)
		}
	}
}

func TestPortInUse(t *testing.T) {
	l, err := net.Listen("tcp", "0.0.0.0:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	s := New(Config{TCPPort: addrPort(l.Addr()).Port()})
	if err := s.Listen(); err == nil {
		t.Error("Listen() succeeded on a port that is taken")
	}
}

func TestSamePortInBothFamilies(t *testing.T) {
	s := start(t, Config{Origin: newOrigins()}, testPlan())
	if len(s.tcp) != 2 || len(s.udp) != 2 || s.tcp[0].port != s.tcp[1].port || s.udp[0].port != s.udp[1].port {
		t.Errorf("listeners %v and %v", s.tcp, s.udp)
	}
}

// Clients that the kernel's data planes gave an endpoint lose it with the endpoint,
// though nobody of the service's clients was ever in userspace, and though its
// affinity was switched on later.
func TestAffinityOfClientsElsewhere(t *testing.T) {
	s := New(Config{})
	first, second := netip.MustParseAddrPort("10.2.0.2:80"), netip.MustParseAddrPort("10.2.0.3:80")
	client, other := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")
	d := testService{name: "s", eps: []netip.AddrPort{first, second}}
	serve(s, testPlan(d))
	d.port.Affinity = time.Hour
	serve(s, testPlan(d))
	a := s.Affinity(testServiceKey("s"))
	a.Set(client, first, time.Now())
	a.Set(other, second, time.Now())
	d.eps = d.eps[1:]
	serve(s, testPlan(d))
	d.eps = []netip.AddrPort{first, second}
	serve(s, testPlan(d))
	if at, ok := a.Peek(client, time.Now()); ok {
		t.Errorf("the client of an endpoint that went stays with %s", at)
	}
	if at, _ := a.Peek(other, time.Now()); at != second {
		t.Errorf("the client of the other endpoint stays with %s, want %s", at, second)
	}
}

// TestAffinityOfAnotherTimeout: clients keep their endpoints when the time-out is edited, for as long as the new one says.
func TestAffinityOfAnotherTimeout(t *testing.T) {
	s := New(Config{})
	d := testService{name: "s", eps: []netip.AddrPort{netip.MustParseAddrPort("10.2.0.2:80")}, port: service.Port{Affinity: time.Hour}}
	serve(s, testPlan(d))
	client, began := netip.MustParseAddr("192.0.2.1"), time.Now()
	s.Affinity(testServiceKey("s")).Set(client, d.eps[0], began)
	for _, timeout := range []time.Duration{2 * time.Hour, time.Minute} {
		d.port.Affinity = timeout
		serve(s, testPlan(d))
		for after, want := range map[time.Duration]bool{timeout - time.Second: true, timeout + time.Second: false} {
			left := 0
			for range s.Affinity(testServiceKey("s")).All(began.Add(after)) {
				left++
			}
			if (left == 1) != want {
				t.Errorf("%s after its connection, with a time-out of %s, %d clients have an endpoint", after, timeout, left)
			}
		}
	}
}
