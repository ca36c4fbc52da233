package lab

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// Prepare makes the namespace a router or not, before any link exists, so that links
// inherit the settings. Forwarding is set both ways: a new namespace inherits it from
// the host.
func (n *Namespace) Prepare(router, ipv6 bool) error {
	forward := "0"
	if router {
		forward = "1"
	}
	values := [][2]string{
		{"ipv4/ip_forward", forward},
		// The node's default route leads back to the client. The redirects that
		// this would cause use up the client's allowance of ICMP (inet_peer_xrlim_allow),
		// and what tells it that a port is unreachable would come a second late.
		{"ipv4/conf/all/send_redirects", "0"},
		{"ipv4/conf/default/send_redirects", "0"},
	}
	if ipv6 {
		values = append(values,
			[2]string{"ipv6/conf/all/disable_ipv6", "0"},
			[2]string{"ipv6/conf/default/disable_ipv6", "0"},
			[2]string{"ipv6/conf/all/accept_dad", "0"},
			[2]string{"ipv6/conf/default/accept_dad", "0"},
			[2]string{"ipv6/conf/all/accept_ra", "0"},
			[2]string{"ipv6/conf/default/accept_ra", "0"},
			[2]string{"ipv6/conf/all/forwarding", forward},
		)
	}
	return n.setSysctls(values)
}

func (n *Namespace) setSysctls(values [][2]string) error {
	return n.Do(func() error {
		for _, v := range values {
			// /proc/sys/net shows the namespace of the thread that opens it.
			if err := os.WriteFile(filepath.Join("/proc/sys/net", v[0]), []byte(v[1]), 0); err != nil {
				return fmt.Errorf("set sysctl in %s: %w", n.Name, err)
			}
		}
		return nil
	})
}

// ip carries out commands of ip(8) in the namespace, each also after one that fails; nil is the caller's.
func (n *Namespace) ip(ctx context.Context, commands ...string) error {
	cmd := exec.CommandContext(ctx, "ip", "-force", "-batch", "-")
	cmd.Stdin = strings.NewReader(strings.Join(commands, "\n") + "\n")
	var out []byte
	run := func() (err error) {
		out, err = cmd.CombinedOutput()
		return err
	}
	var err error
	if n == nil {
		err = run()
	} else {
		err = n.Do(run)
	}
	if err != nil {
		return fmt.Errorf("ip: %w: %s; of:\n%s", err, strings.TrimSpace(string(out)), strings.Join(commands, "\n"))
	}
	return nil
}

// wire is a link between the node, where it has a name, and another namespace, where
// it is eth0 unless it has a name there.
type wire struct {
	name, peer string
	far        *Namespace // nil is the caller's
	mac        string     // of the node's end; empty for any
	// Commands for both ends, which are up then.
	node, there []string
}

// wireUp makes links. Both ends of all are up before the first has an address: IPv6 waits
// for that.
func wireUp(ctx context.Context, node *Namespace, wires ...wire) error {
	up, then := []string{"link set lo up"}, []string(nil)
	for _, w := range wires {
		mac, to := "", fmt.Sprint(os.Getpid())
		if w.mac != "" {
			mac = "address " + w.mac
		}
		if w.far != nil {
			to = w.far.Path()
		}
		up = append(up, fmt.Sprintf("link add %s %s type veth peer name %s netns %s", w.name, mac, w.end(), to), fmt.Sprintf("link set %s up", w.name))
		then = append(then, w.node...)
	}
	if err := node.ip(ctx, up...); err != nil {
		return fmt.Errorf("link node: %w", err)
	}
	for _, w := range wires {
		there := append([]string{fmt.Sprintf("link set %s up", w.end())}, w.there...)
		if w.far != nil {
			there = append([]string{"link set lo up"}, there...)
		}
		if err := w.far.ip(ctx, there...); err != nil {
			return fmt.Errorf("link %s: %w", w.name, err)
		}
	}
	return node.ip(ctx, then...)
}

func (w *wire) end() string {
	if w.peer != "" {
		return w.peer
	}
	return "eth0"
}

// Commands of ip(8).

func addAddress(link string, p netip.Prefix) string {
	if p.Addr().Is6() {
		return fmt.Sprintf("addr add %s dev %s nodad", p, link)
	}
	return fmt.Sprintf("addr add %s dev %s", p, link)
}

// addDefault adds the default route of the gateway's family. It is onlink: a
// backend's own address is a /32, so its gateway is in no connected network.
func addDefault(link string, gateway netip.Addr) string {
	return fmt.Sprintf("route add default via %s dev %s onlink", gateway, link)
}

func addRoute(link string, a netip.Addr) string { return fmt.Sprintf("route add %s dev %s", a, link) }

func alone(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

// Join gives a node and a host a network between them, by a link that the node knows by a
// name and the host as eth0. The addresses are the host's; those before them are the node's,
// and the host's way to everywhere.
func Join(ctx context.Context, node, host *Namespace, name string, addresses ...netip.Prefix) error {
	w := wire{name: name, far: host}
	for _, a := range addresses {
		gateway := a.Addr().Prev()
		w.node = append(w.node, addAddress(name, netip.PrefixFrom(gateway, a.Bits())))
		w.there = append(w.there, addAddress("eth0", a), addDefault("eth0", gateway))
	}
	return wireUp(ctx, node, w)
}

// wire connects all namespaces.
func (n *Network) wire(ctx context.Context) error {
	wires := []wire{n.Config.clientWire(n.Client)}
	for i, b := range n.Backends {
		wires = append(wires, n.Config.podWire(b.Namespace, b.Name, i+1))
	}
	if n.Config.HostAccess {
		subnet := n.Config.hostSubnet()
		wires = append(wires, wire{
			name: "host", peer: n.Config.hostLink(),
			node:  []string{addAddress("host", netip.PrefixFrom(nth(subnet, 2), 30))},
			there: []string{addAddress(n.Config.hostLink(), netip.PrefixFrom(nth(subnet, 1), 30))},
		})
	}
	if before := n.Config.podGateway(); len(before) > 0 {
		if err := n.Node.ip(ctx, before...); err != nil {
			return err
		}
	}
	if err := wireUp(ctx, n.Node, wires...); err != nil {
		return err
	}
	if n.Config.Topology == Unnumbered || n.Config.Topology == Loopback {
		return n.answerForAll()
	}
	return nil
}

func (c Config) clientWire(ns *Namespace) wire {
	w := wire{name: "client", far: ns}
	for f, a := range c.NodeAddresses() {
		bits := [2]netip.Prefix{ClientCIDR4, ClientCIDR6}[f].Bits()
		w.node = append(w.node, addAddress("client", netip.PrefixFrom(a, bits)), addDefault("client", c.ClientAddresses(0)[f]))
		for i := range c.Clients {
			if a.Is6() {
				// The kernel prefers the newest IPv6 address and the oldest IPv4
				// one; the first client's is to be the default of both.
				i = c.Clients - 1 - i
			}
			w.there = append(w.there, addAddress("eth0", netip.PrefixFrom(c.ClientAddresses(i)[f], bits)))
		}
		w.there = append(w.there, addDefault("eth0", a))
	}
	return w
}
