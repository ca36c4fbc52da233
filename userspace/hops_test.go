package userspace

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/service"
)

// loopbackOf returns the address at which tests of a family meet.
func loopbackOf(f service.Family) netip.Addr {
	if f == service.IPv6 {
		return netip.IPv6Loopback()
	}
	return netip.MustParseAddr("127.0.0.1")
}

// serviceOf describes a service of a family, at an address of its own.
func serviceOf(p service.Protocol, f service.Family, eps ...netip.AddrPort) testService {
	return testService{name: "s" + f.String(), proto: p, vip: serviceAddress(f, 1), eps: eps}
}

// serveEach runs a Server for the services, each of which gets what comes in its family.
func serveEach(t *testing.T, services func(tcp, udp uint16) []testService) *Server {
	o := familyOrigins{}
	s := start(t, Config{Origin: o, TCPOrigin: func(_ int, f service.Family) (netip.AddrPort, error) { return serviceAddress(f, 1), nil }}, nil)
	tcp, udp := s.Ports()
	serve(s, testPlan(services(tcp, udp)...))
	return s
}

// familyOrigins says that all flows of a family were headed to one service.
type familyOrigins struct{}

func (familyOrigins) LookupAll(_ service.Protocol, flows [][2]netip.AddrPort, found func(i int, orig, client netip.AddrPort, err error)) {
	for i, f := range flows {
		found(i, serviceAddress(service.FamilyOf(f[0].Addr()), 1), f[1], nil)
	}
}

// dialWith connects to a port of the Server's with a TTL.
func dialWith(t *testing.T, network string, f service.Family, port uint16, hops int) net.Conn {
	t.Helper()
	c, err := tryDialWith(t, network, f, port, hops)
	must(t, err)
	return c
}

func tryDialWith(t *testing.T, network string, f service.Family, port uint16, hops int) (net.Conn, error) {
	d := net.Dialer{Timeout: patience, Control: func(_, _ string, c syscall.RawConn) error {
		return setHops(c, f, hops)
	}}
	c, err := d.DialContext(context.Background(), network, netip.AddrPortFrom(loopbackOf(f), port).String())
	if err == nil {
		t.Cleanup(func() { c.Close() })
		c.SetDeadline(time.Now().Add(patience))
	}
	return c, err
}

func setHops(c syscall.RawConn, f service.Family, hops int) (err error) {
	level := (&socketKey{to: netip.AddrPortFrom(loopbackOf(f), 1)}).level()
	c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), level, unicastHops(level), hops) })
	return err
}

// The endpoint's packets have the TTL of the client's less one, also when it changes within a session.
func TestEndpointsSeeTheClientsTTLLessOne(t *testing.T) {
	for _, f := range service.Families {
		tcp := endpointAt(t, netip.AddrPortFrom(loopbackOf(f), 0).String(), func(c *net.TCPConn) {
			defer c.Close()
			raw, _ := c.SyscallConn()
			raw.Control(func(fd uintptr) { fmt.Fprint(c, hopsOf(int(fd), f)) })
		})
		udp := tellingHops(t, f)
		s := serveEach(t, func(uint16, uint16) []testService {
			return []testService{serviceOf(service.TCP, f, tcp), serviceOf(service.UDP, f, udp)}
		})
		tcpPort, udpPort := s.Ports()
		for _, hops := range []int{2, 40, 64, 255} {
			if got, _ := readEnd(dialWith(t, "tcp", f, tcpPort, hops)); got != strconv.Itoa(hops-1) {
				t.Errorf("%s: endpoint of TCP sees %s of %d", f, got, hops)
			}
		}
		c := dialWith(t, "udp", f, udpPort, 64).(*net.UDPConn)
		for _, hops := range []int{64, 40, 41, 2} {
			raw, _ := c.SyscallConn()
			must(t, setHops(raw, f, hops))
			if got := udpAsk(t, c, "x"); got != strconv.Itoa(hops-1) {
				t.Errorf("%s: endpoint of UDP sees %s of %d", f, got, hops)
			}
		}
	}
}

// tellingHops answers each datagram with its TTL.
func tellingHops(t *testing.T, f service.Family) netip.AddrPort {
	c, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(loopbackOf(f), 0)))
	must(t, err)
	t.Cleanup(func() { c.Close() })
	raw, err := c.SyscallConn()
	must(t, err)
	raw.Control(func(fd uintptr) { err = failure(tellHops(int(fd), f)) })
	must(t, err)
	go func() {
		b, oob := make([]byte, 100), make([]byte, controlSize)
		for {
			_, n, _, from, err := c.ReadMsgUDPAddrPort(b, oob)
			if err != nil {
				return
			}
			_, hops := findPacketInfo(oob[:n])
			fmt.Fprint(writeTo{c, from}, hops)
		}
	}()
	return addrPort(c.LocalAddr())
}

type writeTo struct {
	*net.UDPConn
	to netip.AddrPort
}

func (w writeTo) Write(b []byte) (int, error) { return w.WriteToUDPAddrPort(b, w.to) }

// A connection that comes back to the proxy, by either of two endpoints, ends when its TTL does, though its client says nothing:
// none on the way tries the other endpoint then, or there were 2^63 of them.
func TestALoopEnds(t *testing.T) {
	for _, f := range service.Families {
		s := serveEach(t, func(tcp, _ uint16) []testService {
			eps := []netip.AddrPort{netip.AddrPortFrom(loopbackOf(f), tcp)}
			if f == service.IPv4 {
				eps = append(eps, netip.AddrPortFrom(eps[0].Addr().Next(), tcp))
			} else {
				run(t, "ip", "-6", "address", "add", "fd99::1/128", "dev", "lo", "nodad")
				t.Cleanup(func() { run(t, "ip", "-6", "address", "del", "fd99::1/128", "dev", "lo") })
				eps = append(eps, netip.AddrPortFrom(netip.MustParseAddr("fd99::1"), tcp))
			}
			return []testService{serviceOf(service.TCP, f, eps...)}
		})
		tcp, _ := s.Ports()
		if c, err := tryDialWith(t, "tcp", f, tcp, 64); err == nil {
			if data, end := readEnd(c); data != "" || end != "reset" {
				t.Errorf("%s: client read %q, %s; want a reset", f, data, end)
			}
		} else if !errors.Is(err, syscall.ECONNRESET) { // so soon that connect saw it
			t.Fatal(err)
		}
		eventually(t, "the chain has collapsed", func() bool { return len(s.Connections()) == 0 })
		got := countersOf(s, serviceOf(service.TCP, f).key())
		// The last of 64 fails, and so may some before it, which it resets while they are being connected.
		if got.Total+got.Failed < 64 || got.Total > 200 || got.Looped.Count == 0 || !got.Looped.From.IsValid() {
			t.Errorf("%s: %d connections, %d that failed and %+v; want 64 or a few more, and the last one's address", f, got.Total, got.Failed, got.Looped)
		}
	}
}

// A datagram that comes back ends as well, and its client is told; so do later ones of the same sessions.
func TestALoopOfDatagramsEnds(t *testing.T) {
	for _, f := range service.Families {
		told := make(chan string, 1000)
		cfg := Config{Origin: familyOrigins{}, TimeExceeded: func(client, at netip.AddrPort, datagram []byte) error {
			told <- fmt.Sprint(service.FamilyOf(at.Addr()), " ", string(datagram))
			return nil
		}}
		s := start(t, cfg, nil)
		_, udp := s.Ports()
		serve(s, testPlan(serviceOf(service.UDP, f, netip.AddrPortFrom(loopbackOf(f), udp))))
		c := dialWith(t, "udp", f, udp, 64)
		for i := range 3 {
			line := strings.Repeat("x", i+1)
			fmt.Fprint(c, line)
			if got, want := <-told, f.String()+" "+line; got != want {
				t.Errorf("told of %q, want %q", got, want)
			}
			time.Sleep(2 * timeExceededEvery)
		}
		got := countersOf(s, serviceOf(service.UDP, f).key())
		if got.Total != 63 || got.Looped.Count != 3 {
			t.Errorf("%s: %d sessions, %+v; want 63 and 3", f, got.Total, got.Looped)
		}
	}
}
