package plan

import (
	"slices"
	"testing"
	"time"

	"kproxy.dev/kproxy/health"
	"kproxy.dev/kproxy/service"
)

// moment is one line of a timeline: at some second something happens, and
// then the service stands where the rest says.
type moment struct {
	at     int // seconds since t0
	do     func(*world)
	plane  DataPlane
	state  State
	reason string
	// qualifies and wake are seconds since t0; 0 for none.
	qualifies, wake int
}

func carry(n uint64) func(*world) {
	return func(w *world) { w.in.Observed.Carried[port("a").Key] = n }
}

func pinTo(p service.Preference) func(*world) {
	return func(w *world) { w.in.Pins[port("a").Key] = p }
}

func unpin(w *world)   { delete(w.in.Pins, port("a").Key) }
func program(w *world) { w.program() }

func failNow(w *world) {
	w.in.Failed[port("a").Key] = Failure{Since: w.in.Now, Reason: "no memory", Hash: w.previous.Services[0].KernelHash}
}

func setTo(eps ...string) func(*world) {
	return func(w *world) { w.set(w.ports[port("a").Key], eps...) }
}

func change(f func(*service.Port)) func(*world) {
	return func(w *world) {
		p := w.ports[port("a").Key]
		f(&p)
		w.ports[p.Key] = p
	}
}

// flapping makes both endpoints go down and up twice within the last seconds.
func flapping(w *world) {
	now := w.in.Now
	w.health("a", "10.0.0.1", health.Up, now, now.Add(-3*time.Second), now)
	w.health("a", "10.0.0.2", health.Up, now, now.Add(-2*time.Second), now)
}

func do(steps ...func(*world)) func(*world) {
	return func(w *world) {
		for _, s := range steps {
			s(w)
		}
	}
}

const (
	steady10 = "its endpoints must stay as they are for 10s"
	firstOne = "waiting for its first connection"
	flapped  = "2 endpoints changed health 4 times in a minute; again after "
	noMemory = "kernel rules could not be written: no memory"
)

// qualified is how every timeline that is about later things begins.
var qualified = []moment{
	{at: 0, do: carry(1), plane: Userspace, state: StateQualifying, reason: steady10, qualifies: 10, wake: 10},
	{at: 10, do: program, plane: IPTables, state: StateOffloaded, reason: reasonQualified},
}

func after(m ...moment) []moment { return append(qualified[:2:2], m...) }

type timeline struct {
	name    string
	prepare func(*world)
	moments []moment
}

var timelines = []timeline{
	{"the way to the kernel", nil, []moment{
		{at: 0, plane: Userspace, state: StateQualifying, reason: firstOne},
		{at: 3, do: carry(1), plane: Userspace, state: StateQualifying, reason: steady10, qualifies: 10, wake: 10},
		{at: 9, plane: Userspace, state: StateQualifying, reason: steady10, qualifies: 10, wake: 10},
		{at: 10, plane: Userspace, state: StateQualifying, reason: reasonWriting},
		{at: 11, do: program, plane: IPTables, state: StateOffloaded, reason: reasonQualified},
		{at: 5000, plane: IPTables, state: StateOffloaded, reason: reasonQualified},
	}},
	{"more connections asked for", func(w *world) { w.in.Policy.OffloadMinConnections = 5 }, []moment{
		{at: 20, do: carry(4), plane: Userspace, state: StateQualifying, reason: "waiting for its first 5 connections"},
		{at: 30, do: do(carry(5), program), plane: IPTables, state: StateOffloaded, reason: reasonQualified},
	}},
	{"offload at once", func(w *world) { w.in.Policy.OffloadAfter, w.in.Policy.OffloadMinConnections = 0, 0 }, []moment{
		{at: 0, plane: Userspace, state: StateQualifying, reason: reasonWriting},
		{at: 0, do: program, plane: IPTables, state: StateOffloaded, reason: reasonQualified},
	}},
	{"a change of membership starts the clock again", nil, []moment{
		{at: 0, do: carry(1), plane: Userspace, state: StateQualifying, reason: steady10, qualifies: 10, wake: 10},
		{at: 8, do: setTo("10.0.0.1 n1 ready", "10.0.0.3 n2 ready"), plane: Userspace, state: StateQualifying, reason: steady10, qualifies: 18, wake: 18},
	}},
	{"a change of health starts the clock again, a first success doesn't", nil, []moment{
		{at: 0, do: carry(1), plane: Userspace, state: StateQualifying, reason: steady10, qualifies: 10, wake: 10},
		{at: 4, do: func(w *world) { w.health("a", "10.0.0.1", health.Up, w.in.Now) }, plane: Userspace, state: StateQualifying, reason: steady10, qualifies: 10, wake: 10},
		{at: 7, do: func(w *world) { w.health("a", "10.0.0.1", health.Down, w.in.Now, w.in.Now) }, plane: Userspace, state: StateQualifying, reason: steady10, qualifies: 17, wake: 17},
	}},
	{"endpoints of an offloaded service change: userspace is the write buffer", nil, after(
		moment{at: 20, do: setTo("10.0.0.1 n1 ready"), plane: Userspace, state: StateOffloaded, reason: reasonUpdating},
		moment{at: 21, do: program, plane: IPTables, state: StateOffloaded, reason: reasonQualified},
	)},
	{"an endpoint of an offloaded service dies", nil, after(
		moment{at: 20, do: func(w *world) { w.health("a", "10.0.0.1", health.Down, w.in.Now, w.in.Now) }, plane: Userspace, state: StateOffloaded, reason: reasonUpdating},
		moment{at: 21, do: program, plane: IPTables, state: StateOffloaded, reason: reasonQualified},
	)},
	{"all endpoints go and come back", nil, after(
		moment{at: 20, do: setTo(), plane: None, state: StateRejecting, reason: "it has no endpoints"},
		moment{at: 30, do: setTo("10.0.0.9 n1 ready"), plane: Userspace, state: StateOffloaded, reason: reasonUpdating},
		moment{at: 31, do: program, plane: IPTables, state: StateOffloaded, reason: reasonQualified},
	)},
	{"pinned to userspace and unpinned", nil, after(
		moment{at: 20, do: pinTo(service.PreferUserspace), plane: Userspace, state: StatePinned, reason: "pinned to userspace by kproxy pin"},
		moment{at: 21, do: unpin, plane: IPTables, state: StateOffloaded, reason: reasonQualified},
	)},
	{"the annotation pins, the command overrides it", nil, after(
		moment{at: 20, do: change(func(p *service.Port) { p.Prefer = service.PreferUserspace }), plane: Userspace, state: StatePinned, reason: "pinned to userspace by its annotation"},
		moment{at: 21, do: pinTo(service.PreferAuto), plane: IPTables, state: StateOffloaded, reason: reasonQualified},
		moment{at: 22, do: pinTo(service.PreferKernel), plane: IPTables, state: StatePinned, reason: "pinned to the kernel by kproxy pin"},
		moment{at: 23, do: unpin, plane: Userspace, state: StatePinned, reason: "pinned to userspace by its annotation"},
	)},
	{"a drained node's services go to the kernel, pinned to userspace or not", pinTo(service.PreferUserspace), []moment{
		{at: 0, plane: Userspace, state: StatePinned, reason: "pinned to userspace by kproxy pin"},
		{at: 1, do: func(w *world) { w.in.Policy.DrainedBy = "kproxy drain" }, plane: Userspace, state: StatePinned, reason: reasonWriting},
		{at: 1, do: program, plane: IPTables, state: StatePinned, reason: "pinned to the kernel by kproxy drain"},
		{at: 2, do: func(w *world) { w.in.Policy.DrainedBy = "" }, plane: Userspace, state: StatePinned, reason: "pinned to userspace by kproxy pin"},
	}},
	{"a pin to the kernel waits for nothing but its rules", pinTo(service.PreferKernel), []moment{
		{at: 0, plane: Userspace, state: StatePinned, reason: reasonWriting},
		{at: 0, do: program, plane: IPTables, state: StatePinned, reason: "pinned to the kernel by kproxy pin"},
		{at: 5, do: unpin, plane: IPTables, state: StateOffloaded, reason: reasonQualified},
	}},
	{"a pin to the kernel doesn't make it do what it can't", do(pinTo(service.PreferKernel), change(func(p *service.Port) { p.Algorithm = service.LeastConnections })), []moment{
		{at: 0, plane: Userspace, state: StateUserspace, reason: "iptables can't do least connections"},
	}},
	{"the specification stops being expressible and is again", nil, after(
		moment{at: 20, do: change(func(p *service.Port) { p.ProxyProtocol = 2 }), plane: Userspace, state: StateUserspace, reason: "iptables can't send PROXY protocol headers"},
		moment{at: 30, do: do(change(func(p *service.Port) { p.ProxyProtocol = 0 }), program), plane: IPTables, state: StateOffloaded, reason: reasonQualified},
	)},
	{"flapping recalls, each time for longer", nil, after(
		moment{at: 20, do: flapping, plane: Userspace, state: StateRecalled, reason: flapped + "10s", qualifies: 30, wake: 30},
		moment{at: 29, plane: Userspace, state: StateRecalled, reason: flapped + "10s", qualifies: 30, wake: 30},
		moment{at: 30, do: program, plane: IPTables, state: StateOffloaded, reason: reasonQualified},
		moment{at: 40, do: flapping, plane: Userspace, state: StateRecalled, reason: flapped + "20s", qualifies: 60, wake: 60},
		moment{at: 60, plane: IPTables, state: StateOffloaded, reason: reasonQualified},
		moment{at: 70, do: flapping, plane: Userspace, state: StateRecalled, reason: flapped + "40s", qualifies: 110, wake: 110},
		moment{at: 110, plane: IPTables, state: StateOffloaded, reason: reasonQualified},
		// After ten calm minutes the past is forgotten.
		moment{at: 710, do: flapping, plane: Userspace, state: StateRecalled, reason: flapped + "10s", qualifies: 720, wake: 720},
	)},
	{"a dual-stack endpoint that goes down and comes back is no flapping", nil, after(
		moment{at: 15, do: do(
			setTo("10.0.0.1 n1 ready", "10.0.0.2 n2 ready", "[fd00::1]:8080 n1 ready", "[fd00::2]:8080 n2 ready"),
			change(func(p *service.Port) { p.ClusterIPs = addrs("10.96.0.1", "fd00:96::1") }),
		), plane: Userspace, state: StateOffloaded, reason: reasonUpdating},
		moment{at: 16, do: program, plane: IPTables, state: StateOffloaded, reason: reasonQualified},
		moment{at: 20, do: func(w *world) {
			now := w.in.Now
			for _, a := range []string{"10.0.0.1", "[fd00::1]:8080"} {
				w.health("a", a, health.Up, now, now.Add(-2*time.Second), now)
			}
		}, plane: IPTables, state: StateOffloaded, reason: reasonQualified},
	)},
	{"the back-off is bounded", func(w *world) { w.in.Policy.BackoffMax = 15 * time.Second }, after(
		moment{at: 20, do: flapping, plane: Userspace, state: StateRecalled, reason: flapped + "10s", qualifies: 30, wake: 30},
		moment{at: 30, plane: IPTables, state: StateOffloaded, reason: reasonQualified},
		moment{at: 40, do: flapping, plane: Userspace, state: StateRecalled, reason: flapped + "15s", qualifies: 55, wake: 55},
	)},
	{"pin and unpin end a back-off", nil, after(
		moment{at: 20, do: flapping, plane: Userspace, state: StateRecalled, reason: flapped + "10s", qualifies: 30, wake: 30},
		moment{at: 21, do: pinTo(service.PreferUserspace), plane: Userspace, state: StatePinned, reason: "pinned to userspace by kproxy pin"},
		moment{at: 22, do: unpin, plane: IPTables, state: StateOffloaded, reason: reasonQualified},
	)},
	{"unsteady when the back-off ends", nil, after(
		moment{at: 20, do: flapping, plane: Userspace, state: StateRecalled, reason: flapped + "10s", qualifies: 30, wake: 30},
		moment{at: 25, do: setTo("10.0.0.1 n1 ready"), plane: Userspace, state: StateRecalled, reason: flapped + "10s", qualifies: 35, wake: 30},
		moment{at: 30, plane: Userspace, state: StateQualifying, reason: steady10, qualifies: 35, wake: 35},
		moment{at: 35, do: program, plane: IPTables, state: StateOffloaded, reason: reasonQualified},
	)},
	{"rules that can't be written", nil, after(
		moment{at: 20, do: do(setTo("10.0.0.1 n1 ready")), plane: Userspace, state: StateOffloaded, reason: reasonUpdating},
		moment{at: 21, do: failNow, plane: Userspace, state: StateRecalled, reason: noMemory, wake: 31},
		moment{at: 30, plane: Userspace, state: StateRecalled, reason: noMemory, wake: 31},
		// The wait is over, the agent tries again, and fails again.
		moment{at: 31, plane: Userspace, state: StateQualifying, reason: noMemory},
		moment{at: 32, do: failNow, plane: Userspace, state: StateRecalled, reason: noMemory, wake: 52},
		// Other rules are tried at once.
		moment{at: 40, do: setTo("10.0.0.2 n1 ready"), plane: Userspace, state: StateQualifying, reason: steady10, qualifies: 50, wake: 50},
		moment{at: 50, do: program, plane: IPTables, state: StateOffloaded, reason: reasonQualified},
	)},
	{"rules that can't be written at first but later", nil, []moment{
		{at: 0, do: carry(1), plane: Userspace, state: StateQualifying, reason: steady10, qualifies: 10, wake: 10},
		{at: 1, do: failNow, plane: Userspace, state: StateRecalled, reason: noMemory, wake: 11},
		{at: 11, plane: Userspace, state: StateQualifying, reason: noMemory},
		{at: 12, do: func(w *world) { clear(w.in.Failed); w.program() }, plane: IPTables, state: StateOffloaded, reason: reasonQualified},
	}},
	{"failing rules of a service pinned to the kernel", pinTo(service.PreferKernel), []moment{
		{at: 0, do: program0, plane: Userspace, state: StatePinned, reason: reasonWriting},
		{at: 1, do: failNow, plane: Userspace, state: StateRecalled, reason: noMemory, wake: 11},
		{at: 11, plane: Userspace, state: StatePinned, reason: noMemory},
	}},
	{"adopted", func(w *world) { w.in.Observed.Adopted[port("a").Key] = true }, []moment{
		{at: 0, plane: Userspace, state: StateOffloaded, reason: reasonUpdating},
		{at: 0, do: program, plane: IPTables, state: StateOffloaded, reason: reasonQualified},
	}},
	{"adopted but no longer expressible", do(func(w *world) { w.in.Observed.Adopted[port("a").Key] = true }, change(func(p *service.Port) { p.Algorithm = service.Maglev })), []moment{
		{at: 0, plane: Userspace, state: StateUserspace, reason: "iptables can't do maglev"},
	}},
	{"mode userspace", func(w *world) { w.in.Policy.Mode = ModeUserspace }, []moment{
		{at: 60, do: do(carry(9), pinTo(service.PreferKernel)), plane: Userspace, state: StateUserspace, reason: "mode userspace offloads nothing"},
	}},
	{"mode auto on a host without iptables", func(w *world) {
		w.in.Policy.Mode, w.in.Caps = ModeAuto, capsOf(Capability{Reason: "iptables-restore not found"}, Capability{}, nil)
	}, []moment{
		{at: 60, do: carry(9), plane: Userspace, state: StateUserspace, reason: "this host can't do iptables: iptables-restore not found"},
	}},
	{"all endpoints down", nil, []moment{
		{at: 0, do: do(carry(1), down("10.0.0.1"), down("10.0.0.2")), plane: Userspace, state: StateQualifying, reason: "all 2 endpoints are down: serving as if all were up"},
		{at: 60, plane: Userspace, state: StateQualifying, reason: "all 2 endpoints are down: serving as if all were up"},
	}},
	{"all endpoints of an offloaded service go down", nil, after(
		moment{at: 20, do: do(down("10.0.0.1"), down("10.0.0.2")), plane: IPTables, state: StateOffloaded, reason: "qualified; all 2 endpoints are down: serving as if all were up"},
	)},
	{"a service that was removed starts again", nil, after(
		moment{at: 20, do: func(w *world) {
			ports := w.ports
			w.ports = map[service.Key]service.Port{}
			w.compute()
			w.ports = ports
		}, plane: Userspace, state: StateQualifying, reason: steady10, qualifies: 30, wake: 30},
	)},
}

func TestTimelines(t *testing.T) {
	for _, tt := range timelines {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld(t)
			w.set(port("a"), "10.0.0.1 n1 ready", "10.0.0.2 n2 ready")
			if tt.prepare != nil {
				tt.prepare(w)
			}
			for _, m := range tt.moments {
				w.play(m)
			}
		})
	}
}

func program0(*world) {}

// atomic has every data plane change its rules with what steers to it.
func atomic(w *world) {
	w.in.Caps.Planes = slices.Clone(w.in.Caps.Planes)
	for i := range w.in.Caps.Planes {
		w.in.Caps.Planes[i].Atomic = true
	}
}

// inStep says whether the kernel holds all of the last plan.
func inStep(is bool) func(*world) { return func(w *world) { w.in.Observed.InStep = is } }

func down(address string) func(*world) {
	return func(w *world) { w.health("a", address, health.Down, w.in.Now, w.in.Now) }
}

// play lets one moment happen and compares. What happens sees the plan of the
// moment before.
func (w *world) play(m moment) {
	w.t.Helper()
	w.in.Now = t0.Add(time.Duration(m.at) * time.Second)
	if m.do != nil {
		m.do(w)
	}
	p := w.compute()
	s := p.Services[0]
	seconds := func(at time.Time) int {
		if at.IsZero() {
			return 0
		}
		return int(at.Sub(t0) / time.Second)
	}
	if s.DataPlane != m.plane || s.State != m.state || s.Reason != m.reason {
		w.t.Errorf("at %ds: %s, %s (%s), want %s, %s (%s)", m.at, s.DataPlane, s.State, s.Reason, m.plane, m.state, m.reason)
	}
	if q := seconds(s.QualifiesAt); q != m.qualifies {
		w.t.Errorf("at %ds: qualifies at %d, want %d", m.at, q, m.qualifies)
	}
	if at := seconds(p.Wake); at != m.wake {
		w.t.Errorf("at %ds: wakes at %d, want %d", m.at, at, m.wake)
	}
}

// causeMoment is one line of a timeline, as in moment: the cause, and the move
// that the service made.
type causeMoment struct {
	at    int
	do    func(*world)
	cause Cause
	move  Move
}

// isOffloaded is how most of these timelines begin.
var isOffloaded = []causeMoment{
	{do: carry(1), cause: CauseUnsteady},
	{at: 10, cause: CauseWriting},
	{at: 11, do: program, cause: CauseQualified, move: Offload},
}

func then(m ...causeMoment) []causeMoment { return append(isOffloaded[:3:3], m...) }

var causeTimelines = map[string][]causeMoment{
	"first connection": {{cause: CauseFew}},
	"endpoints down":   {{do: do(carry(1), down("10.0.0.1"), down("10.0.0.2")), cause: CausePanic}},
	"new endpoint": then(
		causeMoment{at: 20, do: setTo("10.0.0.1 n1 ready"), cause: CauseUpdating, move: CatchUp},
		causeMoment{at: 21, do: program, cause: CauseQualified, move: CatchUp}),
	"flapping": then(causeMoment{at: 100, do: flapping, cause: CauseFlapping, move: Recall}),
	"failure": {
		{do: carry(1), cause: CauseUnsteady},
		{at: 10, do: failNow, cause: CauseRulesFailed},
	},
	"pins": {
		{do: pinTo(service.PreferKernel), cause: CauseWriting},
		{at: 1, do: program, cause: CausePinned, move: Offload},
		{at: 2, do: pinTo(service.PreferUserspace), cause: CausePinned, move: Recall},
	},
	"pinned, and a failure": {
		{do: do(pinTo(service.PreferKernel), program0), cause: CauseWriting},
		{at: 1, do: program, cause: CausePinned, move: Offload},
		{at: 2, do: setTo("10.0.0.1 n1 ready"), cause: CauseUpdating, move: CatchUp},
		{at: 3, do: failNow, cause: CauseRulesFailed},
	},
	"pinned, and a new endpoint": {
		{do: do(pinTo(service.PreferKernel), program0), cause: CauseWriting},
		{at: 1, do: program, cause: CausePinned, move: Offload},
		{at: 2, do: setTo("10.0.0.1 n1 ready"), cause: CauseUpdating, move: CatchUp},
		{at: 3, do: program, cause: CausePinned, move: CatchUp},
	},
	"atomic": {
		{do: do(carry(1), atomic, inStep(true)), cause: CauseUnsteady},
		{at: 10, cause: CauseQualified, move: Offload},
		{at: 20, do: setTo("10.0.0.1 n1 ready"), cause: CauseQualified},
		{at: 21, do: failNow, cause: CauseRulesFailed, move: Recall},
	},
	"atomic, pinned": {{do: do(pinTo(service.PreferKernel), atomic, inStep(true)), cause: CausePinned}},
	"atomic, but out of step": {
		{do: do(carry(1), atomic, inStep(true)), cause: CauseUnsteady},
		{at: 10, cause: CauseQualified, move: Offload},
		{at: 20, do: do(setTo("10.0.0.1 n1 ready"), inStep(false)), cause: CauseUpdating, move: CatchUp},
		{at: 21, do: do(program, inStep(true)), cause: CauseQualified, move: CatchUp},
	},
	"in step, but not atomic": {{do: do(pinTo(service.PreferKernel), program0, inStep(true)), cause: CauseWriting}},
	"no endpoint": then(
		causeMoment{at: 20, do: setTo(), cause: CauseNoEndpoint},
		causeMoment{at: 21, do: setTo("10.0.0.1 n2"), cause: CauseNotReady},
		causeMoment{at: 22, do: setTo("10.0.0.1 n2 ready weight:0"), cause: CauseNoWeight},
		causeMoment{at: 23, do: setTo("fd00::1 n2 ready"), cause: CauseNoFamily},
		causeMoment{at: 24, do: do(change(func(p *service.Port) { p.InternalLocal = true }), setTo("10.0.0.1 n2 ready")), cause: CauseNotLocal},
		causeMoment{at: 25, do: change(func(p *service.Port) { p.ClusterIPs = nil }), cause: CauseNoAddress}),
	"algorithm": {{do: change(func(p *service.Port) { p.Algorithm = service.LeastConnections }), cause: CauseInexpressible}},
	"mode":      {{do: func(w *world) { w.in.Policy.Mode = ModeUserspace }, cause: CauseNoKernel}},
	"sctp": {
		{do: func(w *world) {
			w.in.Policy.Mode = ModeUserspace
			p := w.ports[port("a").Key]
			delete(w.ports, p.Key)
			p.Protocol = service.SCTP
			w.set(p, "10.0.0.1 n1 ready")
		}, cause: CauseUnservable},
		{at: 1, do: func(w *world) { w.in.Policy.Mode = ModeIPTables }, cause: CauseUpdating},
		{at: 2, do: func(w *world) {
			s := w.previous.Services[0]
			w.in.Observed.Programmed[s.Port.Key] = s.KernelHash
		}, cause: CauseKernelOnly},
	},
	"another proxy's": {{do: func(w *world) { w.in.Policy.ExcludeCIDRs = prefixes("10.0.0.0/8") }, cause: CauseExcluded}},
}

func TestCauses(t *testing.T) {
	seen := map[Cause]bool{}
	for name, moments := range causeTimelines {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.set(port("a"), "10.0.0.1 n1 ready", "10.0.0.2 n2 ready")
			for _, m := range moments {
				w.in.Now = t0.Add(time.Duration(m.at) * time.Second)
				was := w.previous
				if m.do != nil {
					m.do(w)
				}
				s := w.compute().Services[0]
				seen[s.Cause] = true
				if s.Cause != m.cause {
					t.Errorf("at %ds: cause %q (%s), want %q", m.at, s.Cause, s.Reason, m.cause)
				}
				move := NoMove
				if was != nil {
					move = Change{was.Services[0], s}.Move()
				}
				if move != m.move {
					t.Errorf("at %ds: move %q, want %q", m.at, move, m.move)
				}
				for _, e := range w.delta.Events(w.in.Now) {
					if e.Kind == "dataplane" && e.Move != m.move {
						t.Errorf("at %ds: event %q has move %q, want %q", m.at, e.Message, e.Move, m.move)
					}
				}
			}
		})
	}
	for _, c := range Causes {
		if !seen[c] {
			t.Errorf("no timeline has cause %q", c)
		}
	}
	for _, c := range slices.Concat(OffloadCauses, RecallCauses) {
		if !slices.Contains(Causes, c) {
			t.Errorf("%q isn't among the causes", c)
		}
	}
}
