package netfilter

import (
	"fmt"
	"math"
	"slices"
	"strings"
)

// Walk lists what a packet meets in one hook, and what comes of it.
type Walk struct {
	Steps []Step
	// Outcomes are all the ways that the packet may leave the hook. There is
	// always one at least. The probabilities of those that are certain add up to 1
	// if all are.
	Outcomes []Outcome
}

// Step is a rule or policy that the packet meets, whether it matches or not, in
// the order in which the kernel looks at them.
type Step struct {
	Hook Hook
	// Source says whose it is: "iptables-nft", "iptables-legacy" or "nftables".
	Source string
	Table  string // of nftables, with its family: "inet filter"
	Chain  string
	Index  int // of the rule in its chain, from 1; 0 for the policy
	Depth  int // of jumps: 0 in the base chain
	// Text is the rule as iptables-save or nft print it, without counters.
	Text           string
	Packets, Bytes *uint64 // nil: it has no counter

	Matched     Answer
	Probability float64 // that it matches, if it is Chance
	Policy      bool    // the base chain's policy, at its end
	// Outcome is what it does where it matches: "jump to KPROXY-PORTAL", "drop".
	Outcome string
	// Assumes is what isn't known and was taken for so, without which the packet may fare worse: that others haven't used
	// up a limit.
	Assumes string
	// Why is what decided: the first part that doesn't match, the entry of a set
	// that does, what can't be known.
	Why string
}

// Verdict says how a packet leaves a hook.
type Verdict string

// The verdicts. Accept is to go on, rewritten or not; Unknown is a target that
// decides by itself (NFQUEUE), or that this package doesn't know.
const (
	Accept  Verdict = "accept"
	Drop    Verdict = "drop"
	Reject  Verdict = "reject"
	Unknown Verdict = "unknown"
)

// Outcome is one way that a packet may leave a hook.
type Outcome struct {
	Verdict Verdict
	Packet  Packet // as it leaves: rewritten, marked
	// Probability is exact if the outcome is Certain. Else it is the most that it
	// may be, for rules were met of which it can't be said whether they match.
	Probability float64
	Certain     bool
	// Indexes of Steps, -1 for none: By decided the verdict (also that of an
	// accepting rule or a policy that isn't accept), Rewrote is the rule that gave
	// the packet another destination, Masked that gave it another source.
	By, Rewrote, Masked int
	// Doubts are the steps that make it uncertain.
	Doubts []int
}

// way is one way that the packet may have come so far. How likely it is lies
// between lo and hi; the two differ where rules were met of which it can't be
// said whether they match.
type way struct {
	packet Packet
	lo, hi float64

	verdict             Verdict // of those that have ended
	by, rewrote, masked int
	doubts              []int
}

// walker is one walk.
type walker struct {
	tables *Tables
	hook   Hook
	base   *Base
	steps  []Step
	inside []*chain // that the walk is in now
	work   int      // rules asked so far, for each way anew
}

// Bounds of a walk, far above what is on any host. The kernel finds loops when
// rules are written; text that was read may say anything.
const (
	maxWork = 400_000
	maxWays = 4096
)

// Walk follows a packet through a hook's base chains, or some of them.
func (t *Tables) Walk(p Packet, h Hook, span Span) *Walk {
	w := &walker{tables: t, hook: h}
	ways := []way{{packet: p, lo: 1, hi: 1, by: -1, rewrote: -1, masked: -1}}
	var ended []way
	for at := t.at(p, h, span); len(at) > 0; {
		n := tied(at)
		on, done := w.walkTied(at[:n], at[n:], ways)
		ways, at, ended = on, at[n:], append(ended, done...)
	}
	out := &Walk{Steps: w.steps}
	for _, x := range w.merge(ended) {
		out.Outcomes = append(out.Outcomes, x.outcome())
	}
	for _, x := range ways {
		x.verdict = Accept
		out.Outcomes = append(out.Outcomes, x.outcome())
	}
	slices.SortStableFunc(out.Outcomes, func(a, b Outcome) int { return a.Rewrote - b.Rewrote })
	return out
}

// tied counts how many of the first base chains come in an order that nothing tells: those of nftables and that of a legacy
// table, of one priority. It is 1 if the first comes first.
func tied(at []*Base) int {
	n := 1
	for n < len(at) && at[n].Hook == at[0].Hook && at[n].Priority == at[0].Priority && at[n].order() == at[0].order() {
		n++
	}
	if at[n-1].Source != sourceXTLegacy || at[0].Hook == Ingress || at[0].Hook == Egress {
		return 1
	}
	return n
}

// walkTied follows ways through base chains of which the last may come anywhere, with others after them. Where they come to
// the same in every order, nothing is uncertain.
func (w *walker) walkTied(bases, after []*Base, in []way) (on, ended []way) {
	alike := true
	for i := len(bases) - 1; i >= 0; i-- { // the place of the last
		from := len(w.steps)
		order := slices.Insert(slices.Clone(bases[:len(bases)-1]), i, bases[len(bases)-1])
		ways, done := w.walkInOrder(order, after, slices.Clone(in))
		switch {
		case i == len(bases)-1:
			on, ended = ways, done
		case w.sameTies(ways, on) && w.sameTies(on, ways) && w.sameTies(done, ended) && w.sameTies(ended, done):
			w.steps = w.steps[:from]
		default:
			on, ended, alike = append(on, ways...), append(ended, done...), false
		}
	}
	if alike {
		return on, ended
	}
	why := fmt.Sprintf("which comes first is known of neither: chain %s of the legacy variant, or another of its priority", bases[len(bases)-1].Chain)
	for _, ways := range [][]way{on, ended} {
		for i := range ways {
			x := &ways[i]
			step := max(x.by, x.rewrote, x.masked, 0)
			w.steps[step].Why = why
			x.doubt(step)
		}
	}
	return w.merge(on), ended
}

// sameTies reports whether each of a is as one of b, whatever steps led there, but for the rules that rewrote it.
func (w *walker) sameTies(a, b []way) bool {
	same := func(i, j int) bool {
		return i < 0 && j < 0 || i >= 0 && j >= 0 && w.steps[i].Table == w.steps[j].Table && w.steps[i].Chain == w.steps[j].Chain && w.steps[i].Index == w.steps[j].Index
	}
	for _, x := range a {
		if !slices.ContainsFunc(b, func(y way) bool {
			return x.packet == y.packet && x.verdict == y.verdict && same(x.rewrote, y.rewrote) && same(x.masked, y.masked)
		}) {
			return false
		}
	}
	return true
}

// walkInOrder follows ways through base chains, with others after them.
func (w *walker) walkInOrder(bases, after []*Base, ways []way) (on, ended []way) {
	isNAT := func(o *Base) bool { return o.Type == "nat" }
	for i, b := range bases {
		r := w.walkBase(b, ways)
		ended = append(ended, r.ended...)
		ways = w.merge(r.pass)
		if isNAT(b) && !slices.ContainsFunc(bases[i+1:], isNAT) && !slices.ContainsFunc(after, isNAT) {
			for j := range ways {
				decideNAT(&ways[j].packet, w.hook)
			}
		}
	}
	return ways, ended
}

// at are the base chains that the packet meets, with those of its device before
// or behind.
func (t *Tables) at(p Packet, h Hook, span Span) []*Base {
	var out []*Base
	for _, b := range t.Bases {
		if b.Hook == h && b.order() >= span.From && b.order() < span.Before && b.bridges() == (p.Frame.Bridge != "") {
			out = append(out, b)
		}
	}
	switch {
	case h == Prerouting && span.From == Whole.From:
		return append(t.onDevice(Ingress, p.In), out...)
	case h == Postrouting && span.Before == Whole.Before:
		return append(out, t.onDevice(Egress, p.Out)...)
	}
	return out
}

func (t *Tables) onDevice(h Hook, device string) []*Base {
	var out []*Base
	for _, b := range t.Bases {
		if b.Hook == h && slices.ContainsFunc(b.Devices, func(name string) bool {
			start, isPrefix := strings.CutSuffix(name, "*")
			return name == device || isPrefix && strings.HasPrefix(device, start)
		}) {
			out = append(out, b)
		}
	}
	return out
}

// bridges reports whether a base chain is at a hook of bridges.
func (b *Base) bridges() bool {
	return b.set != nil && b.set.bridges()
}

// BelowIP reports whether there are base chains that packets meet at bridges and single devices.
func (t *Tables) BelowIP() bool {
	return slices.ContainsFunc(t.Bases, func(b *Base) bool { return b.bridges() || len(b.Devices) > 0 })
}

// order is the priority that the kernel really gives a base chain: those of type
// nat are called by conntrack's own hooks, whatever their priority, which orders
// them among themselves (nf_nat_inet_ops in net/netfilter/nf_nat_proto.c).
func (b *Base) order() int {
	if b.Type != "nat" {
		return b.Priority
	}
	if b.Hook == Prerouting || b.Hook == Output {
		return priorityNATDst
	}
	return priorityNATSrc
}

func (x way) outcome() Outcome {
	slices.Sort(x.doubts)
	return Outcome{
		Verdict: x.verdict, Packet: x.packet, Probability: x.hi, Certain: x.hi-x.lo < 1e-9,
		By: x.by, Rewrote: x.rewrote, Masked: x.masked, Doubts: slices.Compact(x.doubts),
	}
}

// decideNAT notes that the nat chains have had their say.
func decideNAT(p *Packet, h Hook) {
	if h == Prerouting || h == Output {
		p.DstDone = true
	} else {
		p.SrcDone = true
	}
}

// skipsNAT reports whether the nat chains don't see a packet: only the first of
// a connection, and only until a decision was made.
func skipsNAT(p *Packet, h Hook) bool {
	if p.State != New && p.State != Related {
		return true
	}
	if h == Prerouting || h == Output {
		return p.DstDone
	}
	return p.SrcDone
}

// walkBase follows ways through one base chain.
func (w *walker) walkBase(b *Base, in []way) result {
	w.base = b
	var out result
	var ways []way
	for _, x := range in {
		if b.Type == "nat" && skipsNAT(&x.packet, w.hook) {
			out.pass = append(out.pass, x)
		} else {
			ways = append(ways, x)
		}
	}
	if len(ways) == 0 {
		return out
	}
	r := w.walkChain(b.set, b.set.chain(b.Table, b.Chain), ways, 0)
	out.add(result{pass: r.pass, ended: r.ended})
	if b.Type == "nat" {
		for i := range out.pass {
			if x := &out.pass[i]; x.rewrote >= 0 || x.masked >= 0 {
				decideNAT(&x.packet, w.hook)
			}
		}
	}
	out.add(w.policy(b, r.leave))
	return out
}

// policy ends a base chain.
func (w *walker) policy(b *Base, ways []way) result {
	if len(ways) == 0 {
		return result{}
	}
	at := len(w.steps)
	w.steps = append(w.steps, Step{
		Hook: w.base.Hook, Source: b.Source, Table: b.Table, Chain: b.Chain, Text: b.policyText(), Policy: true,
		Packets: b.Policies.Packets, Bytes: b.Policies.Bytes, Matched: Yes, Outcome: "policy " + string(b.Policy),
	})
	if b.Policy != Drop {
		return result{pass: ways}
	}
	for i := range ways {
		ways[i].verdict, ways[i].by = Drop, at
	}
	return result{ended: ways}
}

// doubt notes that it can't be said whether the packet comes this way.
func (x *way) doubt(step int) {
	x.lo = 0
	x.doubts = append(slices.Clip(x.doubts), step)
}

// walkChain follows ways through a chain. Its result's leave are those at the
// chain's end.
func (w *walker) walkChain(set *ruleset, c *chain, ways []way, depth int) result {
	var out result
	w.inside = append(w.inside, c)
	defer func() { w.inside = w.inside[:len(w.inside)-1] }()
	for i, r := range c.rules {
		if len(ways) == 0 {
			break
		}
		if w.work += len(ways); w.work > maxWork || len(ways) > maxWays {
			out.ended = append(out.ended, w.giveUp(ways, "there are more rules in the way than are followed")...)
			return out
		}
		ways = w.merge(w.walkRule(set, c, i, r, ways, depth, &out))
	}
	out.leave = append(out.leave, ways...)
	return out
}

// giveUp ends ways without an answer.
func (w *walker) giveUp(ways []way, why string) []way {
	at := len(w.steps) - 1
	if at >= 0 && w.steps[at].Why == "" {
		w.steps[at].Why = why
	}
	for i := range ways {
		ways[i].verdict, ways[i].by = Unknown, at
	}
	return ways
}

// walkRule returns the ways that go on after rule r, and adds the others to out.
func (w *walker) walkRule(set *ruleset, c *chain, i int, r *rule, ways []way, depth int, out *result) []way {
	r.prepare()
	at := position{step: len(w.steps), depth: depth, table: c.table, rules: set}
	w.steps = append(w.steps, Step{
		Hook: w.base.Hook, Source: set.source, Table: c.table, Chain: c.name, Index: i + 1, Depth: depth, Text: r.text,
		Packets: r.counter.Packets, Bytes: r.counter.Bytes, Outcome: r.action.text,
	})
	if r.isNFT {
		next, seen := w.runNFT(r, at, ways, out)
		s := &w.steps[at.step]
		why := s.Why // a way that was given up
		if s.summarise(seen); why != "" {
			s.Why = why
		}
		return next
	}
	var next, sure, unsure []way
	var seen []matched
	for _, x := range ways {
		h := r.match(w, &x.packet)
		seen = append(seen, h)
		switch h.answer {
		case No:
			next = append(next, x)
		case Yes:
			sure = append(sure, x)
		case Chance:
			hit, miss := x, x
			hit.lo, hit.hi = x.lo*h.chance, x.hi*h.chance
			miss.lo, miss.hi = x.lo*(1-h.chance), x.hi*(1-h.chance)
			sure, next = append(sure, hit), append(next, miss)
		default:
			unsure = append(unsure, x)
		}
	}
	w.steps[at.step].summarise(seen)
	if len(sure) > 0 {
		res := r.action.apply(w, at, sure)
		out.add(res)
		next = append(next, res.stay...)
	}
	if len(unsure) > 0 {
		next = append(next, w.applyUnsure(&r.action, at, unsure, out)...)
	}
	return next
}

// applyUnsure follows both ways of a rule that may match or not. Where they come
// to the same, nothing is uncertain.
func (w *walker) applyUnsure(a *action, at position, unsure []way, out *result) []way {
	if a.quiet {
		return unsure
	}
	taken := slices.Clone(unsure)
	for i := range taken {
		taken[i].doubt(at.step)
	}
	res := a.apply(w, at, taken)
	if len(res.leave)+len(res.pass)+len(res.ended) == 0 && sameWays(res.stay, unsure) {
		return unsure
	}
	out.add(res)
	var next []way
	for _, x := range unsure {
		x.doubt(at.step)
		next = append(next, x)
	}
	return append(next, res.stay...)
}

// sameWays reports whether each of a is as one of b, but for how certain it is.
func sameWays(a, b []way) bool {
	for _, x := range a {
		if !slices.ContainsFunc(b, func(y way) bool {
			return x.packet == y.packet && x.by == y.by && x.rewrote == y.rewrote && x.masked == y.masked
		}) {
			return false
		}
	}
	return true
}

// summarise says what a rule was for all the ways that came to it.
func (s *Step) summarise(seen []matched) {
	first := seen[0]
	s.Matched, s.Probability, s.Why, s.Assumes = first.answer, first.chance, first.why, first.assumes
	for _, h := range seen[1:] {
		if h.answer != first.answer || math.Abs(h.chance-first.chance) > 1e-12 {
			s.Matched, s.Probability = Maybe, 0
			s.Why = "it depends on which way the packet came"
			return
		}
	}
}

// merge joins ways that can't be told apart any more.
func (w *walker) merge(ways []way) []way {
	if len(ways) < 2 {
		return ways
	}
	type key struct {
		packet              Packet
		verdict             Verdict
		by, rewrote, masked int
	}
	at := make(map[key]int, len(ways))
	out := make([]way, 0, len(ways))
	for _, x := range ways {
		k := key{x.packet, x.verdict, x.by, x.rewrote, x.masked}
		i, seen := at[k]
		if !seen {
			at[k] = len(out)
			out = append(out, x)
			continue
		}
		o := &out[i]
		o.lo, o.hi = min(1, o.lo+x.lo), min(1, o.hi+x.hi)
		o.doubts = slices.Concat(o.doubts, x.doubts)
	}
	return out
}

// enter follows ways through a chain that a rule leads to.
func (w *walker) enter(name string, leave bool, at position, ways []way) result {
	c := at.rules.chain(at.table, name)
	switch {
	case c == nil:
		return result{ended: w.giveUp(ways, "the target "+name+" isn't known to this program")}
	case slices.Contains(w.inside, c):
		return result{ended: w.giveUp(ways, "chains lead to each other without end")}
	}
	r := w.walkChain(at.rules, c, ways, at.depth+1)
	if !leave {
		r.stay, r.leave = r.leave, nil
	}
	return r
}
