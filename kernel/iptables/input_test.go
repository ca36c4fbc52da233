package iptables_test

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/test/kerneltest"
)

// alive makes the kernel think that kproxy serves.
func (s *scene) alive() {
	s.T.Helper()
	if err := (&steering.Redirects{Store: s.sets}).Alive(time.Hour); err != nil {
		s.T.Fatal(err)
	}
}

// closeInput makes the node drop what comes to it, but for neighbour discovery.
func (s *scene) closeInput() {
	s.T.Helper()
	run(s.T, fmt.Sprintf("%[1]s -P INPUT DROP; %[1]s -A INPUT -p %[2]s -j ACCEPT", s.variant.Program[s.Family], s.Addr("icmp", "icmpv6")))
}

func rejected(f *plan.Frontend) { f.Verdict = plan.Reject }

// TestRedirectedArentRefused: a service without endpoints whose address and port are
// those of kproxy's listener refuses its own clients, and no others', whose
// connections bear that address once they are redirected.
func TestRedirectedArentRefused(t *testing.T) {
	t.Parallel()
	onEachKernel(t, func(s *scene) {
		s.closeInput()
		var services []*plan.Service
		ports := map[service.Protocol]uint16{service.TCP: options().TCPPort, service.UDP: options().UDPPort}
		for proto, port := range ports {
			s.Serve(0, "userspace", port)
			services = append(services,
				kerneltest.Service("web", proto, kerneltest.Cluster(s.Virtual(1)), s.Endpoints(2), kerneltest.InUserspace),
				kerneltest.Service("same", proto, kerneltest.External(netip.AddrPortFrom(s.NodeAddress(s.Family, 1), port).String(), rejected)))
		}
		s.program(kerneltest.Plan(plan.ModeIPTables, services...))
		s.alive()
		for proto, port := range ports {
			s.Expect(proto.String()+" redirected", map[string]int{"userspace": 2}, s.Asks(2, 1, proto, s.Virtual(1)))
			same := netip.AddrPortFrom(s.NodeAddress(s.Family, 1), port).String()
			s.Expect(proto.String()+" to the listener's address", map[string]int{kerneltest.ErrRefused.Error(): 1}, s.Asks(1, 1, proto, same))
		}
	})
}

// TestForgottenAnswersArentRefused: an answer to kproxy that conntrack takes for a new
// connection, as it has forgotten the one that it belongs to, arrives, though the
// client's address and port are those of a service without endpoints.
func TestForgottenAnswersArentRefused(t *testing.T) {
	t.Parallel()
	onEachKernel(t, func(s *scene) {
		s.closeInput()
		if err := steering.DefaultRouting().Ensure(); err != nil {
			s.T.Fatal(err)
		}
		s.program(kerneltest.Plan(plan.ModeIPTables))
		l := s.listen(2, 9000)
		c, err := dialAs(s.Address(s.Family, 1), service.TCP, netip.AddrPortFrom(s.Address(s.Family, 2), 9000))
		if err != nil {
			s.T.Fatal(err)
		}
		defer c.Close()
		answering, err := l.Accept()
		if err != nil {
			s.T.Fatal(err)
		}
		defer answering.Close()
		s.program(kerneltest.Plan(plan.ModeIPTables, kerneltest.Service("same", service.TCP, kerneltest.External(c.LocalAddr().String(), rejected))))
		run(s.T, "conntrack -F -f "+s.Family.String())
		fmt.Fprintln(answering, "late")
		_ = c.SetDeadline(time.Now().Add(5 * time.Second))
		if got, err := bufio.NewReader(c).ReadString('\n'); strings.TrimSpace(got) != "late" {
			s.T.Errorf("got %q, %v; want the answer", got, err)
		}
	})
}

// listen listens on a host.
func (s *scene) listen(host int, port uint16) *net.TCPListener {
	s.T.Helper()
	var l net.Listener
	s.On(host, func() {
		var err error
		if l, err = net.Listen("tcp", netip.AddrPortFrom(s.Address(s.Family, host), port).String()); err != nil {
			s.T.Fatal(err)
		}
	})
	s.T.Cleanup(func() { l.Close() })
	return l.(*net.TCPListener)
}

// TestConnectionPassesStaleSocket: what an endpoint begins towards a client reaches
// the client, though kproxy still has a socket with the same addresses and ports, in
// TIME_WAIT, of a connection that conntrack has forgotten: no rule leads it there.
// Where the kernel looks for sockets before it looks for routes, as it does unless
// told otherwise, it drops what it finds one for and is to forward (ip_forward in
// net/ipv4/ip_forward.c); kproxy's ports are others than clients', see userspace.
func TestConnectionPassesStaleSocket(t *testing.T) {
	t.Parallel()
	onEachKernel(t, func(s *scene) {
		run(s.T, "echo 0 > /proc/sys/net/ipv4/tcp_early_demux") // of IPv6 as well
		if err := steering.DefaultRouting().Ensure(); err != nil {
			s.T.Fatal(err)
		}
		s.program(kerneltest.Plan(plan.ModeIPTables))
		l := s.listen(2, 9000)
		stale, err := dialAs(s.Address(s.Family, 1), service.TCP, l.Addr().(*net.TCPAddr).AddrPort())
		if err != nil {
			s.T.Fatal(err)
		}
		end, err := l.Accept()
		if err != nil {
			s.T.Fatal(err)
		}
		l.Close()
		stale.Close() // first: its socket waits
		if _, err := end.Read(make([]byte, 1)); err != io.EOF {
			s.T.Fatalf("the endpoint reads %v, want %v", err, io.EOF)
		}
		end.Close()
		client := stale.LocalAddr().(*net.TCPAddr)
		s.Serve(1, "client", uint16(client.Port))
		var c net.Conn
		for end := time.Now().Add(5 * time.Second); ; time.Sleep(time.Millisecond) {
			run(s.T, "conntrack -F -f "+s.Family.String())
			s.On(2, func() {
				d := net.Dialer{Timeout: 5 * time.Second, LocalAddr: l.Addr()}
				c, err = d.Dial("tcp", client.String())
			})
			// The endpoint's own socket is there until kproxy's has heard of its end.
			if !errors.Is(err, unix.EADDRNOTAVAIL) && !errors.Is(err, unix.EADDRINUSE) || time.Now().After(end) {
				break
			}
		}
		if err != nil {
			s.T.Fatal(err)
		}
		if got, err := answer(c); got != "client "+s.Address(s.Family, 2).String() {
			s.T.Errorf("got %q, %v; want the client's answer", got, err)
		}
	})
}

// TestHealthPortAndInvalid: load balancers and endpoints reach a health port where the
// host drops what it doesn't know; a packet of an endpoint that belongs to no
// connection is dropped there as elsewhere.
func TestHealthPortAndInvalid(t *testing.T) {
	t.Parallel()
	onEachKernel(t, func(s *scene) {
		const port = 9
		s.Serve(0, "health", port)
		s.closeInput()
		s.program(kerneltest.Plan(plan.ModeIPTables, kerneltest.Service("web", service.TCP, kerneltest.Cluster(s.Virtual(1)), s.Endpoints(2),
			func(s *plan.Service) { s.Port.HealthCheckNodePort = port })))
		node := s.NodeAddress(s.Family, 2)
		for from, who := range map[int]string{1: "a load balancer", 2: "an endpoint"} {
			s.Expect(who+" at the health port", map[string]int{"health": 1}, s.Asks(1, from, service.TCP, netip.AddrPortFrom(node, port).String()))
			s.Unanswered(who+" at another port", from, service.TCP, netip.AddrPortFrom(node, 8080).String())
		}
		s.acknowledge(2, node, port)
		counts, err := s.backend.Counts(s.T.Context())
		if err != nil {
			s.T.Fatal(err)
		}
		s.Expect("dropped", uint64(1), counts.Invalid)
	})
}

// TestOwnConnectionsAreRefused: what kproxy sends to an address of this node that is to
// refuse or to be silent is refused or dropped, on its way out.
func TestOwnConnectionsAreRefused(t *testing.T) {
	t.Parallel()
	onEachKernel(t, func(s *scene) {
		run(s.T, "ip link set lo up")
		silent := func(f *plan.Frontend) { f.Verdict = plan.Drop }
		node := s.NodeAddress(s.Family, 1)
		at := func(port uint16) netip.AddrPort { return netip.AddrPortFrom(node, port) }
		for _, port := range []uint16{9001, 9002, 9003} {
			s.Serve(0, "node", port)
		}
		s.program(kerneltest.Plan(plan.ModeIPTables,
			kerneltest.Service("refused", service.TCP, kerneltest.External(at(9001).String(), rejected)),
			kerneltest.Service("silent", service.TCP, kerneltest.External(at(9002).String(), silent))))
		for port, want := range map[uint16]error{9001: unix.ECONNREFUSED, 9002: unix.ETIMEDOUT, 9003: nil} {
			c, err := dialAs(node, service.TCP, at(port))
			if err == nil {
				c.Close()
			}
			var timeout net.Error
			if errors.As(err, &timeout) && timeout.Timeout() {
				err = unix.ETIMEDOUT
			}
			if !errors.Is(err, want) {
				s.T.Errorf("port %d: %v, want %v", port, err, want)
			}
		}
	})
}
