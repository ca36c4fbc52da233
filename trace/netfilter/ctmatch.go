package netfilter

import (
	"net/netip"
	"slices"
	"strings"
)

// conntrack is the matches conntrack and state. Of a packet without an entry only
// the state is asked: it decides alone, and without it nothing matches
// (conntrack_mt in net/netfilter/xt_conntrack.c).
func conntrack(w *walker, p *Packet, m *module) held {
	out := held{answer: Yes}
	asked, entry := false, w.hasEntry(p)
	for _, o := range m.options {
		state := o.name == "--ctstate" || o.name == "--state"
		if asked = asked || state; !entry && !state {
			continue
		}
		switch h := ctOption(w, p, o); h.answer {
		case No:
			return h
		case Yes:
		default:
			out = h
		}
	}
	if !entry && !asked {
		return held{answer: No, why: "conntrack has no entry of it"}
	}
	return out
}

func ctOption(w *walker, p *Packet, o option) held {
	switch o.name {
	case "--ctstate", "--state":
		have := w.states(p)
		for s := range strings.SplitSeq(o.arg(0), ",") {
			if slices.Contains(have, s) {
				return is(true, o.not, "its state is %s", strings.Join(have, ","))
			}
		}
		return is(false, o.not, "its state is %s", strings.Join(have, ","))
	case "--ctdir":
		return is(strings.EqualFold(o.arg(0), p.direction()), o.not, "its direction is %s", strings.ToUpper(p.direction()))
	case "--ctproto":
		return protocol(p.Protocol, o)
	case "--ctorigsrc":
		return address(p.OrigSrc.Addr(), o.arg(0), o.not, "original source")
	case "--ctorigdst":
		return address(p.OrigDst.Addr(), o.arg(0), o.not, "original destination")
	case "--ctorigsrcport":
		return portIn(p.OrigSrc.Port(), o.arg(0), o.not, "source")
	case "--ctorigdstport":
		return portIn(p.OrigDst.Port(), o.arg(0), o.not, "destination")
	case "--ctreplsrc":
		return address(p.replySource().Addr(), o.arg(0), o.not, "reply's source")
	case "--ctreplsrcport":
		return portIn(p.replySource().Port(), o.arg(0), o.not, "destination")
	case "--ctstatus":
		return status(p, o)
	}
	return maybe("the option %s isn't known to this program", o.name)
}

// replySource is whom answers come from: the destination as it is now.
func (p *Packet) replySource() netip.AddrPort {
	if p.Reply {
		return p.Src
	}
	return p.Dst
}

// hasEntry reports whether conntrack has seen a packet, and keeps an entry.
func (w *walker) hasEntry(p *Packet) bool {
	first := w.hook == Prerouting && p.In != "lo" || w.hook == Output
	return p.State != Untracked && p.State != Invalid && w.base.Hook != Ingress && (!first || w.base.order() >= priorityConntrack)
}

// states are the words of --ctstate that fit. Before conntrack has seen a packet
// it is invalid (conntrack_mt in net/netfilter/xt_conntrack.c).
func (w *walker) states(p *Packet) []string {
	switch {
	case p.State == Untracked:
		return []string{string(Untracked)}
	case !w.hasEntry(p):
		return []string{string(Invalid)}
	}
	out := []string{string(p.State)}
	if p.DNAT {
		out = append(out, "DNAT")
	}
	if p.SNAT {
		out = append(out, "SNAT")
	}
	return out
}

// status is --ctstatus, of a new connection: nobody has answered it.
func status(p *Packet, o option) held {
	if p.State != New {
		return maybe("the connection's status isn't known")
	}
	for s := range strings.SplitSeq(o.arg(0), ",") {
		switch s {
		case "EXPECTED", "SEEN_REPLY", "ASSURED":
		default:
			return maybe("the connection's status isn't known")
		}
	}
	return is(false, o.not, "the connection is new")
}
