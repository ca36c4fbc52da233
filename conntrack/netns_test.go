package conntrack

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/service"
)

// inNamespace moves the test into a network namespace without a name: it is
// gone when the test's thread and sockets are, however the test ends. Don't use
// t.Run after it. Client, service and pod addresses of fixture_test.go are on
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
	if err := EnableAccounting(); err != nil {
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

// again makes one more exchange.
func again(t testing.TB, c *net.UDPConn) {
	t.Helper()
	_ = c.SetDeadline(time.Now().Add(5 * time.Second))
	if _, err := c.Write([]byte("hello")); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Read(make([]byte, 2048)); err != nil {
		t.Fatalf("no answer from %s to %s: %v", c.RemoteAddr(), c.LocalAddr(), err)
	}
}

func mustList(t testing.TB, c *Client, p service.Protocol) []Flow {
	t.Helper()
	flows, err := c.List(p)
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
