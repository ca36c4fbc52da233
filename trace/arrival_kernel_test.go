package trace

import (
	"errors"
	"net"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/test/kerneltest"
)

// seen starts a process in a namespace of the network, by which others find that.
func seen(t *testing.T, n *kerneltest.Network, i int) {
	t.Helper()
	n.On(i, func() {
		c := exec.Command("sleep", "600")
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			_ = c.Process.Kill()
			_ = c.Wait()
		})
	})
}

// TestUnseenEndpoint: what is in a network namespace that isn't seen from here isn't followed, and the trace says where it ends.
func TestUnseenEndpoint(t *testing.T) {
	n := kerneltest.NewNetwork(t, 2)
	n.Serve(2, "b", 9000)
	n.On(2, func() { sh(t, "iptables -A INPUT -p tcp -j DROP") })
	sh(t, "iptables -t nat -A PREROUTING -d 10.96.0.10 -p tcp --dport 80 -j DNAT --to-destination 10.2.0.2:9000")
	to := netip.MustParseAddrPort("10.96.0.10:80")
	_, _, failed := n.Ask(1, service.TCP, to, false)
	r, err := Run(t.Context(), Request{Address: to, Protocol: service.TCP, From: n.Address(service.IPv4, 1)}, nil)
	if failed == nil || err != nil || r.Verdict != Forwarded || !slices.ContainsFunc(r.Findings, func(f Finding) bool { return strings.Contains(f.What, "ends at the door") }) {
		t.Errorf("packets: %v; trace: %v, %s, %+v", failed, err, r.Verdict, r.Findings)
	}
}

// TestFullQueue: an endpoint whose program accepts nothing takes connections until its queue is full.
func TestFullQueue(t *testing.T) {
	n := kerneltest.NewNetwork(t, 2)
	sh(t, "iptables -t nat -A PREROUTING -d 10.96.0.10 -p tcp --dport 80 -j DNAT --to-destination 10.2.0.2:9000")
	seen(t, n, 2)
	req := Request{Address: netip.MustParseAddrPort("10.96.0.10:80"), Protocol: service.TCP, From: n.Address(service.IPv4, 1)}
	n.On(2, func() {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM, 0)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { unix.Close(fd) })
		if err := unix.Bind(fd, &unix.SockaddrInet4{Port: 9000}); err != nil {
			t.Fatal(err)
		}
		if err := unix.Listen(fd, 0); err != nil {
			t.Fatal(err)
		}
	})
	look := func(want Verdict, words string) {
		t.Helper()
		r, err := Run(t.Context(), req, nil)
		if err != nil || r.Verdict != want || !strings.Contains(r.Culprit, words) || words == "" && r.Culprit != "" {
			t.Errorf("%s, %q, %v; want %s and %q", r.Verdict, r.Culprit, err, want, words)
		}
	}
	connects := func() (yes bool) {
		n.On(1, func() {
			c, err := net.DialTimeout("tcp", req.Address.String(), 700*time.Millisecond)
			if yes = err == nil; yes {
				t.Cleanup(func() { c.Close() })
			}
		})
		return yes
	}
	look(Forwarded, "")
	if !connects() {
		t.Error("the first client isn't taken")
	}
	look(Dropped, "doesn't accept connections: 1 of 0 wait already")
	if connects() {
		t.Error("a client is taken beyond what the queue has room for")
	}
}

// TestClientsAddressOnTheNode: the kernel drops what comes in from an address that it has itself.
func TestClientsAddressOnTheNode(t *testing.T) {
	n := kerneltest.NewNetwork(t, 2)
	n.Serve(2, "b", 9000)
	seen(t, n, 1)
	sh(t, "iptables -t nat -A PREROUTING -d 10.96.0.10 -p tcp --dport 80 -j DNAT --to-destination 10.2.0.2:9000",
		"ip addr add "+n.Address(service.IPv4, 1).String()+"/32 dev lo")
	all, err := neighbours(spaces())
	if err != nil {
		t.Fatal(err)
	}
	path := all.at[n.Address(service.IPv4, 1)].path
	if path == "" {
		t.Fatal("the client's namespace isn't found")
	}
	to := netip.MustParseAddrPort("10.96.0.10:80")
	if _, _, err := n.Ask(1, service.TCP, to, false); !errors.Is(err, kerneltest.ErrTimeout) {
		t.Errorf("packets: %v", err)
	}
	r, err := Run(t.Context(), Request{Address: to, Protocol: service.TCP, Netns: path}, nil)
	if err != nil || r.Verdict != Dropped || !strings.Contains(r.Culprit, "also an address of its own, on link lo") {
		t.Errorf("%s, %q, %v", r.Verdict, r.Culprit, err)
	}
}
