package lab

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
)

func TestEveryPairTalks(t *testing.T) {
	for _, topology := range Topologies {
		t.Run(string(topology), func(t *testing.T) {
			c := dualStack("kplab-pairs", 2)
			c.Topology = topology
			everyPairTalks(t, build(t, c))
		})
	}
}

func everyPairTalks(t *testing.T, n *Network) {
	ctx := within(t, time.Minute)
	type source struct {
		name      string
		ns        *Namespace
		addresses []netip.Addr
	}
	sources := []source{
		{"client", n.Client, n.Config.ClientAddresses(0)},
		{"second client", n.Client, n.Config.ClientAddresses(1)},
		{"node", n.Node, n.Config.NodeAddresses()},
		{"b1", n.Backends[0].Namespace, n.Backends[0].Addresses},
	}
	if gateways := n.Config.PodGateways(); gateways != nil {
		sources = append(sources, source{"node among pods", n.Node, gateways})
	}
	for _, src := range sources {
		for _, b := range n.Backends {
			for f, a := range b.Addresses {
				for _, network := range []string{"tcp", "udp"} {
					t.Run(fmt.Sprintf("%s to %s by %s over %s", src.name, b.Name, network, a), func(t *testing.T) {
						got, err := src.ns.AskFrom(ctx, src.addresses[f], network, netip.AddrPortFrom(a, LinePort), "hello there")
						want := Answer{Backend: b.Name, Peer: src.addresses[f], Payload: "hello there"}
						if err != nil || got != want {
							t.Errorf("got %+v, %v, want %+v", got, err, want)
						}
					})
				}
			}
		}
	}
}

// Where links have no address, the node itself is seen as the address of another link.
func TestUnnumberedLinksHaveNoAddress(t *testing.T) {
	for topology, want := range map[Topology]int{Routed: 3, Unnumbered: 1, Loopback: 1} { // one is link-local
		t.Run(string(topology), func(t *testing.T) {
			c := dualStack("kplab-unnumbered", 1)
			c.Topology = topology
			n := build(t, c)
			out, err := n.Node.Command(t.Context(), "ip", "-o", "addr", "show", "dev", "b1").Output()
			if err != nil {
				t.Fatal(err)
			}
			if got := strings.Count(string(out), "scope"); got != want {
				t.Errorf("%d addresses, want %d:\n%s", got, want, out)
			}
			for _, b := range n.Backends {
				for f, a := range b.Addresses {
					got, err := n.Node.Ask(within(t, 5*time.Second), "tcp", netip.AddrPortFrom(a, LinePort), "hello")
					nodes := append(n.Config.NodeAddresses(), n.Config.PodGateways()...)
					if err != nil || !slices.Contains(nodes, got.Peer) {
						t.Errorf("family %d: got %+v, %v, want an answer to one of %v", f, got, err, nodes)
					}
				}
			}
		})
	}
}

// Connections of a client, also to different backends, get one port after the other: none
// that another one has, or had a moment ago.
func TestConnectionsHavePortsOfTheirOwn(t *testing.T) {
	n := build(t, dualStack("kplab-ports", 2))
	ctx := within(t, 10*time.Second)
	connect := func(to netip.Addr) (port int) {
		c, err := n.Client.Dial(ctx, "tcp", netip.AddrPortFrom(to, LinePort).String())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		return c.LocalAddr().(*net.TCPAddr).Port
	}
	clientPort.Store(clientPorts - 4) // they begin anew on the way
	for i := range 8 {
		want := firstClientPort + (clientPorts-3+i)%clientPorts
		if got := connect(n.Backends[i%2].Addresses[i/2%2]); got != want {
			t.Errorf("connection %d has port %d, want %d", i+1, got, want)
		}
	}
	l, err := n.Client.Listen(ctx, "tcp4", fmt.Sprintf("0.0.0.0:%d", firstClientPort+100))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	clientPort.Store(99)
	if got, want := connect(n.Backends[0].Addresses[0]), firstClientPort+101; got != want {
		t.Errorf("where a port is taken, a connection has port %d, want %d", got, want)
	}
}

func TestServiceAddressVanishesWithoutRules(t *testing.T) {
	n := build(t, dualStack("kplab-vanish", 1))
	for _, from := range []*Namespace{n.Client, n.Node} {
		for _, target := range []string{"10.96.0.10:80", "[fd00:96::a]:80"} {
			ctx := within(t, 100*time.Millisecond)
			_, err := from.Ask(ctx, "udp", netip.MustParseAddrPort(target), "x")
			if !errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("from %s to %s: got %v, want a time-out", from.Name, target, err)
			}
		}
	}
}

func TestHostReachesNode(t *testing.T) {
	c := dualStack("kplab-host", 0)
	c.HostAccess = true
	n := build(t, c)
	address, ok := n.HostAddress()
	if !ok || !netip.MustParsePrefix("198.18.0.0/15").Contains(address) {
		t.Fatalf("host address %s, %v", address, ok)
	}
	l, err := n.Node.Listen(t.Context(), "tcp", netip.AddrPortFrom(address, 0).String())
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	conn, err := net.DialTimeout("tcp", l.Addr().String(), 5*time.Second)
	if err != nil {
		t.Fatalf("dial node from host: %v", err)
	}
	conn.Close()
}

func TestDownRemovesEverything(t *testing.T) {
	c := dualStack("kplab-down", 1)
	c.HostAccess = true
	n := build(t, c)
	p := &Process{Namespace: n.Node, Path: "sleep", Args: []string{"1000"}}
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	// A fresh value knows nothing of the first: this is what a later run does
	// with the leftovers of one that was killed.
	if err := DownAll(c.Prefix); err != nil {
		t.Fatalf("DownAll: %v", err)
	}
	if p.Wait(within(t, 10*time.Second)) == nil {
		t.Error("process on the node ended by itself")
	}
	for _, ns := range n.namespaces() {
		if exists(ns.Path()) {
			t.Errorf("namespace %s is left", ns.Name)
		}
	}
	if _, err := netlink.LinkByName(c.hostLink()); !errors.As(err, &netlink.LinkNotFoundError{}) {
		t.Errorf("host link: got %v, want not found", err)
	}
	for range 2 {
		if err := n.Down(); err != nil {
			t.Errorf("Down again: %v", err)
		}
	}
}

func TestUpReplacesLeftovers(t *testing.T) {
	first := build(t, dualStack("kplab-twice", 2))
	second := build(t, dualStack("kplab-twice", 1))
	if exists(first.Backends[1].Namespace.Path()) {
		t.Error("second backend of the first lab is left")
	}
	got, err := second.Client.Ask(within(t, 5*time.Second), "tcp", second.Backends[0].Address(true, LinePort), "x")
	if err != nil || got.Backend != "b1" {
		t.Errorf("got %+v, %v", got, err)
	}
}

func TestDownLeavesOtherLabs(t *testing.T) {
	c := dualStack("kplab-own", 1)
	build(t, c)
	c.Prefix += "-2"
	other := build(t, c)
	if err := DownAll(dualStack("kplab-own", 1).Prefix); err != nil {
		t.Fatal(err)
	}
	for _, ns := range other.namespaces() {
		if !exists(ns.Path()) {
			t.Errorf("namespace %s of the other lab is gone", ns.Name)
		}
	}
}

func TestUpFailingLeavesNothing(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: builds network namespaces")
	}
	n := New(dualStack("kplab-fails", 1))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := n.Up(ctx); err == nil {
		t.Error("Up with a context that has ended: got no error")
	}
	for _, ns := range n.namespaces() {
		if exists(ns.Path()) {
			t.Errorf("namespace %s is left", ns.Name)
		}
	}
}

func TestValidateReportsEveryProblem(t *testing.T) {
	err := Config{Prefix: "Bad/..", Topology: "ring", Backends: 300}.Validate()
	for _, want := range []string{"prefix", `topology "ring"`, "300 backends", "0 client addresses"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v doesn't mention %q", err, want)
		}
	}
	if err := DefaultConfig().Validate(); err != nil {
		t.Errorf("default configuration: %v", err)
	}
	if err := DownAll("../../etc"); err == nil {
		t.Error("DownAll of a path: got no error")
	}
}
