package lab

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// unnumberedMAC is that of the node's end of every unnumbered link. With one for all,
// pods can be told of it, and of the link-local address that it makes (RFC 4291,
// appendix A), before they have asked, as Calico and AWS VPC CNI do.
var (
	unnumberedMAC      = net.HardwareAddr{0xee, 0xee, 0xee, 0xee, 0xee, 0xee}
	unnumberedGateways = [2]netip.Addr{netip.MustParseAddr("169.254.1.1"), netip.MustParseAddr("fe80::ecee:eeff:feee:eeee")}
)

// pods prepares the node for links to pods.
func (w *wiring) pods() error {
	switch w.config.Topology {
	case Bridge:
		if err := w.node.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: BridgeLink}}); err != nil {
			return fmt.Errorf("add bridge %s: %w", BridgeLink, err)
		}
		for f, a := range w.config.PodGateways() {
			if err := addAddress(w.node, BridgeLink, netip.PrefixFrom(a, podBits(f))); err != nil {
				return err
			}
		}
		return setUp(w.node, BridgeLink)
	case Loopback:
		for _, a := range w.config.PodGateways() {
			if err := addAddress(w.node, "lo", host(a)); err != nil {
				return err
			}
		}
	}
	return nil
}

func podBits(family int) int {
	if family == 0 {
		return PodCIDR4.Bits()
	}
	return PodCIDR6.Bits()
}

// backend links the i-th backend to the node.
func (w *wiring) backend(ns *Namespace, name string, i int) error {
	var mac net.HardwareAddr
	wire := w.routed
	switch w.config.Topology {
	case Bridge:
		wire = w.bridged
	case Unnumbered, Loopback:
		mac, wire = unnumberedMAC, w.unnumbered
	}
	far, err := w.link(ns, name, mac)
	if err != nil {
		return err
	}
	return wire(far, name, w.config.backendAddresses(i))
}

func (w *wiring) routed(far *netlink.Handle, name string, addresses []netip.Addr) error {
	gateways := w.config.PodGateways()
	for f, a := range addresses {
		if err := addAddress(w.node, name, host(gateways[f])); err != nil {
			return err
		}
		if err := addAddress(far, "eth0", host(a)); err != nil {
			return err
		}
		if err := addRoute(w.node, name, host(a), netip.Addr{}); err != nil {
			return err
		}
		if err := addDefault(far, "eth0", gateways[f]); err != nil {
			return err
		}
	}
	return nil
}

// bridged makes the node's end a port of the bridge, which sends packets back to where
// they came from, as a pod asks that reaches itself by a service.
func (w *wiring) bridged(far *netlink.Handle, name string, addresses []netip.Addr) error {
	port, err := w.node.LinkByName(name)
	if err != nil {
		return fmt.Errorf("find link %s: %w", name, err)
	}
	bridge, err := w.node.LinkByName(BridgeLink)
	if err != nil {
		return fmt.Errorf("find bridge %s: %w", BridgeLink, err)
	}
	if err := errors.Join(w.node.LinkSetMaster(port, bridge), w.node.LinkSetHairpin(port, true)); err != nil {
		return fmt.Errorf("make %s a port of bridge %s: %w", name, BridgeLink, err)
	}
	for f, gateway := range w.config.PodGateways() {
		if err := addAddress(far, "eth0", netip.PrefixFrom(addresses[f], podBits(f))); err != nil {
			return err
		}
		if err := addDefault(far, "eth0", gateway); err != nil {
			return err
		}
	}
	return nil
}

// unnumbered leaves the node's end without an address. It answers for all others:
// at once, where it would wait 0.8 s to let the owner answer first (arp(7),
// proxy_delay).
func (w *wiring) unnumbered(far *netlink.Handle, name string, addresses []netip.Addr) error {
	err := writeSysctls(w.nodeNamespace, [][2]string{
		{"ipv4/conf/" + name + "/proxy_arp", "1"},
		{"ipv4/neigh/" + name + "/proxy_delay", "0"},
	})
	if err != nil {
		return err
	}
	for f, a := range addresses {
		gateway := unnumberedGateways[f]
		if numbered := w.config.PodGateways(); numbered != nil {
			gateway = numbered[f]
		}
		if err := addAddress(far, "eth0", host(a)); err != nil {
			return err
		}
		if err := addRoute(w.node, name, host(a), netip.Addr{}); err != nil {
			return err
		}
		if gateway.Is6() && !gateway.IsLinkLocalUnicast() {
			// Nothing on the link answers for it, as Cilium's program would.
			if err := addNeighbour(far, "eth0", gateway, unnumberedMAC); err != nil {
				return err
			}
		}
		if err := addDefault(far, "eth0", gateway); err != nil {
			return err
		}
	}
	return nil
}

// addNeighbour tells h for good who has an address.
func addNeighbour(h *netlink.Handle, link string, a netip.Addr, mac net.HardwareAddr) error {
	l, err := h.LinkByName(link)
	if err != nil {
		return fmt.Errorf("find link %s: %w", link, err)
	}
	n := &netlink.Neigh{LinkIndex: l.Attrs().Index, IP: a.AsSlice(), HardwareAddr: mac, State: unix.NUD_PERMANENT}
	if err := h.NeighAdd(n); err != nil {
		return fmt.Errorf("add neighbour %s to %s: %w", a, link, err)
	}
	return nil
}
