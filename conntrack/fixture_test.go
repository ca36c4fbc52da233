package conntrack

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// at is an address and port for tests that run for both families: the host
// number makes 10.x.0.n or fd00:x::n.
func at(f service.Family, net, host int, port uint16) netip.AddrPort {
	if f == service.IPv4 {
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, byte(net), 0, byte(host)}), port)
	}
	return netip.AddrPortFrom(netip.AddrFrom16([16]byte{0: 0xfd, 3: byte(net), 15: byte(host)}), port)
}

func loopback(f service.Family) netip.Addr {
	if f == service.IPv4 {
		return netip.MustParseAddr("127.0.0.1")
	}
	return netip.IPv6Loopback()
}

// The networks of the tests.
const (
	clients  = 1
	pods     = 2
	nodes    = 3
	services = 96
)

const (
	listener    uint16 = 40000
	oldListener uint16 = 39999
	nodePort    uint16 = 30053
)

// isLocal knows one node address per family and the loopback ones.
func isLocal(a netip.Addr) bool {
	return a.IsLoopback() || slices.ContainsFunc(service.Families[:], func(f service.Family) bool {
		return a == at(f, nodes, 1, 0).Addr()
	})
}

func udpKey(name string) service.Key {
	return service.Key{Namespace: "default", Name: name, Port: "p", Protocol: service.UDP}
}

// serviceOf makes a dual-stack service with a cluster address and a node port
// and two endpoints per family: pods 2 and 3, port 5353.
func serviceOf(k service.Key, host int, change ...func(*plan.Service)) *plan.Service {
	s := &plan.Service{
		Port:      &service.Port{Key: k, Number: 53, NodePort: nodePort},
		DataPlane: plan.IPTables,
	}
	for _, f := range service.Families {
		s.Frontends = append(s.Frontends, plan.Frontend{
			Kind: plan.ClusterIP, Family: f, Protocol: k.Protocol, Verdict: plan.Forward, Address: at(f, services, host, 53),
		})
	}
	for _, f := range service.Families {
		s.Frontends = append(s.Frontends, plan.Frontend{
			Kind: plan.NodePort, Family: f, Protocol: k.Protocol, Verdict: plan.Forward, Address: netip.AddrPortFrom(netip.Addr{}, nodePort),
		})
	}
	for _, f := range service.Families {
		for host := 2; host <= 3; host++ {
			s.Endpoints = append(s.Endpoints, plan.Endpoint{
				Endpoint: &service.Endpoint{Address: at(f, pods, host, 5353), Ready: true, Serving: true, Weight: 1}, Usable: true,
			})
		}
	}
	for _, c := range change {
		c(s)
	}
	return s
}

func planOf(s ...*plan.Service) *plan.Plan {
	slices.SortFunc(s, func(a, b *plan.Service) int { return a.Port.Compare(b.Port.Key) })
	return &plan.Plan{Services: s}
}

func inPlane(d plan.DataPlane) func(*plan.Service) {
	return func(s *plan.Service) { s.DataPlane = d }
}

// withoutEndpoint removes pod number host from both families.
func withoutEndpoint(host int) func(*plan.Service) {
	return func(s *plan.Service) {
		s.Endpoints = slices.DeleteFunc(s.Endpoints, func(e plan.Endpoint) bool {
			return e.Address == at(service.IPv4, pods, host, 5353) || e.Address == at(service.IPv6, pods, host, 5353)
		})
	}
}

func notServing(host int) func(*plan.Service) {
	return func(s *plan.Service) {
		for i := range s.Endpoints {
			e := &s.Endpoints[i]
			if e.Address == at(service.IPv4, pods, host, 5353) || e.Address == at(service.IPv6, pods, host, 5353) {
				e.Ready, e.Serving, e.Terminating = false, false, true
			}
		}
	}
}

// rejecting takes all endpoints away.
func rejecting(s *plan.Service) {
	s.Endpoints, s.DataPlane = nil, plan.None
	for i := range s.Frontends {
		s.Frontends[i].Verdict = plan.Reject
	}
}

// flow makes an entry of client 9 to dst whose packets go to target.
func flow(f service.Family, p service.Protocol, dst, target netip.AddrPort) Flow {
	client := at(f, clients, 9, 50000)
	return Flow{
		Family: f, Protocol: p, ID: 1, Status: statusSeenReply,
		OrigSrc: client, OrigDst: dst, ReplySrc: target, ReplyDst: client,
	}
}

// inNamespace moves the test into a network namespace without a name: it is
// gone when the test's thread and sockets are, however the test ends. Don't use
// t.Run after it. Client, service and pod addresses of the tests are on
// its loopback link.
func inNamespace(t testing.TB) *Client {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: builds a network namespace")
	}
	runtime.LockOSThread() // and never unlocked: the thread ends with the test
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		t.Fatal(err)
	}
	command(t, "ip", "link", "set", "lo", "up")
	for _, f := range service.Families {
		for _, net := range []int{clients, pods, services} {
			for host := range 20 {
				command(t, "ip", "addr", "add", netip.PrefixFrom(at(f, net, host+1, 0).Addr(), f.Bits()).String(), "dev", "lo", "nodad")
			}
		}
		// Connection tracking begins with the first rule that needs it.
		rewrite(t, at(f, services, 20, 9), port(9))
	}
	if _, err := kernel.EnsureSysctls(kernel.Sysctls()); err != nil {
		t.Fatal(err)
	}
	c, err := Dial()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
	})
	return c
}

func command(t testing.TB, name string, args ...string) {
	t.Helper()
	if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
}

// table changes the nat table of a family.
func table(t testing.TB, f service.Family, args ...string) {
	t.Helper()
	name := "iptables"
	if f == service.IPv6 {
		name = "ip6tables"
	}
	command(t, name, append([]string{"-w", "-t", "nat"}, args...)...)
}

// rewrite makes the kernel send what is for dst to another place: an address
// and port, or with the zero Addr a local port.
func rewrite(t testing.TB, dst, to netip.AddrPort) {
	t.Helper()
	rule := []string{"-A", "OUTPUT", "-p", "udp", "-d", dst.Addr().String(), "--dport", fmt.Sprint(dst.Port()), "-j"}
	if to.Addr().IsValid() {
		rule = append(rule, "DNAT", "--to-destination", to.String())
	} else {
		rule = append(rule, "REDIRECT", "--to-ports", fmt.Sprint(to.Port()))
	}
	table(t, service.FamilyOf(dst.Addr()), rule...)
}

// server answers datagrams with what they hold, and tells who sent them.
func server(t testing.TB, address netip.AddrPort) (*net.UDPConn, <-chan netip.AddrPort) {
	t.Helper()
	c, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(address))
	if err != nil {
		t.Fatal(err)
	}
	peers := make(chan netip.AddrPort, 1000)
	done := make(chan struct{})
	go func() {
		defer close(done)
		buf := make([]byte, 2048)
		for {
			n, peer, err := c.ReadFromUDPAddrPort(buf)
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err == nil {
				_, _ = c.WriteToUDPAddrPort(buf[:n], peer)
				peers <- unmap(peer)
			}
		}
	}()
	t.Cleanup(func() { c.Close(); <-done })
	return c, peers
}

// ask sends a datagram from src to dst and waits for the answer.
func ask(t testing.TB, src, dst netip.AddrPort) *net.UDPConn {
	t.Helper()
	c, err := net.DialUDP("udp", net.UDPAddrFromAddrPort(src), net.UDPAddrFromAddrPort(dst))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	again(t, c)
	return c
}

// again makes one more exchange. It asks again where nothing comes back: a processor's queue of packets that other
// namespaces fill is this one's, too.
func again(t testing.TB, c *net.UDPConn) {
	t.Helper()
	var err error
	for range 10 {
		if _, err := c.Write([]byte("hello")); err != nil {
			t.Fatal(err)
		}
		_ = c.SetReadDeadline(time.Now().Add(time.Second))
		if _, err = c.Read(make([]byte, 2048)); err == nil {
			return
		}
	}
	t.Fatalf("no answer from %s to %s: %v", c.RemoteAddr(), c.LocalAddr(), err)
}

func mustList(t testing.TB, c *Client, p service.Protocol) []Flow {
	t.Helper()
	flows, err := c.List(Wanted{Protocol: p})
	if err != nil {
		t.Fatal(err)
	}
	return flows
}

// to returns the flows sent to dst, by their source.
func to(flows []Flow, dst netip.AddrPort) map[netip.AddrPort]Flow {
	out := map[netip.AddrPort]Flow{}
	for _, f := range flows {
		if f.OrigDst == dst {
			out[f.OrigSrc] = f
		}
	}
	return out
}

func endpointFigures(s ServiceFigures, a netip.AddrPort) Figures {
	i := s.endpoint(a)
	return s.Endpoints[i].Figures
}
