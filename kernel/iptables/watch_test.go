package iptables_test

import (
	"context"
	"fmt"
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

// watched is a node whose rules are in place and watched.
type watched struct {
	t       *testing.T
	variant kernel.Variant
	backend *iptables.Backend
	sets    *kernel.IPSets
	watch   *iptables.Watch
	want    kernel.Ruleset
}

func newWatched(t *testing.T, v kernel.Variant) *watched {
	kerneltest.Namespace(t)
	w := &watched{t: t, variant: v, want: iptables.Render(everything(), options())}
	w.backend, w.sets = newBackend(t, v)
	var err error
	if w.watch, err = iptables.NewWatch(w.backend); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(w.watch.Close)
	w.repair()
	return w
}

// repair does what the agent does when it is told of damage.
func (w *watched) repair() {
	w.t.Helper()
	ctx := context.Background()
	have, err := w.backend.Observe(ctx)
	if err != nil {
		w.t.Fatal(err)
	}
	if a, err := w.backend.Apply(ctx, kernel.Diff(have, w.want)); err != nil || len(a.Failed) > 0 {
		w.t.Fatalf("repair: %v, %v", err, a.Failed)
	}
	w.watch.Expect(w.want)
}

func (w *watched) check() []string {
	w.t.Helper()
	damage, err := w.watch.Check(context.Background())
	if err != nil {
		w.t.Fatal(err)
	}
	return damage
}

func TestWatchNoticesAndRepairHelps(t *testing.T) {
	t.Parallel()
	damage := []struct {
		name, command string // @ is the program
		notices       string
	}{
		{"flush of nat", "@ -t nat -F", "nat"},
		{"flush of everything", "@ -t nat -F; @ -t mangle -F; @ -t filter -F", "filter"},
		{"one rule of an own chain", "@ -t nat -D KPROXY-PORTAL 3", "KPROXY-PORTAL"},
		{"one rule of an IPv6 chain", "@6 -t nat -D KPROXY-SERVICES 1", "ipv6"},
		{"a jump", "@ -t nat -D PREROUTING 1", "PREROUTING"},
		{"a rule too many", "@ -t nat -A KPROXY-SERVICES -j RETURN", "KPROXY-SERVICES"},
		{"another rule in its place", "@ -t nat -R KPROXY-SERVICES 1 -j RETURN -m comment --comment something", "KPROXY-SERVICES"},
		{"a set's entries", "ipset flush KPROXY-ENDPOINT-4", "KPROXY-ENDPOINT-4"},
		{"a set", "@ -t nat -F; @ -t nat -X; @ -t filter -F; @ -t filter -X; @ -t mangle -F; @ -t mangle -X; ipset destroy KPROXY-USER-4", "KPROXY-USER-4"},
	}
	for _, v := range variants {
		for _, d := range damage {
			t.Run(v.Name+"/"+d.name, func(t *testing.T) {
				w := newWatched(t, v)
				if found := w.check(); len(found) > 0 {
					t.Fatalf("before any damage: %v", found)
				}
				run(t, strings.NewReplacer("@6", v.Program[1], "@", v.Program[0]).Replace(d.command))
				if found := strings.Join(w.check(), "; "); !strings.Contains(found, d.notices) {
					t.Errorf("Check = %q, want it to mention %s", found, d.notices)
				}
				w.repair()
				if found := w.check(); len(found) > 0 {
					t.Errorf("after the repair: %v", found)
				}
				have, err := w.backend.Observe(context.Background())
				if ops := kernel.Diff(have, w.want); err != nil || !ops.Empty() {
					t.Errorf("after the repair something differs: %v", err)
				}
			})
		}
	}
}

// TestWatchLeavesOthersAlone: changes of other programs, and kproxy's own, are
// no damage.
func TestWatchLeavesOthersAlone(t *testing.T) {
	t.Parallel()
	for _, v := range variants {
		t.Run(v.Name, func(t *testing.T) {
			w := newWatched(t, v)
			w.check()
			run(t, strings.ReplaceAll("@ -t nat -N DOCKER; @ -t nat -I PREROUTING 1 -j DOCKER; @ -A FORWARD -j ACCEPT; ipset create FOREIGN hash:ip", "@", v.Program[0]))
			if found := w.check(); len(found) > 0 {
				t.Errorf("after foreign changes: %v", found)
			}
			run(t, v.Program[0]+" -t nat -D KPROXY-PORTAL 1")
			noticed := false
			for start := time.Now(); !noticed && time.Since(start) < 5*time.Second; time.Sleep(50 * time.Millisecond) {
				noticed = len(w.check()) > 0
			}
			if !noticed {
				t.Error("damage after foreign changes goes unnoticed")
			}
			w.want = iptables.Render(kerneltest.Plan(plan.ModeIPTables, kerneltest.Service("one", service.TCP,
				kerneltest.Cluster("10.96.0.1:80"), kerneltest.Endpoints("10.1.0.1:80"))), options())
			w.repair()
			if found := w.check(); len(found) > 0 {
				t.Errorf("after changes of its own: %v", found)
			}
		})
	}
}

// TestWatchFollowsOwnChanges: after a change of kproxy's own, which it doesn't read
// everything for, damage shows that was done before it, while it was under way,
// or after it, whether to chains that were written or to others.
func TestWatchFollowsOwnChanges(t *testing.T) {
	t.Parallel()
	// Service two changes, service one stays.
	services := func(port string) []*plan.Service {
		return []*plan.Service{
			kerneltest.Service("one", service.TCP, kerneltest.Cluster("10.96.0.1:80"), kerneltest.Endpoints("10.1.0.1:80")),
			kerneltest.Service("two", service.TCP, kerneltest.Cluster("10.96.0.2:80"), kerneltest.Endpoints("10.1.0.2:"+port)),
		}
	}
	rules := func(port string) kernel.Ruleset {
		return iptables.Render(kerneltest.Plan(plan.ModeIPTables, services(port)...), options())
	}
	one, two := kernel.ChainName("SVC", services("80")[0].Port.Key), kernel.ChainName("SVC", services("80")[1].Port.Key)
	for _, v := range variants {
		for _, when := range []string{"never", "before", "during", "after"} {
			for _, chain := range []string{one, two} {
				t.Run(v.Name+"/"+when+"/"+chain, func(t *testing.T) {
					w := newWatched(t, v)
					w.want = rules("80")
					w.repair()
					w.check()
					damage := func(now string) {
						if now == when {
							run(t, v.Program[0]+" -t nat -I "+chain+" 1 -j RETURN")
						}
					}
					damage("before")
					have := w.want
					w.want = rules("81")
					if _, err := w.backend.Apply(context.Background(), kernel.Diff(have, w.want)); err != nil {
						t.Fatal(err)
					}
					damage("during")
					w.watch.Expect(w.want)
					damage("after")
					mended := when == "before" && chain == two // by the change itself
					if found := w.check(); (len(found) > 0) != (when != "never" && !mended) {
						t.Errorf("Check = %v", found)
					}
				})
			}
		}
	}
}

// BenchmarkExpect measures what the Watch does after one service's change among all.
func BenchmarkExpect(b *testing.B) {
	for _, v := range variants {
		n := slices.Max(programmable())
		b.Run(fmt.Sprintf("%s/services=%d", v.Name, n), func(b *testing.B) {
			p := kerneltest.Plan(plan.ModeIPTables, kerneltest.Many(n, endpointsEach)...)
			rules := [2]kernel.Ruleset{iptables.Render(p, options()), iptables.Render(oneEndpointLess(p), options())}
			backend := programmed(b, v, rules[0])
			w, err := iptables.NewWatch(backend)
			if err != nil {
				b.Fatal(err)
			}
			defer w.Close()
			w.Expect(rules[0])
			ctx := context.Background()
			for i := 0; b.Loop(); i++ {
				if _, err := w.Check(ctx); err != nil {
					b.Fatal(err)
				}
				b.StopTimer()
				if _, err := backend.Apply(ctx, kernel.Diff(rules[i%2], rules[(i+1)%2])); err != nil {
					b.Fatal(err)
				}
				b.StartTimer()
				w.Expect(rules[(i+1)%2])
			}
		})
	}
}

func BenchmarkWatch(b *testing.B) {
	for _, v := range variants {
		for _, touched := range []bool{false, true} {
			name := v.Name + "/quiet"
			if touched {
				name = v.Name + "/after a foreign change"
			}
			n := slices.Max(programmable())
			b.Run(fmt.Sprintf("%s/services=%d", name, n), func(b *testing.B) {
				want := iptables.Render(kerneltest.Plan(plan.ModeIPTables, kerneltest.Many(n, endpointsEach)...), options())
				backend := programmed(b, v, want)
				w, err := iptables.NewWatch(backend)
				if err != nil {
					b.Fatal(err)
				}
				defer w.Close()
				w.Expect(want)
				ctx := context.Background()
				if _, err := w.Check(ctx); err != nil {
					b.Fatal(err)
				}
				for b.Loop() {
					if touched {
						b.StopTimer()
						run(b, v.Program[0]+" -A FORWARD -j ACCEPT")
						b.StartTimer()
					}
					if _, err := w.Check(ctx); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}

// TestWatchWhileRulesChange: what others did is noticed although kproxy changes rules whenever they are read; what kproxy changed
// itself isn't taken for damage.
func TestWatchWhileRulesChange(t *testing.T) {
	t.Parallel()
	kerneltest.Namespace(t)
	sets := openSets(t)
	reading := &hooked{Runner: kernel.Exec{}}
	c := steering.DefaultEnv(sets)
	c.Runner = reading
	b := iptables.New(c)
	w, err := iptables.NewWatch(b)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	have := kernel.Ruleset{}
	change := func(services int) {
		want := iptables.Render(kerneltest.Plan(plan.ModeIPTables, kerneltest.Many(services, 2)...), options())
		if _, err := b.Apply(t.Context(), kernel.Diff(have, want)); err != nil {
			t.Fatal(err)
		}
		w.Expect(want)
		have = want
	}
	change(2)
	for i, damage := range []struct{ line, found string }{
		{"", ""},
		{"-D PREROUTING -j KPROXY-SERVICES", "jump from nat PREROUTING is gone"},
		{"-F KPROXY-POSTROUTING", "chain nat KPROXY-POSTROUTING was changed"},
	} {
		if damage.line != "" {
			run(t, kernel.DefaultVariant().Program[0]+" -t nat "+damage.line)
		}
		reading.before = func() { change(3 + i) }
		found, err := w.Check(t.Context())
		if err != nil || damage.found == "" && len(found) > 0 || !strings.Contains(strings.Join(found, "\n"), damage.found) {
			t.Errorf("after %q: %q, %v, want %q", damage.line, found, err, damage.found)
		}
	}
}

// TestWatchClosedAmidAChange: what is still done of a change of kproxy's own when the Watch is closed
// touches no descriptor that is another's by then.
func TestWatchClosedAmidAChange(t *testing.T) {
	t.Parallel()
	kerneltest.Namespace(t)
	b, _ := newBackend(t, kernel.DefaultVariant())
	w, err := iptables.NewWatch(b)
	if err != nil {
		t.Fatal(err)
	}
	want := iptables.Render(kerneltest.Plan(plan.ModeIPTables, kerneltest.Many(2, 2)...), options())
	if _, err := b.Apply(t.Context(), kernel.Diff(kernel.Ruleset{}, want)); err != nil {
		t.Fatal(err)
	}
	w.Close()
	others, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	w.Expect(want)
	for _, fd := range others {
		if n, err := unix.Read(fd, make([]byte, 64)); err != unix.EAGAIN {
			t.Errorf("%d bytes were written to another's socket (%v)", n, err)
		}
		unix.Close(fd)
	}
}

// hooked is a Runner that does something before it lists rules, once.
type hooked struct {
	kernel.Runner
	before func()
}

func (h *hooked) Run(ctx context.Context, stdin []byte, program string, args ...string) ([]byte, error) {
	if do := h.before; do != nil && strings.HasSuffix(program, "-save") {
		h.before = nil
		do()
	}
	return h.Runner.Run(ctx, stdin, program, args...)
}
