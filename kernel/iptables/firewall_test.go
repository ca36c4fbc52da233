package iptables_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/test/kerneltest"
)

// answer reads what a server of [kerneltest.Network.Serve] says.
func answer(c net.Conn) (string, error) {
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(20 * time.Second))
	_, _ = fmt.Fprintln(c, "?")
	line, err := bufio.NewReader(c).ReadString('\n')
	return strings.TrimSuffix(line, " ?\n"), err
}

// TestHeartbeatPassesFirewall: kproxy reaches its own listeners over the
// loopback where the host drops what it doesn't know, and nobody else does.
func TestHeartbeatPassesFirewall(t *testing.T) {
	t.Parallel()
	onEachKernel(t, func(s *scene) {
		firewall := s.variant.Program[s.Family]
		run(s.T, fmt.Sprintf("ip link set lo up; %s -P INPUT DROP", firewall))
		for _, l := range []uint16{options().TCPPort, options().UDPPort} {
			s.Serve(0, "userspace", l)
		}
		s.program(kerneltest.Plan(plan.ModeIPTables))
		loopback := netip.MustParseAddr(s.Addr("127.0.0.1", "::1"))
		for proto, port := range map[service.Protocol]uint16{service.TCP: options().TCPPort, service.UDP: options().UDPPort} {
			listener := netip.AddrPortFrom(loopback, port)
			c, err := dialAs(loopback, proto, listener)
			if err != nil {
				s.T.Errorf("%s: %v", proto, err)
				continue
			}
			if got, err := answer(c); got != "userspace "+loopback.String() {
				s.T.Errorf("%s: %q, %v", proto, got, err)
			}
			if _, _, err := s.Ask(0, proto, listener, false); !errors.Is(err, kerneltest.ErrTimeout) {
				s.T.Errorf("%s of another program: %v, want %v", proto, err, kerneltest.ErrTimeout)
			}
		}
	})
}

// TestWhoHearsOfRefusals: a live kproxy swallows an endpoint's refusal, unless
// it said that those of this endpoint are to pass.
func TestWhoHearsOfRefusals(t *testing.T) {
	t.Parallel()
	onEachKernel(t, func(s *scene) {
		closed := netip.AddrPortFrom(s.Address(s.Family, 2), 9)
		s.program(kerneltest.Plan(plan.ModeIPTables, kerneltest.Service("web", service.TCP,
			kerneltest.Cluster(s.Virtual(1)), kerneltest.Endpoints(closed.String()))))
		check := func(when string, want error) {
			s.T.Helper()
			if _, _, err := s.Ask(1, service.TCP, netip.MustParseAddrPort(s.Virtual(1)), errors.Is(want, kerneltest.ErrRefused)); !errors.Is(err, want) {
				s.T.Errorf("%s: %v, want %v", when, err, want)
			}
		}
		check("not alive", kerneltest.ErrRefused)
		if err := (&steering.Redirects{Store: s.sets}).Alive(time.Hour); err != nil {
			s.T.Fatal(err)
		}
		check("alive", kerneltest.ErrTimeout)
		for _, e := range []netip.AddrPort{netip.AddrPortFrom(closed.Addr(), 10), netip.AddrPortFrom(s.Address(s.Family, 3), 9)} {
			if err := (&steering.Redirects{Store: s.sets}).LetRefusals(e, time.Hour); err != nil {
				s.T.Fatal(err)
			}
		}
		check("others' are let through", kerneltest.ErrTimeout)
		if err := (&steering.Redirects{Store: s.sets}).LetRefusals(closed, time.Hour); err != nil {
			s.T.Fatal(err)
		}
		check("let through", kerneltest.ErrRefused)
	})
}

// TestForwardEndsWithReject: a host whose FORWARD chain ends with a rule that
// rejects everything lets connections to endpoints through, whether that rule
// was there first or came in front of kproxy's; and the host's other rules win.
func TestForwardEndsWithReject(t *testing.T) {
	t.Parallel()
	onEachKernel(t, func(s *scene) {
		firewall := s.variant.Program[s.Family]
		reject := s.Addr("icmp-host-prohibited", "icmp6-adm-prohibited")
		established := fmt.Sprintf("%s -I FORWARD 1 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT; ", firewall)
		terminal := fmt.Sprintf("-m comment --comment end -j REJECT --reject-with %s; ", reject)
		p := kerneltest.Plan(plan.ModeIPTables, kerneltest.Service("web", service.TCP, kerneltest.Cluster(s.Virtual(1)), s.Endpoints(2)))
		check := func(when string, want map[string]int) {
			s.T.Helper()
			s.Expect(when, want, s.Asks(2, 1, service.TCP, s.Virtual(1)))
			have, err := s.backend.Observe(context.Background())
			if err != nil {
				s.T.Fatal(err)
			}
			if diff := cmp.Diff(kernel.Ops{}, kernel.Diff(have, s.have)); diff != "" {
				s.T.Errorf("%s: not in place (-want +got):\n%s", when, diff)
			}
		}
		run(s.T, established+firewall+" -A FORWARD "+terminal)
		s.program(p)
		check("rule was there first", map[string]int{"two": 2})

		run(s.T, firewall+" -I FORWARD 1 "+terminal+established)
		s.Expect("behind it", 0, s.Asks(1, 1, service.TCP, s.Virtual(1))["two"])
		have, err := s.backend.Observe(context.Background())
		if err != nil {
			s.T.Fatal(err)
		}
		s.have = have
		s.program(p)
		check("moved", map[string]int{"two": 2})

		run(s.T, fmt.Sprintf("%s -I FORWARD 1 -s %s -j DROP", firewall, s.Address(s.Family, 1)))
		s.Unanswered("a rule of the host", 1, service.TCP, s.Virtual(1))
	})
}

// TestForwardAcceptsOnlyEndpoints: where FORWARD drops what it doesn't know,
// connections that others' rules rewrote aren't let through, and those to an
// endpoint are for as long as they last.
func TestForwardAcceptsOnlyEndpoints(t *testing.T) {
	t.Parallel()
	onEachKernel(t, func(s *scene) {
		firewall := s.variant.Program[s.Family]
		foreign := netip.MustParseAddrPort(s.Virtual(9))
		run(s.T, fmt.Sprintf("%[1]s -P FORWARD DROP; %[1]s -A FORWARD -m conntrack --ctstate NEW -j ACCEPT; "+
			"%[1]s -t nat -A PREROUTING -d %[2]s -p tcp -j DNAT --to-destination %[3]s", firewall, foreign.Addr(),
			netip.AddrPortFrom(s.Address(s.Family, 3), 8080)))
		udp := func(host int) *plan.Plan {
			return kerneltest.Plan(plan.ModeIPTables, kerneltest.Service("dns", service.UDP, kerneltest.Cluster(s.Virtual(1)), s.Endpoints(host)))
		}
		s.program(udp(2))
		if _, _, err := s.Ask(1, service.TCP, foreign, false); !errors.Is(err, kerneltest.ErrTimeout) {
			s.T.Errorf("rewritten by others: %v, want %v", err, kerneltest.ErrTimeout)
		}
		var c net.Conn
		s.On(1, func() {
			var err error
			if c, err = net.Dial("udp", s.Virtual(1)); err != nil {
				s.T.Fatal(err)
			}
		})
		defer c.Close()
		ask := func(when string) {
			s.T.Helper()
			_ = c.SetDeadline(time.Now().Add(20 * time.Second))
			_, _ = c.Write([]byte("?"))
			buf := make([]byte, 100)
			n, err := c.Read(buf)
			if got := string(buf[:n]); !strings.HasPrefix(got, "two ") {
				s.T.Errorf("%s: %q, %v; want an answer of two", when, got, err)
			}
		}
		ask("new")
		ask("established")
		s.program(udp(3))
		ask("after the endpoint left the service")
	})
}
