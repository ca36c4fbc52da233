package iptables_test

import (
	"net"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/test/kerneltest"
)

// dialAs connects from the node to an endpoint with a client's address, as
// userspace does where a plan doesn't masquerade.
func dialAs(client netip.Addr, proto service.Protocol, to netip.AddrPort) (net.Conn, error) {
	return dialFrom(netip.AddrPortFrom(client, 0), proto, to)
}

func dialFrom(client netip.AddrPort, proto service.Protocol, to netip.AddrPort) (net.Conn, error) {
	level, option := unix.SOL_IP, unix.IP_TRANSPARENT
	if client.Addr().Is6() {
		level, option = unix.SOL_IPV6, unix.IPV6_TRANSPARENT
	}
	d := net.Dialer{Timeout: time.Second, Control: func(_, _ string, c syscall.RawConn) (err error) {
		ctlErr := c.Control(func(fd uintptr) {
			if err = unix.SetsockoptInt(int(fd), level, option, 1); err == nil {
				err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MARK, int(kernel.DefaultMarks().Own()))
			}
		})
		if err == nil {
			err = ctlErr
		}
		return err
	}}
	d.LocalAddr = net.TCPAddrFromAddrPort(client)
	if proto == service.UDP {
		d.LocalAddr = net.UDPAddrFromAddrPort(client)
	}
	return d.Dial(proto.String(), to.String())
}

// TestEndpointsSeeTheClientThroughUserspace: a transparent socket of the node
// gets its answers, from endpoints elsewhere and on the node itself, although
// the address is another host's.
func TestEndpointsSeeTheClientThroughUserspace(t *testing.T) {
	t.Parallel()
	onEachKernel(t, func(s *scene) {
		s.Serve(0, "node", 8080)
		// The endpoints' own address is a service as well, to show that
		// kproxy's connections aren't caught by its own rules.
		self := netip.AddrPortFrom(s.Address(s.Family, 2), 8080)
		trap := kerneltest.Service("trap", service.TCP, kerneltest.External(self.String()), s.Endpoints(3))
		kerneltest.InUserspace(trap)
		s.program(kerneltest.Plan(plan.ModeIPTables, trap))
		if err := (&steering.Redirects{Store: s.sets}).Alive(time.Hour); err != nil {
			s.T.Fatal(err)
		}
		if err := steering.DefaultRouting().Ensure(); err != nil {
			s.T.Fatal(err)
		}
		client := s.Address(s.Family, 1)
		for _, proto := range []service.Protocol{service.TCP, service.UDP} {
			for name, to := range map[string]netip.AddrPort{
				"two":  self,
				"node": netip.AddrPortFrom(s.NodeAddress(s.Family, 1), 8080),
			} {
				c, err := dialAs(client, proto, to)
				if err != nil {
					s.T.Errorf("%s to %s: %v", proto, name, err)
					continue
				}
				got, err := answer(c)
				if want := name + " " + client.String(); err != nil || got != want {
					s.T.Errorf("%s to %s: %q, %v; want %q", proto, name, got, err, want)
				}
			}
		}
	})
}
