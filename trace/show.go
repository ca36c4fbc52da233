package trace

import (
	"slices"
	"strings"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/trace/netfilter"
)

// chain names a chain.
type chain struct{ table, name string }

// note remembers the rules of iptables that the packet met.
func (t *tracer) note(w *netfilter.Walk) {
	for _, s := range w.Steps {
		c := chain{s.Table, s.Chain}
		if s.Source != "nftables" && !slices.ContainsFunc(t.met[c], func(o netfilter.Step) bool { return o.Index == s.Index }) {
			t.met[c] = append(t.met[c], s)
		}
	}
}

// metRule is a rule in a table that matches the packet and names a target; nil if it met none.
func (t *tracer) metRule(table, target string) *netfilter.Step {
	for c, steps := range t.met {
		for i := range steps {
			if s := &steps[i]; c.table == table && s.Matched == netfilter.Yes && strings.Contains(strings.ToUpper(s.Text), target) {
				return s
			}
		}
	}
	return nil
}

// show adds a step. Of many endpoints' ways only the first are shown, and what
// stops a packet on any other is a finding.
func (t *tracer) show(w way, s Step) {
	if w.leg != "" {
		if _, ok := t.legs[w.leg]; !ok {
			t.legs[w.leg] = len(t.legs)
		}
		if t.legs[w.leg] >= shownLegs {
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
	}
	t.show(w, Step{Hook: "routing", Kind: KindRoute, Text: r.String(), Outcome: outcome, Why: r.command()})
}

func (t *tracer) showSetting(w way, text, outcome string) {
	t.show(w, Step{Hook: "routing", Kind: KindSetting, Text: text, Outcome: outcome})
}

// showWalk adds the steps of a walk that are worth showing: rules that match or
// may match, the portal's whether they match or not, and policies that stop.
func (t *tracer) showWalk(w way, walk *netfilter.Walk) {
	for i := range walk.Steps {
		s := &walk.Steps[i]
		if !worthShowing(s) {
			continue
		}
		step := Step{
			Hook: string(s.Hook), Table: s.Table, Chain: s.Chain, Kind: KindRule, Text: s.Text,
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
		return s.Chain == kernel.Prefix+"PORTAL"
	}
	return true
}

func outcomeText(s *netfilter.Step) string {
	switch s.Matched {
	case netfilter.Yes:
		return "matches: " + s.Outcome
	case netfilter.No:
		return "no match"
	case netfilter.Chance:
		return "by chance: " + s.Outcome
	}
	return "may match: " + s.Outcome
}
