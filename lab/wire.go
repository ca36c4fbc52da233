package lab

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

func createNamespace(ns *Namespace) error {
	err := onThrowawayThread(func() error {
		h, err := netns.NewNamed(ns.Name)
		if err != nil {
			return err
		}
		return h.Close()
	})
	if err != nil {
		return fmt.Errorf("create namespace %s: %w", ns.Name, err)
	}
	return nil
}

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
	return writeSysctls(n, values)
}

func writeSysctls(ns *Namespace, values [][2]string) error {
	return ns.Do(func() error {
		for _, v := range values {
			// /proc/sys/net shows the namespace of the thread that opens it.
			if err := os.WriteFile(filepath.Join("/proc/sys/net", v[0]), []byte(v[1]), 0); err != nil {
				return fmt.Errorf("set sysctl in %s: %w", ns.Name, err)
			}
		}
		return nil
	})
}

// wiring holds what connecting the namespaces needs: one netlink socket each.
type wiring struct {
	config        Config
	nodeNamespace *Namespace
	node          *netlink.Handle
	nodeFD        netns.NsHandle
	closers       []func()
}

func (n *Network) wire() error {
	w := &wiring{config: n.Config, nodeNamespace: n.Node}
	defer w.close()
	var err error
	if w.node, w.nodeFD, err = w.open(n.Node); err != nil {
		return err
	}
	if err := loopbackUp(w.node); err != nil {
		return fmt.Errorf("set up node: %w", err)
	}
	if err := w.client(n.Client); err != nil {
		return fmt.Errorf("wire client: %w", err)
	}
	if err := w.pods(); err != nil {
		return fmt.Errorf("wire node to backends: %w", err)
	}
	for i, b := range n.Backends {
		if err := w.backend(b.Namespace, b.Name, i+1); err != nil {
			return fmt.Errorf("wire backend %s: %w", b.Name, err)
		}
	}
	if n.Config.HostAccess {
		if err := w.host(); err != nil {
			return fmt.Errorf("wire host: %w", err)
		}
	}
	return nil
}

func (w *wiring) close() {
	for _, c := range w.closers {
		c()
	}
}

// Join gives a node and a host a network between them, by a link that the node knows by a
// name and the host as eth0. The addresses are the host's; those before them are the node's,
// and the host's way to everywhere.
func Join(node, host *Namespace, name string, addresses ...netip.Prefix) (err error) {
	w := &wiring{nodeNamespace: node}
	defer w.close()
	if w.node, w.nodeFD, err = w.open(node); err != nil {
		return err
	}
	far, err := w.link(host, name, nil)
	for _, a := range addresses {
		gateway := a.Addr().Prev()
		if err == nil {
			err = addAddress(w.node, name, netip.PrefixFrom(gateway, a.Bits()))
		}
		if err == nil {
			err = addAddress(far, "eth0", a)
		}
		if err == nil {
			err = addDefault(far, "eth0", gateway)
		}
	}
	return err
}

func (w *wiring) open(ns *Namespace) (*netlink.Handle, netns.NsHandle, error) {
	fd, err := netns.GetFromPath(ns.Path())
	if err != nil {
		return nil, fd, fmt.Errorf("open namespace %s: %w", ns.Name, err)
	}
	w.closers = append(w.closers, func() { fd.Close() })
	h, err := netlink.NewHandleAt(fd, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fd, fmt.Errorf("open netlink in %s: %w", ns.Name, err)
	}
	w.closers = append(w.closers, h.Close)
	return h, fd, nil
}

func (w *wiring) client(ns *Namespace) error {
	far, err := w.link(ns, "client", nil)
	if err != nil {
		return err
	}
	for i, a := range w.config.NodeAddresses() {
		bits := clientBits(i)
		if err := addAddress(w.node, "client", netip.PrefixFrom(a, bits)); err != nil {
			return err
		}
		for c := range w.config.Clients {
			if a.Is6() {
				// The kernel prefers the newest IPv6 address and the oldest IPv4
				// one; the first client's is to be the default of both.
				c = w.config.Clients - 1 - c
			}
			if err := addAddress(far, "eth0", netip.PrefixFrom(w.config.ClientAddresses(c)[i], bits)); err != nil {
				return err
			}
		}
		if err := addDefault(far, "eth0", a); err != nil {
			return err
		}
		if err := addDefault(w.node, "client", w.config.ClientAddresses(0)[i]); err != nil {
			return err
		}
	}
	return nil
}

func clientBits(family int) int {
	if family == 0 {
		return ClientCIDR4.Bits()
	}
	return ClientCIDR6.Bits()
}

// host joins the caller's namespace to the node.
func (w *wiring) host() error {
	here, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("open netlink: %w", err)
	}
	defer here.Close()
	veth := &netlink.Veth{
		LinkAttrs:     netlink.LinkAttrs{Name: w.config.hostLink()},
		PeerName:      "host",
		PeerNamespace: netlink.NsFd(w.nodeFD),
	}
	if err := here.LinkAdd(veth); err != nil {
		return fmt.Errorf("add link %s: %w", veth.Name, err)
	}
	subnet := w.config.hostSubnet()
	if err := addAddress(here, veth.Name, netip.PrefixFrom(nth(subnet, 1), 30)); err != nil {
		return err
	}
	if err := addAddress(w.node, "host", netip.PrefixFrom(nth(subnet, 2), 30)); err != nil {
		return err
	}
	return errors.Join(setUp(here, veth.Name), setUp(w.node, "host"))
}

// link joins ns (its end is eth0) to the node (its end is called name and has mac,
// or any if nil), brings both ends and the loopback up, and returns a netlink handle
// in ns.
func (w *wiring) link(ns *Namespace, name string, mac net.HardwareAddr) (*netlink.Handle, error) {
	far, fd, err := w.open(ns)
	if err != nil {
		return nil, err
	}
	veth := &netlink.Veth{
		LinkAttrs:     netlink.LinkAttrs{Name: name, HardwareAddr: mac},
		PeerName:      "eth0",
		PeerNamespace: netlink.NsFd(fd),
	}
	if err := w.node.LinkAdd(veth); err != nil {
		return nil, fmt.Errorf("add link %s: %w", name, err)
	}
	return far, errors.Join(loopbackUp(far), setUp(far, "eth0"), setUp(w.node, name))
}

func loopbackUp(h *netlink.Handle) error { return setUp(h, "lo") }

func setUp(h *netlink.Handle, name string) error {
	l, err := h.LinkByName(name)
	if err != nil {
		return fmt.Errorf("find link %s: %w", name, err)
	}
	if err := h.LinkSetUp(l); err != nil {
		return fmt.Errorf("set link %s up: %w", name, err)
	}
	return nil
}

func addAddress(h *netlink.Handle, link string, p netip.Prefix) error {
	l, err := h.LinkByName(link)
	if err != nil {
		return fmt.Errorf("find link %s: %w", link, err)
	}
	a := &netlink.Addr{IPNet: ipNet(p)}
	if p.Addr().Is6() {
		a.Flags = unix.IFA_F_NODAD
	}
	if err := h.AddrAdd(l, a); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("add address %s to %s: %w", p, link, err)
	}
	return nil
}

// addDefault adds the default route of the gateway's family. It is onlink: a
// backend's own address is a /32, so its gateway is in no connected network.
func addDefault(h *netlink.Handle, link string, gateway netip.Addr) error {
	return addRoute(h, link, netip.PrefixFrom(unspecified(gateway), 0), gateway)
}

func addRoute(h *netlink.Handle, link string, dst netip.Prefix, gateway netip.Addr) error {
	l, err := h.LinkByName(link)
	if err != nil {
		return fmt.Errorf("find link %s: %w", link, err)
	}
	r := &netlink.Route{LinkIndex: l.Attrs().Index, Dst: ipNet(dst)}
	if gateway.IsValid() {
		r.Gw = gateway.AsSlice()
		r.Flags = unix.RTNH_F_ONLINK
	} else {
		r.Scope = netlink.SCOPE_LINK
	}
	if err := h.RouteAdd(r); err != nil {
		return fmt.Errorf("add route to %s by %s: %w", dst, link, err)
	}
	return nil
}

func host(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

func unspecified(a netip.Addr) netip.Addr {
	if a.Is4() {
		return netip.IPv4Unspecified()
	}
	return netip.IPv6Unspecified()
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}
