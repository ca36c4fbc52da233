package userspace

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/service"
)

// The network of packet tests: the test process is the node, in the namespace
// that TestMain made; a client and a host of endpoints are in namespaces
// without a name, which go with the last file descriptor. IPv4 addresses are
// 10.<net>.0.<host>, IPv6 ones fd<net>::<host>; the node is host 1.
const (
	clientNet   = 1
	endpointNet = 2
)

func addressIn(f service.Family, net, host int) netip.Addr {
	if f == service.IPv6 {
		return netip.MustParseAddr(fmt.Sprintf("fd%02d::%d", net, host))
	}
	return netip.MustParseAddr(fmt.Sprintf("10.%d.0.%d", net, host))
}

func prefixBits(f service.Family) int {
	return map[service.Family]int{service.IPv4: 24, service.IPv6: 64}[f]
}

// namespace is another host of the test network.
type namespace struct{ handle netns.NsHandle }

// newHost makes a namespace linked to the node, as host 2 and 3 of network n.
func newHost(t testing.TB, n int) namespace {
	t.Helper()
	ns := namespace{-1}
	made := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with this goroutine
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			made <- err
			return
		}
		var err error
		ns.handle, err = netns.Get()
		made <- err
	}()
	must(t, <-made)
	t.Cleanup(func() { ns.handle.Close() })
	near, far := fmt.Sprintf("kpus-%d", n), fmt.Sprintf("kpus-%dp", n)
	attrs := netlink.NewLinkAttrs()
	attrs.Name = near
	must(t, netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: far, PeerNamespace: netlink.NsFd(int(ns.handle))}))
	t.Cleanup(func() { netlink.LinkDel(&netlink.Veth{LinkAttrs: attrs}) })
	must(t, configure(near, n, 1))
	ns.do(t, func() error {
		return errors.Join(loopbackUp(), configure(far, n, 2, 3), defaultRoutes(far, n, 1))
	})
	for _, f := range service.Families {
		eventually(t, "the new host is reachable", func() bool { // IPv6 takes a second to settle
			_, err := tryDial(netip.AddrPortFrom(addressIn(f, n, 2), 1))
			return errors.Is(err, unix.ECONNREFUSED)
		})
	}
	return ns
}

// configure gives an interface addresses in both families, and brings it up.
func configure(name string, n int, hosts ...int) error {
	link, err := netlink.LinkByName(name)
	if err != nil {
		return err
	}
	for _, f := range service.Families {
		if f == service.IPv6 { // of equals, the kernel prefers the oldest here, the newest there
			slices.Reverse(hosts)
		}
		for _, h := range hosts {
			a := netip.PrefixFrom(addressIn(f, n, h), prefixBits(f))
			err := netlink.AddrAdd(link, &netlink.Addr{IPNet: ipNet(a), Flags: unix.IFA_F_NODAD})
			if err != nil {
				return fmt.Errorf("add %s: %w", a, err)
			}
		}
	}
	return netlink.LinkSetUp(link)
}

// defaultRoutes routes everything over an interface, by way of gateway.
func defaultRoutes(name string, n, gateway int) error {
	link, err := netlink.LinkByName(name)
	if err != nil {
		return err
	}
	for _, f := range service.Families {
		gw := net.IP(addressIn(f, n, gateway).AsSlice())
		if err := netlink.RouteAdd(&netlink.Route{LinkIndex: link.Attrs().Index, Gw: gw}); err != nil {
			return err
		}
	}
	return nil
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// do runs f in the namespace.
func (ns namespace) do(t testing.TB, f func() error) {
	t.Helper()
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked, see newHost
		if err := netns.Set(ns.handle); err != nil {
			done <- err
			return
		}
		done <- f()
	}()
	must(t, <-done)
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// packets is a node that serves, with a client and a host of endpoints.
type packets struct {
	client, host namespace
	server       *Server
}

// servicePort is the port of every service in packet tests.
const servicePort = 80

// serviceAddress is service n's address. Nothing has it.
func serviceAddress(f service.Family, n int) netip.AddrPort {
	return netip.AddrPortFrom(addressIn(f, 96, n), servicePort)
}

// newPackets makes the network, a Server, and the rules that kproxy programs
// around it: redirect, and the way back for transparent sockets.
func newPackets(t testing.TB) *packets {
	t.Helper()
	for _, sysctl := range []string{"net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding"} {
		must(t, os.WriteFile("/proc/sys/"+sysctl, []byte("1"), 0))
	}
	p := &packets{client: newHost(t, clientNet), host: newHost(t, endpointNet)}
	must(t, defaultRoutes("kpus-1", clientNet, 2)) // for what the node itself sends to services
	p.server = start(t, Config{Origin: conntrackOrigin{}, TCPOrigin: kernelOrigin}, testPlan())
	tcp, udp := p.server.Ports()
	for _, f := range service.Families {
		tables, ip := "iptables", "-4"
		services := netip.PrefixFrom(addressIn(f, 96, 0), prefixBits(f)-8).Masked().String()
		if f == service.IPv6 {
			tables, ip = "ip6tables", "-6"
		}
		for _, r := range rules(services, tcp, udp) {
			table, rule := r[0], r[1:]
			run(t, append([]string{tables, "-w", "-t", table, "-A"}, rule...)...)
			t.Cleanup(func() { run(t, append([]string{tables, "-w", "-t", table, "-D"}, rule...)...) })
		}
		run(t, "ip", ip, "rule", "add", "fwmark", "0x1000/0x1800", "lookup", "10249")
		run(t, "ip", ip, "route", "add", "local", "default", "dev", "lo", "table", "10249")
		t.Cleanup(func() {
			run(t, "ip", ip, "rule", "del", "fwmark", "0x1000/0x1800", "lookup", "10249")
			run(t, "ip", ip, "route", "flush", "table", "10249")
		})
	}
	return p
}

// rules returns the iptables rules that the portal and the marks amount to, each with its table.
func rules(services string, tcp, udp uint16) [][]string {
	var out [][]string
	for _, chain := range []string{"PREROUTING", "OUTPUT"} {
		out = append(out,
			[]string{"nat", chain, "-m", "mark", "--mark", "0x1800/0x1800", "-j", "RETURN"},
			[]string{"nat", chain, "-d", services, "-p", "tcp", "-j", "REDIRECT", "--to-ports", strconv.Itoa(int(tcp))},
			[]string{"nat", chain, "-d", services, "-p", "udp", "-j", "REDIRECT", "--to-ports", strconv.Itoa(int(udp))},
			[]string{"nat", chain, "-p", "tcp", "--dport", "30080", "-m", "addrtype", "--dst-type", "LOCAL", "-j", "REDIRECT", "--to-ports", strconv.Itoa(int(tcp))},
		)
	}
	for _, proto := range []string{"tcp", "udp"} {
		out = append(out, []string{"mangle", "PREROUTING", "-p", proto, "-m", "socket", "--transparent", "-j", "MARK", "--set-xmark", "0x1000/0x1800"})
	}
	return append(out,
		[]string{"mangle", "OUTPUT", "-m", "mark", "--mark", "0x1800/0x1800", "-j", "CONNMARK", "--set-xmark", "0x1000/0x1000"},
		[]string{"mangle", "OUTPUT", "-m", "connmark", "--mark", "0x1000/0x1000", "-m", "conntrack", "--ctdir", "REPLY", "-j", "MARK", "--set-xmark", "0x1000/0x1800"},
	)
}

// conntrackOrigin looks flows up by listing all of them, which will do here.
type conntrackOrigin struct{}

func (o conntrackOrigin) LookupAll(_ service.Protocol, flows [][2]netip.AddrPort, found func(i int, orig, client netip.AddrPort, err error)) {
	for i, f := range flows {
		orig, client, err := o.lookup(f[0], f[1])
		found(i, orig, client, err)
	}
}

func (conntrackOrigin) lookup(local, client netip.AddrPort) (orig, real netip.AddrPort, err error) {
	family := netlink.InetFamily(unix.AF_INET)
	if local.Addr().Is6() {
		family = unix.AF_INET6
	}
	flows, err := netlink.ConntrackTableList(netlink.ConntrackTable, family)
	if err != nil {
		return orig, real, err
	}
	for _, f := range flows {
		if f.Forward.Protocol == unix.IPPROTO_UDP && endOf(f.Reverse.SrcIP, f.Reverse.SrcPort) == local && endOf(f.Reverse.DstIP, f.Reverse.DstPort) == client {
			return endOf(f.Forward.DstIP, f.Forward.DstPort), endOf(f.Forward.SrcIP, f.Forward.SrcPort), nil
		}
	}
	return orig, real, errors.New("no such flow")
}

func endOf(ip net.IP, port uint16) netip.AddrPort {
	a, _ := netip.AddrFromSlice(ip)
	return netip.AddrPortFrom(a.Unmap(), port)
}

// serveTCP serves a TCP endpoint that answers each connection with the
// client's address as it sees it, in a namespace or, without one, on the node.
func (p *packets) serveTCP(t testing.TB, on *namespace, a netip.Addr) netip.AddrPort {
	t.Helper()
	var l net.Listener
	listen := func() (err error) {
		l, err = net.Listen("tcp", netip.AddrPortFrom(a, 0).String())
		return err
	}
	if on == nil {
		must(t, listen())
	} else {
		on.do(t, listen)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			fmt.Fprintf(c, "%s", addrPort(c.RemoteAddr()).Addr())
			c.Close()
		}
	}()
	return addrPort(l.Addr())
}

// serveUDP is serveTCP for datagrams; the answer is name and address.
func (p *packets) serveUDP(t testing.TB, on *namespace, a netip.Addr, name string) netip.AddrPort {
	t.Helper()
	var c *net.UDPConn
	listen := func() (err error) {
		c, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(a, 0)))
		return err
	}
	if on == nil {
		must(t, listen())
	} else {
		on.do(t, listen)
	}
	t.Cleanup(func() { c.Close() })
	go func() {
		b := make([]byte, datagramSize)
		for {
			_, from, err := c.ReadFromUDPAddrPort(b)
			if err != nil {
				return
			}
			c.WriteToUDPAddrPort(fmt.Appendf(nil, "%s%s", name, from.Addr().Unmap()), from)
		}
	}()
	return addrPort(c.LocalAddr())
}

// dialFrom connects from a namespace, or from the node when on is nil.
func dialFrom(on *namespace, t testing.TB, to netip.AddrPort) (c *net.TCPConn, err error) {
	t.Helper()
	if on == nil {
		return tryDial(to)
	}
	on.do(t, func() error {
		c, err = tryDial(to)
		return nil
	})
	return c, err
}

// udpFrom opens a socket that isn't connected, in a namespace or on the node.
func udpFrom(on *namespace, t testing.TB, f service.Family) (c *net.UDPConn) {
	t.Helper()
	open := func() (err error) {
		c, err = net.ListenUDP("udp"+map[service.Family]string{service.IPv4: "4", service.IPv6: "6"}[f], nil)
		return err
	}
	if on == nil {
		must(t, open())
	} else {
		on.do(t, open)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// askTo sends a datagram to an address until there is an answer from it.
func askTo(t testing.TB, c *net.UDPConn, to netip.AddrPort) string {
	t.Helper()
	b := make([]byte, datagramSize)
	for end := time.Now().Add(patience); time.Now().Before(end); {
		if _, err := c.WriteToUDPAddrPort([]byte("x"), to); err != nil {
			t.Fatal(err)
		}
		c.SetReadDeadline(time.Now().Add(500 * time.Millisecond))
		n, from, err := c.ReadFromUDPAddrPort(b)
		if err != nil {
			continue
		}
		if netip.AddrPortFrom(from.Addr().Unmap(), from.Port()) == to { // else an answer that came late
			return string(b[:n])
		}
	}
	t.Fatalf("no answer from %s", to)
	return ""
}
