package lab

import (
	"fmt"
	"net/netip"
)

// unnumberedMAC is that of the node's end of every unnumbered link. With one for all,
// pods can be told of it, and of the link-local address that it makes (RFC 4291,
// appendix A), before they have asked, as Calico and AWS VPC CNI do.
const unnumberedMAC = "ee:ee:ee:ee:ee:ee"

var unnumberedGateways = [2]netip.Addr{netip.MustParseAddr("169.254.1.1"), netip.MustParseAddr("fe80::ecee:eeff:feee:eeee")}

// podGateway prepares the node for links to pods: commands of ip(8).
func (c Config) podGateway() (out []string) {
	switch c.Topology {
	case Bridge:
		out = []string{"link add " + BridgeLink + " type bridge", "link set " + BridgeLink + " up"}
		for f, a := range c.PodGateways() {
			out = append(out, addAddress(BridgeLink, netip.PrefixFrom(a, podBits(f))))
		}
	case Loopback:
		out = []string{"link set lo up"}
		for _, a := range c.PodGateways() {
			out = append(out, addAddress("lo", alone(a)))
		}
	}
	return out
}

func podBits(family int) int { return [2]netip.Prefix{PodCIDR4, PodCIDR6}[family].Bits() }

// podWire links the i-th backend to the node.
func (c Config) podWire(ns *Namespace, name string, i int) wire {
	w := wire{name: name, far: ns}
	gateways, addresses := c.PodGateways(), c.backendAddresses(i)
	switch c.Topology {
	case Bridge:
		// It sends packets back to where they came from, as a pod asks that reaches itself
		// by a service.
		w.node = []string{fmt.Sprintf("link set %s master %s", name, BridgeLink), fmt.Sprintf("link set %s type bridge_slave hairpin on", name)}
	case Unnumbered:
		w.mac, gateways = unnumberedMAC, unnumberedGateways[:]
	case Loopback:
		w.mac = unnumberedMAC
	}
	for f, a := range addresses {
		at := alone(a)
		switch c.Topology {
		case Bridge:
			at = netip.PrefixFrom(a, podBits(f))
		case Routed:
			w.node = append(w.node, addAddress(name, alone(gateways[f])))
		}
		if c.Topology != Bridge {
			w.node = append(w.node, addRoute(name, a))
		}
		w.there = append(w.there, addAddress("eth0", at))
		if c.Topology == Loopback && a.Is6() {
			// Nothing on the link answers for the gateway, as Cilium's program would.
			w.there = append(w.there, fmt.Sprintf("neigh add %s lladdr %s dev eth0 nud permanent", gateways[f], unnumberedMAC))
		}
		w.there = append(w.there, addDefault("eth0", gateways[f]))
	}
	return w
}

// answerForAll has the node's ends without addresses answer for all others: at once,
// where they would wait 0.8 s to let the owner answer first (arp(7), proxy_delay).
func (n *Network) answerForAll() error {
	var values [][2]string
	for _, b := range n.Backends {
		values = append(values, [2]string{"ipv4/conf/" + b.Name + "/proxy_arp", "1"}, [2]string{"ipv4/neigh/" + b.Name + "/proxy_delay", "0"})
	}
	return n.Node.setSysctls(values)
}
