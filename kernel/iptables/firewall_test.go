package iptables_test

import (
	"bufio"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"kproxy.dev/kproxy/kernel/kerneltest"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// answer reads what a server of [kerneltest.Network.Serve] says.
func answer(c net.Conn, proto service.Protocol) (string, error) {
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(time.Second))
	if proto == service.UDP {
		_, _ = c.Write([]byte("?"))
	}
	line, err := bufio.NewReader(c).ReadString('\n')
	return strings.TrimSpace(line), err
}

// TestHeartbeatPassesFirewall: kproxy reaches its own listeners over the
// loopback where the host drops what it doesn't know, and nobody else does.
func TestHeartbeatPassesFirewall(t *testing.T) {
	onEachKernel(t, func(s *scene) {
		firewall := s.variant.Program[s.family]
		run(s.t, fmt.Sprintf("ip link set lo up; %s -P INPUT DROP", firewall))
		for _, l := range []uint16{options().TCPPort, options().UDPPort} {
			s.Serve(0, "userspace", l)
		}
		s.program(kerneltest.Plan(plan.ModeIPTables))
		loopback := netip.MustParseAddr(s.addr("127.0.0.1", "::1"))
		for proto, port := range map[service.Protocol]uint16{service.TCP: options().TCPPort, service.UDP: options().UDPPort} {
			listener := netip.AddrPortFrom(loopback, port)
			c, err := dialAs(loopback, proto, listener)
			if err != nil {
				s.t.Errorf("%s: %v", proto, err)
				continue
			}
			if got, err := answer(c, proto); got != "userspace "+loopback.String() {
				s.t.Errorf("%s: %q, %v", proto, got, err)
			}
			if _, _, err := s.Ask(0, proto, listener); !errors.Is(err, kerneltest.ErrTimeout) {
				s.t.Errorf("%s of somebody else: %v, want %v", proto, err, kerneltest.ErrTimeout)
			}
		}
	})
}
