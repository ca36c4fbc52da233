package iptables_test

import (
	"net/netip"
	"testing"
	"time"

	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/test/kerneltest"
)

// TestNodePortsOnLoopback: a live kproxy serves node ports on loopback addresses
// of both families, whatever the data plane, unless it isn't to; and then
// the program that listens there is reached.
func TestNodePortsOnLoopback(t *testing.T) {
	t.Parallel()
	onEachKernel(t, func(s *scene) {
		loopback := netip.MustParseAddrPort(s.Addr("127.0.0.1:30080", "[::1]:30080"))
		run(s.T, "ip link set lo up")
		for _, l := range []uint16{options().TCPPort, options().UDPPort} {
			s.Serve(0, "userspace", l)
		}
		s.Serve(0, "host", 30081)
		offloaded := kerneltest.Service("offloaded", service.TCP, kerneltest.NodePort(30080), s.Endpoints(2))
		user := kerneltest.Service("user", service.UDP, kerneltest.NodePort(30080), s.Endpoints(2))
		kerneltest.InUserspace(user)
		rejected := func(f *plan.Frontend) { f.Verdict = plan.Reject }
		refused := kerneltest.Service("refused", service.TCP, kerneltest.NodePort(30081, rejected))
		for _, tt := range []struct {
			name         string
			policy       plan.Policy
			answer, host string
		}{
			{"on", plan.Policy{}, "userspace", kerneltest.ErrRefused.Error()},
			{"off", plan.Policy{NoLocalhostNodePorts: true}, kerneltest.ErrRefused.Error(), "host"},
			{"not among the addresses", plan.Policy{NodePortNetworks: []netip.Prefix{
				netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("fd00::/16"),
			}}, kerneltest.ErrRefused.Error(), "host"},
			{"among the addresses", plan.Policy{NodePortNetworks: []netip.Prefix{
				netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("::1/128"),
			}}, "userspace", kerneltest.ErrRefused.Error()},
		} {
			p := kerneltest.Plan(plan.ModeIPTables, offloaded, user, refused)
			p.Policy = tt.policy
			s.program(p)
			if err := (&steering.Redirects{Store: s.sets}).Alive(time.Hour); err != nil {
				s.T.Fatal(err)
			}
			for _, proto := range []service.Protocol{service.TCP, service.UDP} {
				s.Expect(tt.name+", "+proto.String(), map[string]int{tt.answer: 1}, s.Asks(1, 0, proto, loopback.String()))
			}
			s.Expect(tt.name+", a node port without endpoints", map[string]int{tt.host: 1},
				s.Asks(1, 0, service.TCP, netip.AddrPortFrom(loopback.Addr(), 30081).String()))
			node := netip.AddrPortFrom(s.NodeAddress(s.Family, 1), 30080).String()
			want := "two"
			if !p.Policy.AnswersNodePorts(s.NodeAddress(s.Family, 1)) {
				want = kerneltest.ErrRefused.Error()
			}
			s.Expect(tt.name+", from another host", map[string]int{want: 1}, s.Asks(1, 1, service.TCP, node))
		}
	})
}
