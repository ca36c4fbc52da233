package netfilter

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
)

// nftMatch is a comparison of nftables.
type nftMatch struct {
	op          string
	left, right any
	set         *ruleset
}

// opaque is a part of a rule that this package can't judge.
type opaque struct{ why string }

func (o opaque) holds(*walker, *Packet) held { return held{answer: Maybe, why: o.why} }

// nftPassive are statements that change nothing a walk looks at. Adding to a set
// changes what later packets meet.
var nftPassive = map[string]bool{
	"log": true, "flow": true, "set": true, "ct helper": true, "ct timeout": true, "ct expectation": true, "continue": true,
	"dup": true, "secmark": true, "map": true,
}

// nftDepends says what statements that may end a rule look at.
var nftDepends = map[string]string{
	"limit": "it depends on the rate of packets (limit)", "quota": "it depends on how much has passed (quota)",
	"ct count": "it depends on how many connections there are (ct count)", "meter": "it depends on the rate of packets (meter)",
	"xt": "it has a match of iptables that nft can't print",
}

// parseNFTRule takes a rule apart.
func parseNFTRule(in *nftRule, set *ruleset) *rule {
	out := &rule{}
	for _, e := range in.Expr {
		for key, raw := range e {
			value := decodeNumbers(raw)
			out.addStatement(key, value, set)
		}
	}
	return out
}

// addStatement adds a match or a statement. A match that follows on something
// that was changed would have to be asked later than the others; none is known
// to need it, and the rule is undecided.
func (r *rule) addStatement(key string, value any, set *ruleset) {
	switch {
	case key == "match" && len(r.to) > 0:
		r.parts = append(r.parts, opaque{"it looks at a packet that it has changed before"})
	case key == "match":
		m, _ := value.(map[string]any)
		op, _ := m["op"].(string)
		r.parts = append(r.parts, nftMatch{op: op, left: m["left"], right: m["right"], set: set})
	case key == "counter":
		if m, ok := value.(map[string]any); ok {
			r.counter = Counter{counterOf(m["packets"]), counterOf(m["bytes"])}
		}
	case nftPassive[key]:
	case nftDepends[key] != "":
		r.parts = append(r.parts, opaque{nftDepends[key]})
	default:
		r.to = append(r.to, &nftTarget{key: key, value: value, set: set})
	}
}

func counterOf(v any) *uint64 {
	n, ok := v.(json.Number)
	if !ok {
		return nil
	}
	var out uint64
	if _, err := fmt.Sscan(n.String(), &out); err != nil {
		return nil
	}
	return &out
}

// decodeNumbers decodes JSON with its numbers as they are written.
func decodeNumbers(raw json.RawMessage) any {
	d := json.NewDecoder(bytes.NewReader(raw))
	d.UseNumber()
	var out any
	if d.Decode(&out) != nil {
		return nil
	}
	return out
}

// nftTarget is a statement that changes the packet or decides.
type nftTarget struct {
	key   string
	value any
	set   *ruleset
}

// nftVerdicts are the statements that decide.
var nftVerdicts = map[string]Verdict{"accept": Accept, "drop": Drop, "reject": Reject, "return": "return"}

// chainName is where jump and goto lead.
func (n *nftTarget) chainName() string {
	m, _ := n.value.(map[string]any)
	name, _ := m["target"].(string)
	return name
}

// quiet implements [target].
func (n *nftTarget) quiet() bool { return false }

// describe implements [target].
func (n *nftTarget) describe() string {
	switch n.key {
	case "jump":
		return "jump to " + n.chainName()
	case "goto":
		return "go to " + n.chainName()
	case "vmap":
		return "verdict by map"
	case "mangle":
		return "set a mark"
	}
	return n.key
}

// apply implements [target].
func (n *nftTarget) apply(w *walker, at place, ways []way) result {
	if v := nftVerdicts[n.key]; v != "" {
		return end(v, ways, at)
	}
	switch n.key {
	case "jump", "goto":
		return w.enter(n.chainName(), n.key == "goto", at, ways)
	case "notrack":
		for i := range ways {
			ways[i].packet.State = Untracked
		}
		return result{stay: ways}
	}
	var out result
	for _, x := range ways {
		r := n.applyOne(w, at, x)
		out.add(r)
		out.stay = append(out.stay, r.stay...)
	}
	return out
}

func (n *nftTarget) applyOne(w *walker, at place, x way) result {
	switch n.key {
	case "vmap":
		return n.verdictMap(w, at, x)
	case "mangle":
		if n.mangle(w, &x.packet) {
			return result{stay: []way{x}}
		}
	case "dnat", "snat", "redirect", "masquerade":
		to, ok := n.addressRange()
		switch {
		case !ok:
		case n.key == "dnat":
			return w.rewrite(x, to, at)
		case n.key == "snat":
			return w.setSource(x, to, at)
		case n.key == "redirect":
			return w.redirect(x, to.first, to.last, at)
		default:
			return w.masquerade(x, at)
		}
	}
	return result{ended: w.giveUp([]way{x}, "what the statement "+n.key+" does can't be told")}
}

// addressRange is what nat statements lead to; false for what a map decides.
func (n *nftTarget) addressRange() (addressRange, bool) {
	m, ok := n.value.(map[string]any)
	if !ok {
		return addressRange{}, n.value == nil // masquerade, redirect: null
	}
	text := ""
	switch a := m["addr"].(type) {
	case nil:
	case string:
		text = a
	case map[string]any:
		ends, ok := a["range"].([]any)
		if !ok || len(ends) != 2 {
			return addressRange{}, false
		}
		text = fmt.Sprintf("%v-%v", ends[0], ends[1])
	default:
		return addressRange{}, false
	}
	if strings.Contains(text, ":") {
		text = "[" + text + "]"
	}
	switch p := m["port"].(type) {
	case nil:
	case json.Number:
		text += ":" + p.String()
	case map[string]any:
		ends, ok := p["range"].([]any)
		if !ok || len(ends) != 2 {
			return addressRange{}, false
		}
		text += fmt.Sprintf(":%v-%v", ends[0], ends[1])
	default:
		return addressRange{}, false
	}
	return parseRange(text)
}

// mangle sets a mark; false where it sets something else, or by something that
// isn't known.
func (n *nftTarget) mangle(w *walker, p *Packet) bool {
	m, _ := n.value.(map[string]any)
	key, _ := m["key"].(map[string]any)
	what, value := "", uint32(0)
	for kind, detail := range key {
		d, _ := detail.(map[string]any)
		name, _ := d["key"].(string)
		what = kind + " " + name
	}
	if what != "meta mark" && what != "ct mark" {
		return what == "meta priority" || what == "meta nftrace" || strings.HasPrefix(what, "payload ip dscp")
	}
	v, ok := evaluate(w, p, m["value"])
	if !ok || v.kind != kindNumber {
		return false
	}
	value = uint32(v.number)
	if what == "meta mark" {
		p.Mark = value
	} else {
		p.ConnMark = value
	}
	return true
}

// verdictMap looks the packet up in a map of verdicts.
func (n *nftTarget) verdictMap(w *walker, at place, x way) result {
	m, _ := n.value.(map[string]any)
	have, ok := evaluate(w, &x.packet, m["key"])
	elements, known := elementsOf(m["data"], n.set)
	if have.absent {
		return result{stay: []way{x}} // the rule doesn't match a packet without the field
	}
	out := result{}
	for _, e := range catchAllLast(elements) {
		pair, _ := e.([]any)
		if len(pair) != 2 {
			known = false
			continue
		}
		answer := Maybe
		if ok {
			answer = have.in(pair[0], n.set)
		}
		if answer == No {
			continue
		}
		hit := x
		if answer != Yes {
			hit.doubt(at.step)
			x.doubt(at.step)
		}
		verdict, _ := pair[1].(map[string]any)
		for key, value := range verdict {
			r := (&nftTarget{key: key, value: value, set: n.set}).apply(w, at, []way{hit})
			out.add(r)
			out.stay = append(out.stay, r.stay...)
		}
		if answer == Yes {
			return out
		}
	}
	if !known {
		out.ended = append(out.ended, w.giveUp([]way{x}, "its map can't be read")...)
		return out
	}
	out.stay = append(out.stay, x)
	return out
}

// catchAllLast brings the element "*" to the end: it is for what no other is for.
func catchAllLast(elements []any) []any {
	isAll := func(e any) int {
		if pair, _ := e.([]any); len(pair) == 2 && pair[0] == any("*") {
			return 1
		}
		return 0
	}
	return slices.SortedStableFunc(slices.Values(elements), func(a, b any) int { return isAll(a) - isAll(b) })
}
