package iptables_test

import (
	"fmt"
	"net"
	"net/netip"
	"testing"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/test/kerneltest"
)

// TestInvalidDropped: what conntrack can't place is dropped and counted where
// it comes from an endpoint, usable or on its way out, and passes where it comes
// from somebody else.
func TestInvalidDropped(t *testing.T) {
	t.Parallel()
	onEachKernel(t, func(s *scene) {
		count := func() uint64 {
			s.T.Helper()
			counts, err := s.backend.Counts(s.T.Context())
			if err != nil {
				s.T.Fatal(err)
			}
			return counts.Invalid
		}
		s.Expect("dropped without rules", uint64(0), count())
		at := func(host int) string { return netip.AddrPortFrom(s.Address(s.Family, host), 8080).String() }
		s.program(kerneltest.Plan(plan.ModeIPTables, kerneltest.Service("web", service.TCP,
			kerneltest.Cluster(s.Virtual(1)), kerneltest.Endpoints(at(2)), kerneltest.Unusable(at(3), false))))
		want := uint64(0)
		for host := 2; host <= 4; host++ {
			s.acknowledge(host, s.Address(s.Family, 1), 9)
			if host < 4 {
				want++
			}
			s.Expect(fmt.Sprintf("dropped after one of host %d", host), want, count())
		}
	})
}

// acknowledge sends, from port 8080 of a host, the second packet of a handshake whose
// first nobody has seen.
func (s *scene) acknowledge(host int, to netip.Addr, port byte) {
	s.T.Helper()
	s.On(host, func() {
		c, err := net.DialIP(s.Addr("ip4:tcp", "ip6:tcp"), &net.IPAddr{IP: s.Address(s.Family, host).AsSlice()}, &net.IPAddr{IP: to.AsSlice()})
		if err != nil {
			s.T.Error(err)
			return
		}
		defer c.Close()
		// From port 8080, sequence numbers of no connection, SYN and ACK.
		if _, err = c.Write([]byte{0x1f, 0x90, 0, port, 1, 2, 3, 4, 5, 6, 7, 8, 5 << 4, 0x12, 2, 0, 0, 0, 0, 0}); err != nil {
			s.T.Error(err)
		}
	})
}
