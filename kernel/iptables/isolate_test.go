package iptables_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/iptables"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/test/kerneltest"
)

// broken replaces the rules of service name's chains by one that is refused.
func broken(r kernel.Ruleset, name, rule string) kernel.Ruleset {
	for f := range service.Families {
		r.Chains[f] = slices.Clone(r.Chains[f])
		for i, c := range r.Chains[f] {
			if c.Owner.Name == name {
				r.Chains[f][i].Rules = []string{strings.ReplaceAll(rule, "@", c.Name)}
			}
		}
	}
	return r
}

// TestBadServiceFailsAlone: a restore that is refused half way is the fault of
// one or two services; all others are programmed, and the bad ones keep what
// they had.
func TestBadServiceFailsAlone(t *testing.T) {
	t.Parallel()
	rules := map[string]string{
		"refused when read":      "-p tcp -j DNAT --to-destination 999.0.0.1:80",
		"refused by the kernel":  "-j @", // a loop shows when the table is committed
		"set that doesn't exist": "-m set --match-set KPROXY-NONE src -j RETURN",
	}
	for _, v := range variants {
		for name, rule := range rules {
			t.Run(v.Name+"/"+name, func(t *testing.T) {
				kerneltest.Namespace(t)
				b, _ := newBackend(t, v)
				ctx := context.Background()
				services := kerneltest.Many(40, 3)
				p := kerneltest.Plan(plan.ModeIPTables, services...)
				// Service 5 was there before, service 17 is new.
				before := iptables.Render(kerneltest.Plan(plan.ModeIPTables, services[:10]...), options())
				if _, err := b.Apply(ctx, kernel.Diff(kernel.Ruleset{}, before)); err != nil {
					t.Fatal(err)
				}
				want := iptables.Render(p, options())
				bad := broken(broken(want, "service-5", rule), "service-17", rule)
				applied, err := b.Apply(ctx, kernel.Diff(before, bad))
				if err != nil {
					t.Fatalf("Apply: %v", err)
				}
				var failed []string
				for k, err := range applied.Failed {
					failed = append(failed, k.Name)
					if !errors.Is(err, kernel.ErrSyntax) && !errors.Is(err, kernel.ErrNotFound) {
						t.Errorf("%s failed with %v, want ErrSyntax", k, err)
					}
				}
				slices.Sort(failed)
				if !slices.Equal(failed, []string{"service-17", "service-5"}) {
					t.Fatalf("failed: %v, want service-17 and service-5", applied.Failed)
				}
				have, err := b.Observe(ctx)
				if err != nil {
					t.Fatal(err)
				}
				programmed := new(iptables.Renderer).Programmed(have, want, p)
				if _, is := programmed[services[17].Port.Key]; is {
					t.Error("service 17 counts as programmed")
				}
				if len(programmed) != 39 { // 5 is as it was before, which happens to be what is wanted
					t.Errorf("%d services are programmed, want 39", len(programmed))
				}
				if _, err := b.Apply(ctx, kernel.Diff(have, want)); err != nil {
					t.Fatalf("Apply what is right: %v", err)
				}
				have, _ = b.Observe(ctx)
				if n := len(new(iptables.Renderer).Programmed(have, want, p)); n != 40 {
					t.Errorf("%d services are programmed in the end, want 40", n)
				}
			})
		}
	}
}

// TestLockedTable: another program holds the xtables lock. Apply says so and
// changes nothing; when the lock is free it goes through.
func TestLockedTable(t *testing.T) {
	kerneltest.Namespace(t)
	// A lock file of its own, so that the test doesn't hold up other programs.
	path := t.TempDir() + "/xtables.lock"
	t.Setenv("XTABLES_LOCKFILE", path)
	lock, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Close()
	hold := func() {
		if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
			t.Fatal(err)
		}
	}
	release := func() { _ = unix.Flock(int(lock.Fd()), unix.LOCK_UN) }

	sets := openSets(t)
	c := steering.DefaultEnv(nil)
	c.Sets, c.Variant = sets, kernel.VariantLegacy()
	b := iptables.New(c)
	ctx := context.Background()
	want := iptables.Render(everything(), options())
	hold()
	applied, err := b.Apply(ctx, kernel.Diff(kernel.Ruleset{}, want))
	if !errors.Is(err, kernel.ErrLocked) || applied.Chains > 0 || len(applied.Failed) > 0 {
		t.Errorf("Apply under a foreign lock = %+v, %v; want ErrLocked", applied, err)
	}
	cancelled, cancel := context.WithCancel(ctx)
	time.AfterFunc(100*time.Millisecond, cancel)
	if _, err := b.Apply(cancelled, kernel.Diff(kernel.Ruleset{}, want)); !errors.Is(err, context.Canceled) && !errors.Is(err, kernel.ErrLocked) {
		t.Errorf("cancelled Apply: %v", err)
	}
	time.AfterFunc(300*time.Millisecond, release)
	have, err := b.Observe(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := b.Apply(ctx, kernel.Diff(have, want)); err != nil {
		t.Errorf("Apply while the lock is let go: %v", err)
	}
	have, _ = b.Observe(ctx)
	if ops := kernel.Diff(have, want); !ops.Empty() {
		t.Errorf("not everything was applied: %s", fmt.Sprint(ops)[:200])
	}
}

// full is a set store that has no room for one service's sets.
type full struct {
	kernel.SetStore
	service string
}

func (f full) Create(s kernel.Set) error {
	if s.Owner.Name == f.service {
		return errors.New("no room")
	}
	return f.SetStore.Create(s)
}

// TestServiceWithoutSetsFailsAlone: where a service's affinity sets can't be
// made, its chains aren't, and everybody else's are.
func TestServiceWithoutSetsFailsAlone(t *testing.T) {
	t.Parallel()
	kerneltest.Namespace(t)
	sets := openSets(t)
	b := iptables.New(steering.DefaultEnv(full{sets, "sticky-2"}))
	var services []*plan.Service
	for i := range 20 {
		services = append(services, kerneltest.Service(fmt.Sprintf("sticky-%d", i), service.TCP, kerneltest.Cluster(fmt.Sprintf("10.96.0.%d:80", i+1)),
			kerneltest.Endpoints("10.1.0.1:80", "10.1.0.2:80"), kerneltest.Affinity(time.Hour)))
	}
	p := kerneltest.Plan(plan.ModeIPTables, services...)
	want := iptables.Render(p, options())
	ctx := context.Background()
	applied, err := b.Apply(ctx, kernel.Diff(kernel.Ruleset{}, want))
	if err != nil || len(applied.Failed) != 1 || applied.Failed[services[2].Port.Key] == nil {
		t.Fatalf("Apply: %v, failed %v; want sticky-2 only", err, applied.Failed)
	}
	have, err := b.Observe(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if n := len(new(iptables.Renderer).Programmed(have, want, p)); n != 19 {
		t.Errorf("%d services are programmed, want 19", n)
	}
}
