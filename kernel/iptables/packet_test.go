package iptables_test

import (
	"context"
	"fmt"
	"net/netip"
	"testing"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/iptables"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/test/kerneltest"
)

// scene is a scene whose node has rules.
type scene struct {
	*kerneltest.Scene
	variant  kernel.Variant
	backend  *iptables.Backend
	sets     *kernel.IPSets
	have     kernel.Ruleset
	redirect []kernel.Set
}

// onEachKernel runs test for both variants and both families.
func onEachKernel(t *testing.T, test func(s *scene)) {
	for _, v := range variants {
		for _, f := range service.Families {
			t.Run(v.Name+"/"+f.String(), func(t *testing.T) {
				s := &scene{Scene: kerneltest.NewScene(t, f), variant: v}
				s.backend, s.sets = newBackend(t, v)
				if err := steering.DefaultRouting().Ensure(); err != nil {
					t.Fatal(err)
				}
				test(s)
			})
		}
	}
}

// program makes the kernel do what p says, redirect sets included.
func (s *scene) program(p *plan.Plan) {
	s.T.Helper()
	ctx := context.Background()
	want := iptables.Render(p, options())
	a, err := s.backend.Apply(ctx, kernel.Diff(s.have, want))
	if err != nil || len(a.Failed) > 0 {
		s.T.Fatalf("Apply: %v, %v", err, a.Failed)
	}
	s.have = want
	redirect := steering.Sets(p)
	if _, err := kernel.ApplySets(ctx, s.sets, kernel.DiffSets(s.redirect, redirect)); err != nil {
		s.T.Fatal(err)
	}
	s.redirect = redirect
}

func TestSplitIsExact(t *testing.T) {
	t.Parallel()
	onEachKernel(t, func(s *scene) {
		e := func(h int, weight uint32) func(*plan.Service) {
			return kerneltest.Endpoint(netip.AddrPortFrom(s.Address(s.Family, h), 8080).String(), weight, false)
		}
		s.program(kerneltest.Plan(plan.ModeIPTables,
			kerneltest.Service("tcp", service.TCP, kerneltest.Cluster(s.Virtual(1)), s.Endpoints(2, 3, 4)),
			kerneltest.Service("udp", service.UDP, kerneltest.Cluster(s.Virtual(1)), s.Endpoints(2, 3, 4)),
			kerneltest.Service("sctp", service.SCTP, kerneltest.Cluster(s.Virtual(1)), kerneltest.NodePort(30080), s.Endpoints(2, 3, 4)),
			kerneltest.Service("weighted", service.TCP, kerneltest.Cluster(s.Virtual(2)), kerneltest.Algorithm(service.WeightedRoundRobin), e(2, 3), e(3, 2), e(4, 0)),
		))
		equal := map[string]int{"two": 10, "three": 10, "four": 10}
		s.Expect("TCP", equal, s.Asks(30, 1, service.TCP, s.Virtual(1)))
		s.Expect("UDP", equal, s.Asks(30, 1, service.UDP, s.Virtual(1)))
		s.Expect("TCP from the node", equal, s.Asks(30, 0, service.TCP, s.Virtual(1)))
		s.Expect("weights 3, 2, 0", map[string]int{"two": 18, "three": 12}, s.Asks(30, 1, service.TCP, s.Virtual(2)))
		if lab.HasSCTP() == nil { // else the test of mode ipvs, whose kernels have it, says how it fares
			for i, name := range []string{"two", "three", "four"} {
				s.ServeSCTP(i+2, name, 8080)
			}
			s.Expect("SCTP", equal, s.Asks(30, 1, service.SCTP, s.Virtual(1)))
			s.Expect("SCTP by a node port", map[string]int{"two": 1, "three": 1, "four": 1}, s.Asks(3, 1, service.SCTP, netip.AddrPortFrom(s.NodeAddress(s.Family, 1), 30080).String()))
		}
	})
}

func TestRandomSplit(t *testing.T) {
	t.Parallel()
	onEachKernel(t, func(s *scene) {
		s.program(kerneltest.Plan(plan.ModeIPTables, kerneltest.Service("random", service.TCP, kerneltest.Cluster(s.Virtual(1)),
			kerneltest.Algorithm(service.Random), s.Endpoints(2, 3, 4))))
		got := s.Asks(150, 1, service.TCP, s.Virtual(1))
		for _, name := range []string{"two", "three", "four"} {
			if got[name] < 25 || got[name] > 75 { // 50 expected, more than four standard deviations
				s.T.Errorf("150 connections went to %v", got)
			}
		}
	})
}

// TestPackets: what every data plane does.
func TestPackets(t *testing.T) {
	t.Parallel()
	for name, test := range kerneltest.Packets {
		t.Run(name, func(t *testing.T) {
			onEachKernel(t, func(s *scene) {
				test(s.Scene, &kerneltest.Subject{
					Mode: plan.ModeIPTables, DataPlane: plan.IPTables, TCPPort: options().TCPPort, UDPPort: options().UDPPort,
					Program: s.program, Heartbeat: &steering.Redirects{Store: s.sets}, Plane: &iptables.Plane{Backend: s.backend},
					Firewall: func() {
						run(s.T, fmt.Sprintf("%[1]s -A INPUT -i lo -j ACCEPT; %[1]s -A INPUT -p icmpv6 -j ACCEPT || true; %[1]s -P INPUT DROP; %[1]s -P FORWARD DROP", s.variant.Program[s.Family]))
					},
				})
			})
		})
	}
}
