package plan

import (
	"slices"
	"testing"
	"time"

	"kproxy.dev/kproxy/service"
)

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
	"refusal": then(
		causeMoment{at: 100, do: refused("10.0.0.1:8080"), cause: CauseRefused, move: Recall},
		causeMoment{at: 111, do: refused(), cause: CauseQualified, move: Offload}),
	"failure": {
		{do: carry(1), cause: CauseUnsteady},
		{at: 10, do: failNow, cause: CauseRulesFailed},
	},
	"pins": {
		{do: pinTo(service.PreferKernel), cause: CauseUpdating},
		{at: 1, do: program, cause: CausePinned, move: Offload},
		{at: 2, do: pinTo(service.PreferUserspace), cause: CausePinned, move: Recall},
	},
	"pinned, and a failure": {
		{do: do(pinTo(service.PreferKernel), program0), cause: CauseUpdating},
		{at: 1, do: program, cause: CausePinned, move: Offload},
		{at: 2, do: setTo("10.0.0.1 n1 ready"), cause: CauseUpdating, move: CatchUp},
		{at: 3, do: failNow, cause: CauseRulesFailed},
	},
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
