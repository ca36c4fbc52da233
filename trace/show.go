package trace

import (
	"strings"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/trace/netfilter"
)

// visits are the rules that the packet met.
type visits struct {
	steps map[chain][]netfilter.Step // once each
	met   map[chain]map[int]bool
}

// chain names a chain.
type chain struct{ table, name string }

func (v *visits) note(w *netfilter.Walk) {
	if v.steps == nil {
		v.steps, v.met = map[chain][]netfilter.Step{}, map[chain]map[int]bool{}
	}
	for _, s := range w.Steps {
		if s.Source == "nftables" {
			continue
		}
		c := chain{s.Table, s.Chain}
		if v.met[c] == nil {
			v.met[c] = map[int]bool{}
		}
		if !v.met[c][s.Index] {
			v.met[c][s.Index] = true
			v.steps[c] = append(v.steps[c], s)
		}
	}
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
