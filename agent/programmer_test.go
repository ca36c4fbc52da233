package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/iptables"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/test/kerneltest"
)

// modelHost is a programmer on a model of a host, with faults to switch on.
type modelHost struct {
	*programmer
	given   *plan.Plan // last
	host    *kerneltest.Host
	backend *gate
	layer   steering.RulesetPlane
	watch   *expectations
	changes int
}

// over is a layer whose backend and watch are other ones.
type over struct {
	steering.RulesetPlane
	backend kernel.Backend
	steering.Watch
}

func (o *over) Apply(ctx context.Context, ops kernel.Ops) (kernel.Applied, error) {
	return o.backend.Apply(ctx, ops)
}
func (o *over) Observe(ctx context.Context) (kernel.Ruleset, error) { return o.backend.Observe(ctx) }
func (o *over) Expect(r kernel.Ruleset)                             { o.Watch.Expect(r) }
func (o *over) Check(ctx context.Context) ([]string, error)         { return o.Watch.Check(ctx) }
func (o *over) Close()                                              {}

// stack has the programmer begin with a layer.
func (m *modelHost) stack(l steering.RulesetPlane) {
	m.layer = l
	m.programmer = newProgrammer(steering.NewStack(l, nil), slog.New(slog.DiscardHandler), func() { m.changes++ }, func(*plan.Plan, plan.Delta) {})
	m.figures.observer = unobserved{}
}

// unobserved is an Observer that learns nothing.
type unobserved struct{}

func (unobserved) Synced(time.Duration)                  {}
func (unobserved) Programmed(bool, time.Duration)        {}
func (unobserved) Reached(service.Family, time.Duration) {}
func (unobserved) Swept(time.Duration)                   {}

// damage has the next pass read what the kernel holds.
func (m *modelHost) damage(t *testing.T) {
	t.Helper()
	m.watch.damage = []string{"a chain is gone"}
	if found, err := m.plane.Check(t.Context()); err != nil || len(found) == 0 {
		t.Fatalf("damage: found %v, %v", found, err)
	}
	m.watch.damage = nil
}

// gate is a backend that fails on demand, as when another program holds the
// xtables lock.
type gate struct {
	kernel.Backend
	failing error       // guarded by mu
	refuses service.Key // whose chains are refused; guarded by mu
	applied int         // guarded by mu
	mu      sync.Mutex
	takes   time.Duration // every application
}

func (g *gate) Apply(ctx context.Context, ops kernel.Ops) (kernel.Applied, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.failing != nil {
		return kernel.Applied{}, g.failing
	}
	g.applied++
	time.Sleep(g.takes)
	refused := false
	for f := range ops.Chains {
		ops.Chains[f] = slices.DeleteFunc(slices.Clone(ops.Chains[f]), func(c kernel.Chain) bool {
			owned := c.Owner == g.refuses && c.Owner != service.Key{}
			refused = refused || owned
			return owned || refused && c.Name == "KPROXY-DISPATCH"
		})
	}
	applied, err := g.Backend.Apply(ctx, ops)
	if refused {
		applied.Failed = map[service.Key]error{g.refuses: errors.New("invalid argument")}
	}
	return applied, err
}

func (g *gate) fail(err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.failing = err
}

func (g *gate) refuse(k service.Key) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.refuses = k
}

// expectations is a watch that only remembers what it was told.
type expectations struct {
	told   *kernel.Ruleset
	damage []string
}

func (e *expectations) Expect(r kernel.Ruleset)                 { e.told = &r }
func (e *expectations) Check(context.Context) ([]string, error) { return e.damage, nil }
func (e *expectations) Close()                                  {}

func newModelHost(t *testing.T) *modelHost {
	t.Helper()
	host := kerneltest.NewHost()
	// The fast loop makes the redirect sets before it hands over a plan.
	for _, s := range steering.EmptySetsOf(nil) {
		if err := host.Sets().Create(s); err != nil {
			t.Fatal(err)
		}
	}
	o := steering.DefaultOptions()
	o.Planes = []steering.Plane{iptables.InSteering}
	o.TCPPort, o.UDPPort = 10244, 10244
	m := &modelHost{host: host, backend: &gate{Backend: host.Rules(&kerneltest.Faults{})}, watch: &expectations{}}
	m.stack(&over{RulesetPlane: &iptables.Plane{Renderer: iptables.NewRenderer(o)}, backend: m.backend, Watch: m.watch})
	return m
}

// program hands over a plan.
func (m *modelHost) program(p *plan.Plan) {
	var d plan.Delta
	if p != m.given {
		d = changes(m.given, p)
		d.Full = m.given == nil
	}
	m.given = p
	m.programmer.program(p, d, &kernel.Result{})
}

// pass hands over a plan and programs it.
func (m *modelHost) pass(ctx context.Context, p *plan.Plan) error {
	m.program(p)
	<-m.wake // or run, where a test starts it, would make a pass for it once more
	m.render()
	_, err := m.programmer.pass(ctx)
	return err
}

// hashes returns what the kernel holds, as the fast loop is told.
func (g *programmer) hashes() map[service.Key]uint64 {
	programmed, _ := g.observed(map[service.Key]bool{})
	return programmed
}

// changes leads from one plan to another that was computed from it.
func changes(old, p *plan.Plan) plan.Delta {
	d := plan.Between(old, p)
	d.Full = false
	return d
}

func twoServices() *plan.Plan {
	return kerneltest.Plan(plan.ModeIPTables,
		kerneltest.Service("a", service.TCP, kerneltest.Cluster("10.96.0.1:80"), kerneltest.Endpoints("10.2.0.1:8080")),
		kerneltest.Service("b", service.TCP, kerneltest.Cluster("10.96.0.2:80"), kerneltest.Endpoints("10.2.0.2:8080")))
}

// TestProgrammerReportsWhatIsInTheKernel: after a pass every service counts as
// programmed with the plan's hash, and a second pass does nothing.
func TestProgrammerReportsWhatIsInTheKernel(t *testing.T) {
	m := newModelHost(t)
	p := twoServices()
	if err := m.pass(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	for _, s := range p.Services {
		if h, ok := m.hashes()[s.Port.Key]; !ok || h != s.KernelHash {
			t.Errorf("service %s counts as programmed %v with hash %x, want %x", s.Port.Key, ok, h, s.KernelHash)
		}
	}
	if m.backend.applied != 2 {
		t.Errorf("a node without rules took %d applications, want 2: what leads to userspace first, then the services", m.backend.applied)
	}
	changes := m.changes
	if err := m.pass(t.Context(), p); err != nil || m.backend.applied != 2 || m.changes != changes {
		t.Errorf("a second pass: error %v, %d applications, %d reports; want nothing done", err, m.backend.applied-2, m.changes-changes)
	}
	select {
	case <-m.steered:
	default:
		t.Error("the heartbeat hasn't been told that what leads to userspace is there")
	}
}

// TestProgrammerForgetsWhatMayBeChanging: a service that changes there and back while
// its rules are being written doesn't count as programmed, by either plan's rules,
// before the last one's have been written.
func TestProgrammerForgetsWhatMayBeChanging(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newModelHost(t)
		m.backend.takes = 100 * time.Millisecond
		var changes atomic.Int32
		m.changed = func() { changes.Add(1) }
		there, back := twoServices(), twoServices()
		there.Services[1].KernelHash++
		k, steady := back.Services[1].Port.Key, back.Services[0].Port.Key
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		go m.run(ctx, nil)
		expect := func(when string, want bool) {
			t.Helper()
			synctest.Wait()
			h := m.hashes()
			if _, ok := h[k]; ok != want {
				t.Errorf("%s: counts as programmed %t, want %t", when, ok, want)
			}
			if _, ok := h[steady]; !ok {
				t.Errorf("%s: the other service doesn't count as programmed", when)
			}
		}
		m.program(twoServices())
		time.Sleep(time.Second)
		expect("at first", true)
		// A service more, so that there is something to write.
		there.Services = append(there.Services, kerneltest.Plan(plan.ModeIPTables, kerneltest.Service("c", service.TCP,
			kerneltest.Cluster("10.96.0.3:80"), kerneltest.Endpoints("10.2.0.3:8080"))).Services...)
		m.program(there)
		expect("as soon as it changes", false)
		time.Sleep(50 * time.Millisecond)
		m.program(back)
		expect("back, while the rules are written", false)
		time.Sleep(75 * time.Millisecond)
		expect("while they are written again", false)
		before := changes.Load()
		time.Sleep(time.Second)
		expect("in the end", true)
		if changes.Load() == before {
			t.Error("the fast loop wasn't told")
		}
	})
}

// TestProgrammerKeepsLastGoodState: while a pass fails, what is in the kernel
// still counts as programmed, changed services don't, and the next pass mends it.
func TestProgrammerKeepsLastGoodState(t *testing.T) {
	m := newModelHost(t)
	old := twoServices()
	if err := m.pass(t.Context(), old); err != nil {
		t.Fatal(err)
	}
	now := kerneltest.Plan(plan.ModeIPTables, old.Services[0],
		kerneltest.Service("b", service.TCP, kerneltest.Cluster("10.96.0.2:80"), kerneltest.Endpoints("10.2.0.3:8080")))
	m.backend.fail(kernel.ErrLocked)
	if err := m.pass(t.Context(), now); !errors.Is(err, kernel.ErrLocked) {
		t.Fatalf("a pass while the lock is held: error %v, want %v", err, kernel.ErrLocked)
	}
	r := m.report()
	a, b := now.Services[0], now.Services[1]
	if m.hashes()[a.Port.Key] != a.KernelHash {
		t.Error("the service that didn't change doesn't count as programmed any more")
	}
	if m.hashes()[b.Port.Key] == b.KernelHash {
		t.Error("the service that changed counts as programmed although its rules could not be written")
	}
	if r.lastErr == nil || r.lastOK.IsZero() {
		t.Errorf("the report says error %v, last success %v; want both", r.lastErr, r.lastOK)
	}
	m.backend.fail(nil)
	if err := m.pass(t.Context(), now); err != nil {
		t.Fatal(err)
	}
	if r := m.report(); m.hashes()[b.Port.Key] != b.KernelHash || r.lastErr != nil {
		t.Errorf("after the lock is free: programmed %x, error %v; want %x and none", m.hashes()[b.Port.Key], r.lastErr, b.KernelHash)
	}
}

// TestProgrammerRetries: a failed pass is tried again without a new plan, and
// plans that come meanwhile replace each other.
func TestProgrammerRetries(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newModelHost(t)
		m.backend.fail(kernel.ErrLocked)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- m.run(ctx, nil) }()
		m.program(kerneltest.Plan(plan.ModeIPTables))
		m.program(twoServices())
		time.Sleep(retryFirst / 2)
		synctest.Wait()
		m.backend.fail(nil)
		time.Sleep(4 * retryFirst)
		synctest.Wait()
		if r := m.report(); len(m.hashes()) != 2 || r.lastErr != nil {
			t.Errorf("after the retry %d services are programmed, error %v; want 2 and none", len(m.hashes()), r.lastErr)
		}
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// TestProgrammerRests: after a pass that took long, plans wait as long, and one pass
// is enough for all of them; after a cheap one, none waits, nor after one that wrote
// everything.
func TestProgrammerRests(t *testing.T) {
	tests := []struct {
		takes, then time.Duration
		known       bool // what is in the kernel, as it is but for the first pass
		want        int  // applications by then
	}{
		{0, 0, true, 4}, {cheap / 2, cheap, true, 4},
		{4 * cheap, 7 * cheap, true, 1}, {4 * cheap, 13 * cheap, true, 2},
		{20 * pauseMax, 20*pauseMax + pauseMax/2, true, 1}, {20 * pauseMax, 42 * pauseMax, true, 2},
		{4 * cheap, 7 * cheap, false, 2},
	}
	for _, tt := range tests {
		t.Run(fmt.Sprint(tt.takes, " ", tt.then, " ", tt.known), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := newModelHost(t)
				if err := m.pass(t.Context(), twoServices()); err != nil {
					t.Fatal(err)
				}
				if m.backend.takes, m.backend.applied = tt.takes, 0; !tt.known {
					m.damage(t)
				}
				ctx, cancel := context.WithCancel(t.Context())
				done := make(chan error, 1)
				go func() { done <- m.run(ctx, nil) }()
				plans := []string{"10.2.0.3:8080", "10.2.0.4:8080", "10.2.0.5:8080", "10.2.0.6:8080"}
				for _, endpoint := range plans {
					m.program(kerneltest.Plan(plan.ModeIPTables, kerneltest.Service("a", service.TCP, kerneltest.Cluster("10.96.0.1:80"), kerneltest.Endpoints(endpoint))))
					if tt.takes < cheap {
						time.Sleep(tt.takes)
					}
					synctest.Wait()
				}
				time.Sleep(tt.then)
				synctest.Wait()
				cancel()
				if err := <-done; err != nil {
					t.Error(err)
				}
				if m.backend.applied != tt.want {
					t.Errorf("%d applications, want %d", m.backend.applied, tt.want)
				}
			})
		})
	}
}

// TestProgrammerRepairs: told of damage, it reads back and programs again.
func TestProgrammerRepairs(t *testing.T) {
	m := newModelHost(t)
	p := twoServices()
	if err := m.pass(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	m.host.Flush("nat", "KPROXY-DISPATCH")
	m.damage(t)
	if err := m.pass(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	have, err := m.layer.Observe(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if ops := kernel.Diff(have, m.layer.Fresh(p)); !ops.Empty() {
		t.Errorf("after the repair there is still a difference: %+v", ops)
	}
}

// TestProgrammerTellsWhatItReplaced: the clean-up of flows that began by rules
// of an earlier plan learns which plan that was, also when a pass failed between;
// and what has changed since, unless they may have begun otherwise.
func TestProgrammerTellsWhatItReplaced(t *testing.T) {
	m := newModelHost(t)
	type replaced struct {
		was   *plan.Plan
		exact bool
	}
	var told []replaced
	m.applied = func(was *plan.Plan, d plan.Delta) { told = append(told, replaced{was, !d.Full && len(d.Changes) == 2}) }
	full, empty := twoServices(), kerneltest.Plan(plan.ModeIPTables)
	pass := func(p *plan.Plan, wantErr bool) {
		t.Helper()
		if err := m.pass(t.Context(), p); (err != nil) != wantErr {
			t.Fatalf("pass: %v, want an error: %v", err, wantErr)
		}
	}
	pass(full, false)
	m.backend.fail(errors.New("no memory"))
	pass(empty, true)
	m.backend.fail(nil)
	pass(empty, false)
	pass(full, false)
	m.damage(t) // and not where this plan changes anything
	pass(full, false)
	pass(empty, false)
	m.damage(t)
	pass(full, false)
	if want := []replaced{{nil, false}, {full, false}, {full, false}, {empty, true}, {full, true}, {empty, false}}; !slices.Equal(told, want) {
		t.Errorf("told of %v, want %v", told, want)
	}
}

// TestProgrammerAdopts: rules that an earlier kproxy left count as programmed
// before the first pass.
func TestProgrammerAdopts(t *testing.T) {
	m := newModelHost(t)
	p := twoServices()
	if err := m.pass(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	next := &modelHost{}
	next.stack(m.layer)
	if _, err := next.plane.Adopt(t.Context(), &service.Snapshot{}); err != nil {
		t.Fatal(err)
	}
	next.adopt(p)
	if got := len(next.hashes()); got != len(p.Services) {
		t.Errorf("%d services count as programmed at once, want %d", got, len(p.Services))
	}
	applied := m.backend.applied
	if err := next.pass(t.Context(), p); err != nil || m.backend.applied != applied {
		t.Errorf("the first pass: error %v, %d applications; want nothing to do", err, m.backend.applied-applied)
	}
}

// TestOneRefusedServiceDoesNotSpin: while a service's chains are refused, plans
// that change nothing for the kernel don't bring the retry forward, and the
// failure stays one failure.
func TestOneRefusedServiceDoesNotSpin(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newModelHost(t)
		p := twoServices()
		m.backend.refuses = p.Services[1].Port.Key
		m.changed = func() { m.program(p) } // as the fast loop does
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- m.run(ctx, nil) }()
		m.program(p)
		synctest.Wait()
		first := m.report().failed[m.backend.refuses]
		if first.Reason == "" {
			t.Fatal("the refused service isn't reported")
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		// 0.5, 1, 2, 4, 8, 16 and 30 seconds apart.
		if n := m.figures.ruleFailures.Load(); n > 8 {
			t.Errorf("%d passes in a minute, want the back-off's few", n)
		}
		if again := m.report().failed[m.backend.refuses]; again != first {
			t.Errorf("the failure is now %+v, was %+v; want the same", again, first)
		}
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// TestSteeringComesFirstAfterARestart: on a node that has rules of an earlier kproxy,
// what leads to userspace is put right first, although a service is refused.
func TestSteeringComesFirstAfterARestart(t *testing.T) {
	m := newModelHost(t)
	old := twoServices()
	if err := m.pass(t.Context(), old); err != nil {
		t.Fatal(err)
	}
	next := newModelHost(t)
	next.stack(m.layer)
	now := kerneltest.Plan(plan.ModeIPTables, old.Services[0],
		kerneltest.Service("b", service.TCP, kerneltest.Cluster("10.96.0.2:80"), kerneltest.Endpoints("10.2.0.3:8080")))
	// Somebody has damaged that meanwhile, and b's new chain is refused.
	m.host.Flush("nat", "KPROXY-PORTAL")
	m.backend.refuses = now.Services[1].Port.Key
	if err := next.pass(t.Context(), now); err == nil {
		t.Fatal("the pass succeeded although a service was refused")
	}
	select {
	case <-next.steered:
	default:
		t.Error("nothing leads to userspace")
	}
	have, err := m.layer.Observe(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range m.layer.Fresh(now).Chains[service.IPv4] {
		if c.Name != "KPROXY-PORTAL" && c.Name != "KPROXY-SERVICES" {
			continue
		}
		i := slices.IndexFunc(have.Chains[service.IPv4], func(h kernel.Chain) bool { return h.Table == c.Table && h.Name == c.Name })
		if i < 0 || !slices.Equal(have.Chains[service.IPv4][i].Rules, c.Rules) {
			t.Errorf("chain %s isn't as it should be", c.Name)
		}
	}
}

// TestDamageIsFoundWhileAServiceFails: although one service can't be programmed,
// the watch knows what the kernel holds of the others.
func TestDamageIsFoundWhileAServiceFails(t *testing.T) {
	m := newModelHost(t)
	p := twoServices()
	m.backend.refuses = p.Services[1].Port.Key
	if err := m.pass(t.Context(), p); err == nil {
		t.Fatal("the pass succeeded although a service was refused")
	}
	told := m.watch.told
	if told == nil {
		t.Fatal("the watch wasn't told what there is")
	}
	have, err := m.layer.Observe(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if ops := kernel.Diff(have, *told); !ops.Empty() || len(told.Chains[service.IPv4]) == 0 {
		t.Errorf("the watch was told of %+v, and the kernel has more or less than that: %+v", told, ops)
	}
	dynamic := map[string]bool{}
	for _, s := range told.Sets {
		dynamic[s.Name] = s.Dynamic
	}
	for name, want := range map[string]bool{"KPROXY-ALIVE-4": true, "KPROXY-USER-4": true, "KPROXY-ENDPOINT-4": false} {
		if got, found := dynamic[name]; got != want || !found {
			t.Errorf("the watch was told of set %s: %v, with entries that come and go: %v; want %v", name, found, got, want)
		}
	}
}

// TestProgrammerRemembersServices: after the first pass, which begins with the
// what leads to userspace, a service that doesn't change is seen to be the same without a look at
// its rules.
func TestProgrammerRemembersServices(t *testing.T) {
	m := newModelHost(t)
	p := twoServices()
	if err := m.pass(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	next := m.layer.Render(p, plan.Delta{})
	for f := range service.Families {
		if have := m.watch.told.Chains[f]; len(have) != len(next.Chains[f]) || len(have) > 0 && &have[0] != &next.Chains[f][0] {
			t.Errorf("%s chains of the same plan are other ones", service.Family(f))
		}
	}
}
