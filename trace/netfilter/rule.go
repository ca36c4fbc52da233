package netfilter

import (
	"fmt"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/service"
)

// ruleset is the chains of one source, by table.
type ruleset struct {
	source string
	family service.Family
	chains map[string]*chain // "table chain"
	nft    *nftTable         // of nftables: what its rules look at
}

func (r *ruleset) chain(table, name string) *chain { return r.chains[table+" "+name] }

// bridges reports whether its chains are of the family bridge.
func (r *ruleset) bridges() bool { return r.nft != nil && r.nft.family == unix.NFPROTO_BRIDGE }

// chain is a chain with its rules.
type chain struct {
	table, name string
	policy      Verdict // empty for one that isn't built in
	counter     Counter
	rules       []*rule
}

// rule is a rule of either kind: its conditions must all hold, in order, and then its action happens.
type rule struct {
	text    string
	counter Counter
	// spec is iptables' text of conditions and target until a packet meets the rule: of many
	// thousand rules it meets a few.
	spec       string
	conditions []condition
	action     action
	// program is a rule of nftables, in which matches and actions alternate; action is only
	// for people then.
	program []instruction
	isNFT   bool
	ends    bool // program has a verdict
}

// condition is one thing that a rule asks about a packet.
type condition func(w *walker, p *Packet) matched

// matched holds what can be said about a condition.
type matched struct {
	answer Answer
	chance float64 // of Chance
	why    string
	// assumes says what isn't known, and was taken for so, which only lets packets pass.
	assumes string
}

func maybe(format string, args ...any) matched {
	return matched{answer: Maybe, why: fmt.Sprintf(format, args...)}
}

// is turns what an option asks, and its "!", into an answer.
func is(yes, not bool, format string, args ...any) matched {
	if yes != not {
		return matched{answer: Yes}
	}
	return matched{answer: No, why: fmt.Sprintf(format, args...)}
}

// invert is the answer to an option with "!".
func (m matched) invert(not bool) matched {
	switch {
	case !not:
	case m.answer == Yes:
		m.answer = No
	case m.answer == No:
		m.answer = Yes
	case m.answer == Chance:
		m.chance = 1 - m.chance
	}
	return m
}

// match asks all conditions of a rule: one that doesn't hold decides, whatever is
// unknown about the others.
func (r *rule) match(w *walker, p *Packet) matched {
	out := matched{answer: Yes, chance: 1}
	for _, holds := range r.conditions {
		m := holds(w, p)
		if m.assumes != "" {
			out.assumes = m.assumes
		}
		switch {
		case m.answer == No:
			return m
		case m.answer == Yes:
			if out.answer == Yes && out.why == "" {
				out.why = m.why
			}
		case m.answer == Chance:
			out.chance *= m.chance
			if out.answer == Yes {
				out.answer, out.why = Chance, m.why
			}
		case out.answer != Maybe:
			out.answer, out.why = Maybe, m.why
		}
	}
	if r.action.quiet {
		out.assumes = ""
	}
	return assumed(out, r.action.chain == "" && r.action.verdict != Drop && r.action.verdict != Reject)
}

// action describes what a rule does with packets that match: one of quiet, verdict, chain and change.
type action struct {
	text    string // in words: "jump to KPROXY-PORTAL"
	quiet   bool   // it changes nothing that a walk looks at
	verdict Verdict
	chain   string // where it leads
	leave   bool   // that chain's end isn't here but where this one's is
	// change is false where it can't be told what happens; nil if it never can.
	change func(w *walker, x way, at position) (result, bool)
	what   string // is what changes: "the target NFQUEUE"
}

// returns is the verdict that leads back to the chain before.
const returns Verdict = "return"

// position says where an action is.
type position struct {
	step  int
	depth int
	table string
	rules *ruleset
}

// result says where the ways go after an action or a chain.
type result struct {
	stay  []way // go on with the next rule
	leave []way // go on after the rule that led to this chain
	pass  []way // are done with the base chain
	ended []way // are done with the packet
}

func (r *result) add(o result) {
	r.leave = append(r.leave, o.leave...)
	r.pass = append(r.pass, o.pass...)
	r.ended = append(r.ended, o.ended...)
}

func stays(x way) result { return result{stay: []way{x}} }

// modify is a change of the packet alone.
func modify(f func(*Packet) bool) func(*walker, way, position) (result, bool) {
	return func(_ *walker, x way, _ position) (result, bool) {
		ok := f(&x.packet)
		return stays(x), ok
	}
}

func (a *action) apply(w *walker, at position, ways []way) result {
	switch {
	case a.quiet:
		return result{stay: ways}
	case a.verdict == returns:
		return result{leave: ways}
	case a.verdict != "":
		for i := range ways {
			ways[i].verdict, ways[i].by = a.verdict, at.step
		}
		if a.verdict == Accept {
			return result{pass: ways}
		}
		return result{ended: ways}
	case a.chain != "":
		return w.enter(a.chain, a.leave, at, ways)
	}
	var out result
	for _, x := range ways {
		r, ok := result{}, false
		if a.change != nil {
			r, ok = a.change(w, x, at)
		}
		if !ok {
			r = result{ended: w.giveUp([]way{x}, "what "+a.what+" does isn't known to this program")}
		}
		out.add(r)
		out.stay = append(out.stay, r.stay...)
	}
	return out
}
