package userspace

import (
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"
	"unsafe"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// TestEnds: each connection is told of once when it is over, with how it ended, and what no endpoint took with the reason.
func TestEnds(t *testing.T) {
	good := func(t testing.TB) []netip.AddrPort {
		return []netip.AddrPort{tcpEndpoint(t, func(c *net.TCPConn) { io.WriteString(c, "good"); c.Close() })}
	}
	bad := func(t testing.TB) []netip.AddrPort { return []netip.AddrPort{refusing(t), refusing(t)} }
	none := func(testing.TB) []netip.AddrPort { return nil }
	var read chan struct{} // closed once the client has four bytes
	for _, tt := range []struct {
		name  string
		eps   func(testing.TB) []netip.AddrPort
		front func(*plan.Frontend)
		orig  netip.AddrPort
		want  string // outcome, bytes to the client; reason
	}{
		{name: "served", eps: good, want: "test/s served 4"},
		{name: "reset", eps: func(t testing.TB) []netip.AddrPort {
			read := read
			return []netip.AddrPort{tcpEndpoint(t, func(c *net.TCPConn) {
				io.WriteString(c, "half")
				select {
				case <-read: // a reset overtakes what the proxy hasn't read
				case <-t.Context().Done():
				}
				c.SetLinger(0)
				c.Close()
			})}
		}, want: "test/s reset 4"},
		{name: "refused by all", eps: bad, want: "test/s refused 0: none of 2 endpoints tried took it; the last one: connection refused"},
		{name: "no endpoint", eps: none, front: func(f *plan.Frontend) { f.Verdict = plan.Reject }, want: "test/s refused 0: no endpoint can take it"},
		{name: "outside the source ranges", eps: good, front: func(f *plan.Frontend) { f.SourceRanges = []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")} }, want: "test/s refused 0: the client is outside the service's source ranges"},
		{name: "no service", eps: good, orig: netip.MustParseAddrPort("10.96.0.1:81"), want: "/ refused 0: there is no service at this address"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var mu sync.Mutex // loops tell, the test reads
			var ends []End
			cfg := Config{OnEnd: func(e End) { mu.Lock(); ends = append(ends, e); mu.Unlock() }}
			if tt.orig.IsValid() {
				cfg.TCPOrigin = func(int, service.Family) (netip.AddrPort, error) { return tt.orig, nil }
			}
			read = make(chan struct{})
			s := start(t, cfg, testPlan(testService{name: "s", eps: tt.eps(t), front: tt.front, port: service.Port{Retries: 1}}))
			tcp, _ := s.Ports()
			var client netip.AddrPort
			// A client that is refused at once may hear of it while it connects.
			if c, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", tcp)); err == nil {
				client = addrPort(c.LocalAddr())
				if _, err := io.ReadFull(c, make([]byte, 4)); err == nil {
					close(read)
				}
				_, _ = io.Copy(io.Discard, c)
				c.Close()
			}
			eventually(t, "its end is told", func() bool { mu.Lock(); defer mu.Unlock(); return len(ends) > 0 })
			mu.Lock()
			defer mu.Unlock()
			if len(ends) != 1 {
				t.Fatalf("%d ends of one connection", len(ends))
			}
			e := ends[0]
			outcome, why := "served", ""
			if e.Reset {
				outcome = "reset"
			}
			if e.Refused != nil {
				outcome, why = "refused", ": "+e.Refused.Error()
			}
			if got := fmt.Sprintf("%s %s %d%s", e.Service, outcome, e.BytesOut, why); !strings.HasPrefix(got, tt.want) {
				t.Errorf("%q, want %q", got, tt.want)
			}
			if client.IsValid() && e.Client != client {
				t.Errorf("client %s, want %s", e.Client, client)
			}
		})
	}
}

// TestUDPEnds: the same of sessions.
func TestUDPEnds(t *testing.T) {
	ep, _ := udpEndpoint(t, "a")
	o := newOrigins()
	ends := make(chan End, 8)
	s := start(t, Config{Origin: o, UDPIdleTimeout: 50 * time.Millisecond, OnEnd: func(e End) { ends <- e }}, testPlan(udpService(ep)))
	c := udpClient(t, s)
	o.set(addrPort(c.LocalAddr()), vip)
	c.Write([]byte("x"))
	select {
	case e := <-ends:
		if e.Refused != nil || e.Service != udpKey() || e.Endpoint != ep || e.BytesIn != 1 {
			t.Errorf("%+v", e)
		}
	case <-time.After(patience):
		t.Error("its end wasn't told")
	}
}

// TestUDPEndpointGoneIsNoRefusal: a session that had answers isn't one that was refused when its last endpoint goes.
func TestUDPEndpointGoneIsNoRefusal(t *testing.T) {
	ep, stop := udpEndpoint(t, "a")
	o := newOrigins()
	ends := make(chan End, 8)
	s := start(t, Config{Origin: o, OnEnd: func(e End) { ends <- e }}, testPlan(udpService(ep)))
	c := udpClient(t, s)
	o.set(addrPort(c.LocalAddr()), vip)
	udpAsk(t, c, "x")
	leaving := testPlan(udpService(ep)) // keeps what it has, and gets nothing new
	leaving.Services[0].Groups[service.IPv4].Cluster = nil
	serve(s, leaving)
	stop()
	eventually(t, "the session's end", func() bool {
		c.Write([]byte("y")) // until the answer that the port is closed has come
		select {
		case e := <-ends:
			if e.Refused != nil || !e.Reset || e.BytesOut == 0 {
				t.Errorf("refused %v, reset %v, %d bytes to the client", e.Refused, e.Reset, e.BytesOut)
			}
			return true
		case <-time.After(10 * time.Millisecond):
			return false
		}
	})
}

// TestKilledWhileDialingIsNoRefusal: a connection that is killed before an endpoint has answered isn't one that no endpoint took.
func TestKilledWhileDialingIsNoRefusal(t *testing.T) {
	ends := make(chan End, 8)
	s := start(t, Config{ConnectTimeout: time.Hour, ConnectTotal: time.Hour, OnEnd: func(e End) { ends <- e }}, testPlan(testService{name: "s", eps: []netip.AddrPort{hanging(t)}}))
	connect(t, s)
	eventually(t, "the connection", func() bool { return len(s.live.all()) > 0 })
	for _, f := range s.live.all() {
		f.kill()
	}
	select {
	case e := <-ends:
		if e.Refused != nil || !e.Reset {
			t.Errorf("refused %v, reset %v", e.Refused, e.Reset)
		}
	case <-time.After(patience):
		t.Error("its end wasn't told")
	}
}

// TestConnectTimesTakeRoomWhenThereAreSome: of ten thousand endpoints most may never be connected to.
func TestConnectTimesTakeRoomWhenThereAreSome(t *testing.T) {
	var c connectTimes
	if size := unsafe.Sizeof(c); size > 8 {
		t.Errorf("an endpoint without connects takes %d bytes for their times", size)
	}
}

func TestConnectTimes(t *testing.T) {
	ep := tcpEndpoint(t, named("a"))
	s := start(t, Config{}, testPlan(testService{name: "s", eps: []netip.AddrPort{ep, refusing(t)}}))
	k := testServiceKey("s")
	if got := s.ConnectTimes(k); len(got) != 0 {
		t.Errorf("before any connect: %v", got)
	}
	for range 3 {
		ask(t, connect(t, s), "hi")
	}
	got := s.ConnectTimes(k)
	if len(got) != 1 || got[0].Endpoint != ep || got[0].Connects != 3 || got[0].MedianSeconds <= 0 || got[0].MaxSeconds < got[0].MedianSeconds {
		t.Errorf("%+v", got)
	}
	var c connectTimes
	for i := range 200 { // the last 64 of them
		c.add(time.Duration(i+1) * time.Millisecond)
	}
	if got, want := c.summary(ep), (plan.ConnectTime{Endpoint: ep, Connects: 64, MedianSeconds: 0.169, MaxSeconds: 0.2}); got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
}
