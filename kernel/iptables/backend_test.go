package iptables_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/iptables"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/test/kerneltest"
)

var variants = []kernel.Variant{kernel.VariantNFT(), kernel.VariantLegacy()}

func options() steering.Options {
	o := steering.DefaultOptions()
	o.Planes = []steering.Plane{iptables.InSteering}
	o.TCPPort, o.UDPPort = 4001, 4002
	return o
}

// everything is a plan in which every kind of rule occurs.
func everything() *plan.Plan {
	local := func(f *plan.Frontend) { f.Local, f.ShortCircuit, f.Masquerade = true, true, plan.MasqueradeNodeLocal }
	services := kerneltest.Many(300, 3)
	for i := range 40 {
		services = append(services, kerneltest.Service("ports-"+string(rune('A'+i)), service.TCP,
			kerneltest.Cluster(fmt.Sprintf("10.96.200.200:%d", []int{1, 20, 300, 4400, 5000, 6000, 7000, 8000}[i%8]+i/8)),
			kerneltest.Cluster("[fd00:10:96::"+string(rune('a'+i%6))+string(rune('0'+i/6))+"]:80"),
			kerneltest.NodePort(uint16(30000+i*3)), kerneltest.Endpoints("10.200.0.1:80", "[fd00::1]:80")))
	}
	services = append(services,
		kerneltest.Service("web", service.TCP,
			kerneltest.Cluster("10.96.0.10:80", func(f *plan.Frontend) { f.Masquerade = plan.MasqueradeUnlessPod }),
			kerneltest.Cluster("[fd00:10:96::10]:80"),
			kerneltest.External("192.0.2.10:80", local), kerneltest.External("[2001:db8::10]:80"),
			kerneltest.Endpoint("10.1.0.1:8080", 1, true), kerneltest.Endpoint("10.1.0.2:8080", 1, false),
			kerneltest.Endpoints("[fd01::1]:8080", "[fd01::2]:8080")),
		kerneltest.Service("weighted", service.UDP, kerneltest.Cluster("10.96.0.11:53"), kerneltest.Algorithm(service.WeightedRoundRobin),
			kerneltest.Endpoint("10.1.0.1:53", 3, false), kerneltest.Endpoint("10.1.0.2:53", 2, false), kerneltest.Endpoint("10.1.0.3:53", 0, false)),
		kerneltest.Service("random", service.SCTP, kerneltest.Cluster("10.96.0.12:53"), kerneltest.Algorithm(service.Random),
			kerneltest.Endpoints("10.1.0.1:53", "10.1.0.2:53", "10.1.0.3:53", "10.1.0.4:53", "10.1.0.5:53", "10.1.0.6:53", "10.1.0.7:53")),
		kerneltest.Service("sticky", service.TCP, kerneltest.Cluster("10.96.0.13:80"), kerneltest.Cluster("[fd00:10:96::13]:80"), kerneltest.Affinity(time.Hour),
			kerneltest.Endpoints("10.1.0.1:80", "10.1.0.2:80", "[fd01::1]:80")),
	)
	return kerneltest.Plan(plan.ModeIPTables, services...)
}

func newBackend(t testing.TB, v kernel.Variant) (*iptables.Backend, *kernel.IPSets) {
	t.Helper()
	sets, err := kernel.OpenIPSets()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(sets.Close)
	c := steering.DefaultEnv(nil)
	c.Sets, c.Variant = sets, v
	b := iptables.New(c)
	return b, sets
}

func TestApplyIsReadBackAsWanted(t *testing.T) {
	t.Parallel()
	for _, v := range variants {
		t.Run(v.Name, func(t *testing.T) {
			kerneltest.Namespace(t)
			b, _ := newBackend(t, v)
			ctx := context.Background()
			want := iptables.Render(everything(), options())
			before, err := b.Observe(ctx)
			if err != nil {
				t.Fatal(err)
			}
			applied, err := b.Apply(ctx, kernel.Diff(before, want))
			if err != nil || len(applied.Failed) > 0 {
				t.Fatalf("Apply: %v, failed %v", err, applied.Failed)
			}
			have, err := b.Observe(ctx)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(kernel.Ops{}, kernel.Diff(have, want)); diff != "" {
				t.Errorf("Diff after Apply (-want +got):\n%s", diff)
			}
			if _, err := b.Apply(ctx, kernel.Diff(have, kernel.Ruleset{})); err != nil {
				t.Fatalf("clean up: %v", err)
			}
			left, err := b.Observe(ctx)
			if diff := cmp.Diff(kernel.Ruleset{}, left); diff != "" || err != nil {
				t.Errorf("left after clean-up (%v):\n%s", err, diff)
			}
		})
	}
}

// TestStartRunsFewPrograms: programs are most of what a start takes, so it runs a few for each family, whatever the number of rules and jumps.
func TestStartRunsFewPrograms(t *testing.T) {
	t.Parallel()
	kerneltest.Namespace(t)
	sets := openSets(t)
	programs := &recorder{Runner: kernel.Exec{}}
	c := steering.DefaultEnv(sets)
	c.Runner = programs
	c.Rules = func(v kernel.Variant, f service.Family) (steering.SingleRules, error) {
		programs.ran = append(programs.ran, v.Program[f])
		return steering.OpenSingleRules(v, f)
	}
	want := iptables.Render(everything(), options())
	if applied, err := iptables.New(c).Apply(t.Context(), kernel.Diff(kernel.Ruleset{}, want)); err != nil || len(applied.Failed) > 0 {
		t.Fatalf("Apply: %v, failed %v", err, applied.Failed)
	}
	// Chains, jumps, and the one at the end of FORWARD, for which go-iptables runs three.
	if len(programs.ran) > 2*3 {
		t.Errorf("%d programs ran:\n%s", len(programs.ran), strings.Join(programs.ran, "\n"))
	}
}

// recorder is a Runner that keeps what was run.
type recorder struct {
	kernel.Runner
	ran []string
}

func (r *recorder) Run(ctx context.Context, stdin []byte, program string, args ...string) ([]byte, error) {
	r.ran = append(r.ran, program+" "+strings.Join(args, " "))
	return r.Runner.Run(ctx, stdin, program, args...)
}

// openSets opens the kernel's sets until the test ends.
func openSets(t *testing.T) *kernel.IPSets {
	t.Helper()
	sets, err := kernel.OpenIPSets()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { sets.Close() })
	return sets
}
