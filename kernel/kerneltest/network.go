package kerneltest

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/service"
)

// Network is a node between hosts, each in a namespace of its own. The test is
// on the node. Host i has addresses 10.<i>.0.2 and fd00:<i>::2, the node's on
// the same link end in 1, and it is the host's default route.
type Network struct {
	t     testing.TB
	node  netns.NsHandle
	hosts []netns.NsHandle
}

// NewNetwork builds a network with hosts 1 to n.
func NewNetwork(t testing.TB, n int) *Network {
	t.Helper()
	net := &Network{t: t, node: Namespace(t)}
	net.sysctl("ipv4/ip_forward", "1")
	net.sysctl("ipv6/conf/all/forwarding", "1")
	net.sysctl("ipv6/conf/default/accept_dad", "0")
	for i := 1; i <= n; i++ {
		net.addHost(i)
	}
	// Service addresses are nobody's; a node needs some route to try them.
	for _, f := range service.Families {
		net.must(netlink.RouteAdd(&netlink.Route{Gw: net.Address(f, n).AsSlice()}))
	}
	return net
}

func (n *Network) must(err error) {
	n.t.Helper()
	if err != nil {
		n.t.Fatal(err)
	}
}

func (n *Network) sysctl(name, value string) {
	n.t.Helper()
	n.must(os.WriteFile("/proc/sys/net/"+name, []byte(value), 0o644))
}

func (n *Network) addHost(i int) {
	n.t.Helper()
	host, err := netns.New() // and moves there
	n.must(err)
	n.sysctl("ipv6/conf/default/accept_dad", "0") // else link-local addresses take a second
	n.must(netns.Set(n.node))
	n.t.Cleanup(func() { host.Close() })
	n.hosts = append(n.hosts, host)
	name := linkName(i)
	n.must(netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name}, PeerName: "node"}))
	peer, err := netlink.LinkByName("node")
	n.must(err)
	n.must(netlink.LinkSetNsFd(peer, int(host)))
	n.address(name, i, 1)
	n.On(i, func() {
		lo, err := netlink.LinkByName("lo")
		n.must(err)
		n.must(netlink.LinkSetUp(lo))
		n.address("node", i, 2)
		link, err := netlink.LinkByName("node")
		n.must(err)
		for _, f := range service.Families {
			n.must(netlink.RouteAdd(&netlink.Route{LinkIndex: link.Attrs().Index, Gw: n.NodeAddress(f, i).AsSlice()}))
		}
	})
}

func (n *Network) address(link string, i, last int) {
	n.t.Helper()
	l, err := netlink.LinkByName(link)
	n.must(err)
	for _, a := range []string{fmt.Sprintf("10.%d.0.%d/24", i, last), fmt.Sprintf("fd00:%d::%d/64", i, last)} {
		addr, err := netlink.ParseAddr(a)
		n.must(err)
		addr.Flags = unix.IFA_F_NODAD
		n.must(netlink.AddrAdd(l, addr))
	}
	n.must(netlink.LinkSetUp(l))
}

// linkName is what the node calls its link to host i.
func linkName(i int) string { return fmt.Sprintf("host%d", i) }

// Address is host i's address.
func (n *Network) Address(f service.Family, i int) netip.Addr {
	if f == service.IPv6 {
		return netip.MustParseAddr(fmt.Sprintf("fd00:%d::2", i))
	}
	return netip.MustParseAddr(fmt.Sprintf("10.%d.0.2", i))
}

// NodeAddress is the node's address on host i's link.
func (n *Network) NodeAddress(f service.Family, i int) netip.Addr { return n.Address(f, i).Prev() }

// On runs f on host i; 0 is the node.
func (n *Network) On(i int, f func()) {
	n.t.Helper()
	if i == 0 {
		f()
		return
	}
	n.must(netns.Set(n.hosts[i-1]))
	defer func() { n.must(netns.Set(n.node)) }()
	f()
}

// Serve answers on host i, in both families, TCP and UDP: "name client-address".
func (n *Network) Serve(i int, name string, port uint16) {
	n.t.Helper()
	n.On(i, func() {
		for _, network := range []string{"tcp4", "tcp6"} {
			l, err := net.Listen(network, fmt.Sprintf(":%d", port))
			n.must(err)
			n.t.Cleanup(func() { l.Close() })
			go serveTCP(l, name)
		}
		for _, network := range []string{"udp4", "udp6"} {
			c, err := net.ListenUDP(network, &net.UDPAddr{Port: int(port)})
			n.must(err)
			n.t.Cleanup(func() { c.Close() })
			n.must(tellAddresses(c, network))
			go serveUDP(c, name)
		}
	})
}

func serveTCP(l net.Listener, name string) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		fmt.Fprintf(c, "%s %s\n", name, hostOf(c.RemoteAddr()))
		c.Close()
	}
}

// serveUDP answers from the address that it was asked at: the one that a redirect
// chose, where there was one, or else conntrack wouldn't know the answer for one.
func serveUDP(c *net.UDPConn, name string) {
	buf, oob := make([]byte, 16), make([]byte, 64)
	for {
		_, n, _, from, err := c.ReadMsgUDPAddrPort(buf, oob)
		if err != nil {
			return
		}
		// in_pktinfo begins with the interface, in6_pktinfo ends with it; any will do.
		at := unix.CmsgLen(0)
		if !from.Addr().Is4() {
			at += net.IPv6len
		}
		if n >= at+4 {
			clear(oob[at : at+4])
		}
		_, _, _ = c.WriteMsgUDPAddrPort([]byte(name+" "+from.Addr().String()+"\n"), oob[:n], from)
	}
}

// tellAddresses asks for the address that each datagram was sent to.
func tellAddresses(c *net.UDPConn, network string) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var set error
	err = raw.Control(func(fd uintptr) {
		// An answer may have to come from [steering.ListenerAddress].
		if network == "udp6" {
			if set = unix.SetsockoptInt(int(fd), unix.SOL_IPV6, unix.IPV6_FREEBIND, 1); set != nil {
				return
			}
		}
		if network == "udp4" {
			set = unix.SetsockoptInt(int(fd), unix.SOL_IP, unix.IP_PKTINFO, 1)
		} else {
			set = unix.SetsockoptInt(int(fd), unix.SOL_IPV6, unix.IPV6_RECVPKTINFO, 1)
		}
	})
	return errors.Join(err, set)
}

func hostOf(a net.Addr) string {
	ap, err := netip.ParseAddrPort(a.String())
	if err != nil {
		return a.String()
	}
	return ap.Addr().Unmap().String()
}

// Errors of Ask.
var (
	ErrRefused = errors.New("refused")
	ErrTimeout = errors.New("no answer")
)

// askTimeout is long enough on a busy machine for an answer, and short enough
// to wait for none. Where everything is slower (test/vm/run.sh says so), it is
// longer.
var askTimeout = 700 * time.Millisecond * slowness()

func slowness() time.Duration {
	if n, err := strconv.Atoi(os.Getenv("KPROXY_E2E_SLOW")); err == nil && n > 1 {
		return time.Duration(n)
	}
	return 1
}

// Ask connects from host i to address and returns the answer: who served, and
// which client address it saw.
func (n *Network) Ask(i int, proto service.Protocol, to netip.AddrPort) (server, client string, err error) {
	n.On(i, func() { server, client, err = ask(proto, to) })
	return server, client, err
}

func ask(proto service.Protocol, to netip.AddrPort) (server, client string, err error) {
	if proto == service.SCTP {
		return askSCTP(to)
	}
	d := net.Dialer{Timeout: askTimeout}
	if proto == service.UDP {
		d.LocalAddr = &net.UDPAddr{Port: nextPort()}
	}
	c, err := d.Dial(proto.String(), to.String())
	if err == nil {
		server, client, err = exchange(c)
	}
	var timeout net.Error
	switch {
	case errors.Is(err, unix.ECONNREFUSED):
		err = ErrRefused
	case errors.As(err, &timeout) && timeout.Timeout():
		err = ErrTimeout
	}
	return server, client, err
}

// asked counts the clients that had a port from nextPort.
var asked atomic.Uint32

// nextPort returns a port that no UDP client had lately. A port that the kernel
// chose could be that of a client before, whose flow the kernel still remembers (30
// s): the new client would go where that one went, without a choice being made.
func nextPort() int { return 10_000 + int(asked.Add(1)%20_000) }

func exchange(c net.Conn) (server, client string, err error) {
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(askTimeout))
	if strings.HasPrefix(c.RemoteAddr().Network(), "udp") {
		if _, err := c.Write([]byte("?")); err != nil {
			return "", "", err
		}
	}
	line, err := bufio.NewReader(c).ReadString('\n')
	if err != nil && !errors.Is(err, io.EOF) {
		return "", "", err
	}
	server, client, _ = strings.Cut(strings.TrimSpace(line), " ")
	return server, client, nil
}
