package trace

import (
	"net/netip"

	"kproxy.dev/kproxy/trace/netfilter"
)

// way is one of the ways that the packet may take, as far as it has been
// followed.
type way struct {
	packet              netfilter.Packet
	leg                 string  // names the endpoint from where the ways to endpoints part
	share               float64 // probability
	certain             bool    // share is exact
	doubt               string  // what makes it uncertain
	userspace, balanced bool    // it is a connection of userspace, or a packet that a kernel.Balancer sends on
	// endpoint is where the packet is sent; invalid while nobody has chosen.
	endpoint       netip.AddrPort
	why            string // why it is this endpoint
	packets, bytes *uint64
	rewrote        *netfilter.Step // the rule that gave the packet another destination
	masked         string          // the rule that gave the packet another source
	transparent    bool            // userspace connects from the client's address
	hops           int             // hooks passed
}

// end is where a way ends.
type end struct {
	way
	verdict Verdict // Forwarded, Refused, Dropped, NotAService or Undetermined
	stop    *Finding
}

// maxHops bounds rules that send a packet around for ever.
const maxHops = 24

// maxLegs is how many endpoints' ways are followed, and shownLegs of how many
// every step is shown: a service may have thousands.
const (
	maxLegs   = 256
	shownLegs = 3
)

// next continues w behind an outcome of a hook.
func (w way) next(walk *netfilter.Walk, o *netfilter.Outcome) way {
	w.hops++
	w.packet = o.Packet
	w.share *= o.Probability
	if !o.Certain {
		w.certain = false
		if len(o.Doubts) > 0 && w.doubt == "" {
			s := &walk.Steps[o.Doubts[0]]
			w.doubt = place(s) + ": " + s.Why
		}
	}
	if o.Masked >= 0 {
		w.masked = place(&walk.Steps[o.Masked])
	}
	if o.Rewrote >= 0 {
		s := &walk.Steps[o.Rewrote]
		w.packets, w.bytes, w.rewrote = s.Packets, s.Bytes, s
		if !o.Packet.Redirected {
			w.endpoint = o.Packet.Dst
			w.leg = w.endpoint.String()
		}
	}
	return w
}

// merge joins ways that differ in nothing but the rule that led there: weights
// give an endpoint several.
func merge(ways []way) []way {
	type key struct {
		packet netfilter.Packet
		masked string
	}
	var out []way
	at := map[key]int{}
	for _, w := range ways {
		k := key{w.packet, w.masked}
		i, ok := at[k]
		if !ok {
			at[k] = len(out)
			out = append(out, w)
			continue
		}
		o := &out[i]
		o.share = min(1, o.share+w.share)
		o.certain = o.certain && w.certain
		o.packets, o.bytes = add(o.packets, w.packets), add(o.bytes, w.bytes)
	}
	return out
}

func add(a, b *uint64) *uint64 {
	switch {
	case a == nil:
		return b
	case b == nil:
		return a
	}
	n := *a + *b
	return &n
}
