package netfilter

import "net/netip"

// What tests ask of a walk: its outcomes by destination, and all in one word.

// Choice is a destination that the hook may give a packet.
type Choice struct {
	To          netip.AddrPort
	Probability float64 // as in Outcome, of all ways there
	Certain     bool
	Redirect    bool  // to this node, by REDIRECT
	Steps       []int // the rules that choose it: several where weights give it several
	// Packets and Bytes are the sums of those rules' counters; nil if none has one.
	Packets, Bytes *uint64
}

// Choices are the destinations that this walk's rules choose, in the order of
// the rules. Outcomes that keep the packet's destination are no choice.
func (w *Walk) Choices() []Choice {
	var out []Choice
	at := map[netip.AddrPort]int{}
	counted := map[int]bool{}
	for _, o := range w.Outcomes {
		if o.Rewrote < 0 || o.Verdict == Drop || o.Verdict == Reject {
			continue
		}
		i, seen := at[o.Packet.Dst]
		if !seen {
			i = len(out)
			at[o.Packet.Dst] = i
			out = append(out, Choice{To: o.Packet.Dst, Certain: true, Redirect: o.Packet.Redirected})
		}
		c := &out[i]
		c.Probability = min(1, c.Probability+o.Probability)
		c.Certain = c.Certain && o.Certain
		if counted[o.Rewrote] {
			continue
		}
		counted[o.Rewrote] = true
		c.Steps = append(c.Steps, o.Rewrote)
		c.Packets = sum(c.Packets, w.Steps[o.Rewrote].Packets)
		c.Bytes = sum(c.Bytes, w.Steps[o.Rewrote].Bytes)
	}
	return out
}

func sum(a, b *uint64) *uint64 {
	if a == nil || b == nil {
		if a == nil {
			return b
		}
		return a
	}
	n := *a + *b
	return &n
}

// Verdict is the outcomes' common verdict; Unknown if they differ or aren't
// certain.
func (w *Walk) Verdict() Verdict {
	v := w.Outcomes[0].Verdict
	for _, o := range w.Outcomes {
		if o.Verdict != v {
			return Unknown
		}
	}
	return v
}
