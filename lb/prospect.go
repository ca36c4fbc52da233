package lb

import "net/netip"

// Prospect says what a Picker would do with a client's next connection.
type Prospect struct {
	// Shares are the targets' probabilities, by index; they add up to 1, or are
	// all 0 if no target is left.
	Shares []float64
	// Next is the target whose turn it is if no other client comes first; -1 where
	// chance decides, or no target is left.
	Next int
}

// ProspectOf says what p, which New returned for targets, would do, without
// doing it: no target loses a turn by it. Where a client's address decides, or the
// fewest connections do, the target is certain; where turns are taken, shares
// are those of many connections, since others may come first.
func ProspectOf(p Picker, targets []Target, client netip.Addr, skip Skip) Prospect {
	out := Prospect{Shares: make([]float64, len(targets)), Next: -1}
	equal := func(int) float64 { return 1 }
	byWeight := func(i int) float64 { return float64(targets[i].Weight) }
	switch p := p.(type) {
	case *roundRobin:
		out.share(p.ids, skip, equal)
		out.Next = firstLeft(p.ids, p.next.Load(), skip)
	case *weighted:
		out.share(eligible(targets), skip, byWeight)
		p.mu.Lock()
		out.Next = int(p.first(skip))
		p.mu.Unlock()
	case *leastConnections:
		p.mu.Lock()
		out.Next = p.least(skip)
		p.mu.Unlock()
		out.certain()
	case *sourceHash, *maglev:
		out.Next = p.Pick(client, skip) // these two remember nothing
		out.certain()
	default:
		out.share(eligible(targets), skip, byWeight)
	}
	return out
}

func (o *Prospect) certain() {
	if o.Next >= 0 {
		o.Shares[o.Next] = 1
	}
}

// share divides 1 among the ids that skip leaves.
func (o *Prospect) share(ids []int32, skip Skip, weight func(int) float64) {
	var sum float64
	for _, id := range ids {
		if !excluded(skip, id) {
			o.Shares[id] = weight(int(id))
			sum += o.Shares[id]
		}
	}
	for i := range o.Shares {
		if sum > 0 {
			o.Shares[i] /= sum
		}
	}
}
