package trace

import (
	"strings"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/trace/netfilter"
)

// show adds a step. Of many endpoints' ways only the first are shown, and what
// stops a packet on any other is a finding.
func (t *tracer) show(w way, s Step) {
	if w.leg != "" {
		if _, ok := t.legs[w.leg]; !ok {
			t.legs[w.leg] = len(t.legs)
		}
		if t.legs[w.leg] >= shownLegs && !t.req.Every {
			return
		}
	}
	s.Leg = w.leg
	t.steps = append(t.steps, s)
}

func (t *tracer) showRoute(w way, r *route, outcome string) {
	if outcome == "" {
		outcome = "leaves by " + r.link
		if r.local() {
			outcome = "stays on this node"
		}
		if r.local() && t.departs {
			outcome = "comes back to the client"
		}
	}
	t.show(w, Step{Hook: "routing", Kind: KindRoute, Text: r.String(), Outcome: outcome, Why: r.command()})
}

func (t *tracer) showSetting(w way, text, outcome string) {
	t.show(w, Step{Hook: "routing", Kind: KindSetting, Text: text, Outcome: outcome})
}

// showWalk adds the steps of a walk that are worth showing: rules that match or
// may match, those that redirect to userspace whether they match or not, and policies that stop.
func (t *tracer) showWalk(w way, walk *netfilter.Walk) {
	for i := range walk.Steps {
		s := &walk.Steps[i]
		if !worthShowing(s) {
			continue
		}
		step := Step{
			Hook: string(s.Hook), Silent: netfilter.Silent(s), Table: s.Table, Chain: s.Chain, Kind: KindRule, Text: s.Text,
			Packets: s.Packets, Bytes: s.Bytes, Outcome: outcomeText(s), Why: s.Why,
		}
		if s.Policy {
			step.Kind = KindPolicy
		}
		t.show(w, step)
	}
}

func worthShowing(s *netfilter.Step) bool {
	switch {
	case s.Policy:
		return !strings.Contains(strings.ToLower(s.Outcome), "accept")
	case s.Matched == netfilter.No:
		return s.Chain == kernel.Prefix+"PORTAL" || netfilter.Own(s) && strings.Contains(s.Text, "@userspace")
	}
	return true
}

func outcomeText(s *netfilter.Step) string {
	if s.Matched == netfilter.No {
		return "no match"
	}
	return map[netfilter.Answer]string{netfilter.Yes: "matches: ", netfilter.Chance: "by chance: ", netfilter.Maybe: "may match: "}[s.Matched] + s.Outcome
}
