package netfilter

import (
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"kproxy.dev/kproxy/service"
)

// xtables is a target of iptables, or a chain's name.
type xtables struct {
	name    string
	leave   bool // -g: the chain's end isn't here but where this one's is
	options []option
}

// passive are the targets that change nothing a walk looks at; the packet goes on
// with the next rule.
var passive = map[string]bool{
	"LOG": true, "NFLOG": true, "ULOG": true, "TRACE": true, "AUDIT": true, "CLASSIFY": true, "DSCP": true, "TOS": true,
	"TTL": true, "HL": true, "TCPMSS": true, "TCPOPTSTRIP": true, "CHECKSUM": true, "SECMARK": true, "CONNSECMARK": true,
	"IDLETIMER": true, "LED": true, "RATEEST": true, "TEE": true, "ECN": true,
}

// quiet implements [target].
func (x *xtables) quiet() bool {
	return passive[x.name] || x.name == "CT" && !x.has("--notrack") || x.name == "SET" && !x.has("--map-set")
}

func (x *xtables) has(name string) bool {
	_, ok := find(x.options, name)
	return ok
}

// describe implements [target].
func (x *xtables) describe() string {
	options := ""
	for _, o := range x.options {
		options += " " + strings.Join(append([]string{o.name}, o.args...), " ")
	}
	switch {
	case x.leave:
		return "go to " + x.name
	case x.name == strings.ToUpper(x.name) && xtTargets[x.name] != nil, passive[x.name]:
		return x.name + options
	case terminal[x.name] != "":
		return strings.ToLower(x.name)
	}
	return "jump to " + x.name
}

// terminal are the verdicts.
var terminal = map[string]Verdict{"ACCEPT": Accept, "DROP": Drop, "REJECT": Reject, "RETURN": "return"}

// xtTargets are the targets that change a packet. Each reports false where it
// can't say how.
var xtTargets = map[string]func(w *walker, x *xtables, in way, at place) result{
	"MARK": setMark, "CONNMARK": setConnMark, "DNAT": destinationNAT, "REDIRECT": redirectNAT, "SNAT": sourceNAT,
	"MASQUERADE": masqueradeNAT, "TPROXY": tproxy, "NOTRACK": untrack, "CT": untrack, "SET": mapSet, "NETMAP": undecided,
	"NFQUEUE": undecided, "QUEUE": undecided, "SYNPROXY": undecided, "HMARK": undecided,
}

// apply implements [target].
func (x *xtables) apply(w *walker, at place, ways []way) result {
	if passive[x.name] {
		return result{stay: ways}
	}
	if v := terminal[x.name]; v != "" {
		return end(v, ways, at)
	}
	if f := xtTargets[x.name]; f != nil {
		var out result
		for _, in := range ways {
			r := f(w, x, in, at)
			out.add(r)
			out.stay = append(out.stay, r.stay...)
		}
		return out
	}
	return w.enter(x.name, x.leave, at, ways)
}

// end is what becomes of ways at a target that says no more than a verdict, or
// "return".
func end(v Verdict, ways []way, at place) result {
	switch v {
	case Accept:
		return result{pass: decide(ways, v, at)}
	case "return":
		return result{leave: ways}
	}
	return result{ended: decide(ways, v, at)}
}

func decide(ways []way, v Verdict, at place) []way {
	for i := range ways {
		ways[i].verdict, ways[i].by = v, at.step
	}
	return ways
}

// enter follows ways through a chain that a rule leads to.
func (w *walker) enter(name string, leave bool, at place, ways []way) result {
	c := at.rules.chain(at.table, name)
	switch {
	case c == nil:
		return result{ended: w.giveUp(ways, "the target "+name+" isn't known to this program")}
	case slices.Contains(w.inside, c):
		return result{ended: w.giveUp(ways, "chains lead to each other without end")}
	}
	r := w.walkChain(at.rules, c, ways, at.depth+1)
	if leave {
		return result{leave: r.leave, pass: r.pass, ended: r.ended}
	}
	return result{stay: r.leave, pass: r.pass, ended: r.ended}
}

// setMark is MARK (mark_tg in net/netfilter/xt_mark.c).
func setMark(w *walker, x *xtables, in way, at place) result {
	o, _ := find(x.options, "--set-xmark")
	value, mask, ok := masked(o.arg(0))
	if !ok {
		return undecided(w, x, in, at)
	}
	in.packet.Mark = in.packet.Mark&^mask ^ value
	return result{stay: []way{in}}
}

// setConnMark is CONNMARK (connmark_tg_shift in net/netfilter/xt_connmark.c).
func setConnMark(w *walker, x *xtables, in way, at place) result {
	p := &in.packet
	if o, ok := find(x.options, "--set-xmark"); ok {
		value, mask, ok := masked(o.arg(0))
		if !ok {
			return undecided(w, x, in, at)
		}
		p.ConnMark = p.ConnMark&^mask ^ value
		return result{stay: []way{in}}
	}
	nf, ct := uint32(0xffffffff), uint32(0xffffffff)
	for _, o := range x.options {
		mask, _, ok := masked(o.arg(0))
		switch {
		case o.name == "--nfmask" && ok:
			nf = mask
		case o.name == "--ctmask" && ok:
			ct = mask
		case o.name == "--mask" && ok:
			nf, ct = mask, mask
		}
	}
	switch {
	case x.has("--save-mark"):
		p.ConnMark = p.ConnMark&^ct ^ p.Mark&nf
	case x.has("--restore-mark"):
		p.Mark = p.Mark&^nf ^ p.ConnMark&ct
	default:
		return undecided(w, x, in, at)
	}
	return result{stay: []way{in}}
}

// untrack is NOTRACK, and CT, which does nothing else to a walk.
func untrack(_ *walker, x *xtables, in way, _ place) result {
	if x.name == "NOTRACK" || x.has("--notrack") {
		in.packet.State = Untracked
	}
	return result{stay: []way{in}}
}

// mapSet is SET: adding to sets changes nothing for this packet, whatever later
// rules ask; mapping may.
func mapSet(w *walker, x *xtables, in way, at place) result {
	if x.has("--map-set") {
		return undecided(w, x, in, at)
	}
	return result{stay: []way{in}}
}

// undecided is a target that may do anything.
func undecided(w *walker, x *xtables, in way, _ place) result {
	return result{ended: w.giveUp([]way{in}, "what the target "+x.name+" does isn't known to this program")}
}

// tproxy delivers to a socket of this host, and goes no further in the table.
func tproxy(w *walker, x *xtables, in way, at place) result {
	p := &in.packet
	if o, ok := find(x.options, "--tproxy-mark"); ok {
		value, mask, ok := masked(o.arg(0))
		if !ok {
			return undecided(w, x, in, at)
		}
		p.Mark = p.Mark&^mask ^ value
	}
	port := p.Dst.Port()
	if o, ok := find(x.options, "--on-port"); ok {
		n, err := strconv.ParseUint(o.arg(0), 10, 16)
		if err != nil {
			return undecided(w, x, in, at)
		}
		port = uint16(n)
	}
	a := p.Dst.Addr()
	if o, ok := find(x.options, "--on-ip"); ok {
		if given, err := netip.ParseAddr(o.arg(0)); err == nil && !given.IsUnspecified() {
			a = given
		}
	}
	p.Socket = netip.AddrPortFrom(a, port)
	in.by = at.step
	return result{pass: []way{in}}
}

// family is that of the rules.
func (w *walker) family() service.Family { return w.tables.Family }
