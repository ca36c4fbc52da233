package userspace

import (
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// BenchmarkTCPBulk moves one stream through the relay, in writes of 1 MiB.
func BenchmarkTCPBulk(b *testing.B) {
	received := make(chan int64, 1)
	ep := tcpEndpoint(b, func(c *net.TCPConn) {
		n, _ := io.Copy(io.Discard, c)
		c.Close()
		received <- n
	})
	c := connect(b, start(b, Config{}, testPlan(testService{name: "s", eps: []netip.AddrPort{ep}})))
	data := make([]byte, 1<<20)
	b.SetBytes(int64(len(data)))
	for b.Loop() {
		if _, err := c.Write(data); err != nil {
			b.Fatal(err)
		}
	}
	c.CloseWrite()
	if n := <-received; n%int64(len(data)) != 0 {
		b.Errorf("endpoint received %d bytes", n)
	}
}

// BenchmarkTCPRequest sends a small request over an open connection and waits
// for the answer.
func BenchmarkTCPRequest(b *testing.B) {
	c := connect(b, start(b, Config{}, testPlan(testService{name: "s", eps: []netip.AddrPort{tcpEndpoint(b, echo)}})))
	message := make([]byte, 100)
	b.ReportAllocs()
	for b.Loop() {
		c.Write(message)
		if _, err := io.ReadFull(c, message); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkTCPConnection opens a connection, sends a request, waits for the
// answer and closes; "direct" is the same without a proxy.
func BenchmarkTCPConnection(b *testing.B) {
	ep := tcpEndpoint(b, echo)
	s := start(b, Config{}, testPlan(testService{name: "s", eps: []netip.AddrPort{ep}}))
	tcp, _ := s.Ports()
	for name, to := range map[string]netip.AddrPort{"direct": ep, "relayed": netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), tcp)} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			b.RunParallel(func(pb *testing.PB) {
				message := make([]byte, 100)
				for pb.Next() {
					c, err := net.DialTCP("tcp", nil, net.TCPAddrFromAddrPort(to))
					if err != nil {
						b.Fatal(err)
					}
					c.Write(message)
					if _, err := io.ReadFull(c, message); err != nil {
						b.Error(err)
					}
					c.SetLinger(0) // or the ports run out
					c.Close()
				}
			})
		})
	}
}

// BenchmarkUDPRequest sends a datagram of an open session and waits for the
// answer.
func BenchmarkUDPRequest(b *testing.B) {
	ep, _ := udpEndpoint(b, "")
	s := start(b, Config{Origin: newOrigins()}, testPlan(udpService(ep)))
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		c := udpClient(b, s)
		message := make([]byte, 100)
		udpAsk(b, c, "x")
		c.SetReadDeadline(time.Time{})
		for pb.Next() {
			c.Write(message)
			if _, err := c.Read(message); err != nil {
				b.Fatal(err)
			}
		}
	})
}

// BenchmarkUDPBulk sends datagrams of 1,400 bytes one way, 32 at a time.
func BenchmarkUDPBulk(b *testing.B) {
	const size, burst = 1400, 32
	ep := listening(b)
	c := udpClient(b, start(b, Config{Origin: newOrigins()}, testPlan(udpService(addrPort(ep.LocalAddr())))))
	message := make([]byte, size)
	c.Write(message)
	receiveSums(b, ep, 1)
	b.SetBytes(size * burst)
	b.ReportAllocs()
	for b.Loop() {
		for range burst {
			c.Write(message)
		}
		ep.SetReadDeadline(time.Now().Add(patience))
		for range burst {
			if _, _, err := ep.ReadFromUDPAddrPort(message); err != nil {
				b.Fatal(err)
			}
		}
	}
}

// BenchmarkUDPSession is BenchmarkUDPRequest with a new session each time.
func BenchmarkUDPSession(b *testing.B) {
	ep, _ := udpEndpoint(b, "")
	s := start(b, Config{Origin: newOrigins(), MaxSessions: 1000}, testPlan(udpService(ep)))
	b.ReportAllocs()
	for b.Loop() {
		_, port := s.Ports()
		c, err := net.DialUDP("udp4", nil, &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1), Port: int(port)})
		if err != nil {
			b.Fatal(err)
		}
		udpAsk(b, c, "x")
		c.Close()
		for _, f := range s.live.all() {
			f.kill()
		}
	}
}

// BenchmarkPrepare takes up a plan of 10,000 services of which one changed.
func BenchmarkPrepare(b *testing.B) {
	var ds []testService
	for i := range 10000 {
		a := netip.AddrFrom4([4]byte{10, 97, byte(i >> 8), byte(i)})
		ds = append(ds, testService{name: a.String(), vip: netip.AddrPortFrom(a, 80), eps: []netip.AddrPort{netip.AddrPortFrom(a, 1), netip.AddrPortFrom(a, 2)}})
	}
	s := New(Config{})
	p := testPlan(ds...)
	serve(s, p)
	changed := *p
	changed.Services = append(changed.Services[:0:0], p.Services...)
	one := *p.Services[5000]
	one.Groups[service.IPv4].Cluster = one.Groups[service.IPv4].Cluster[:1]
	changed.Services[5000] = &one
	b.ResetTimer()
	for b.Loop() {
		s.Prepare(&changed, plan.Delta{Changes: []plan.Change{{Was: p.Services[5000], Is: &one}}})
		s.Commit()
		s.Prepare(p, plan.Delta{Changes: []plan.Change{{Was: &one, Is: p.Services[5000]}}})
		s.Commit()
	}
}
