package plan

import "kproxy.dev/kproxy/service"

// Delta says which service ports a plan changes. [Compute] returns it with the
// plan; consumers carry it out instead of comparing plans themselves. It leads
// from one plan to the next, so a consumer that skips plans joins their Deltas
// with [Delta.Then].
type Delta struct {
	// Full: what has changed isn't known, as with the first plan. Changes then holds
	// every service port of both plans, and a consumer drops what it remembers of
	// service ports that the plan doesn't have.
	Full    bool
	Changes []Change // in key order
}

// Change is a service port that a plan changes: Was is nil for a new one, Is for
// one that is gone. Neither is modified.
type Change struct{ Was, Is *Service }

// Key names the service port.
func (c Change) Key() service.Key {
	if c.Is != nil {
		return c.Is.Port.Key
	}
	return c.Was.Port.Key
}

// Rules reports whether the service port needs other rules of the kernel than before.
func (c Change) Rules() bool {
	return c.Was == nil || c.Is == nil || c.Was.KernelHash != c.Is.KernelHash
}

// Between returns the Delta from old, nil for none, to p where what p was computed
// from isn't known: it is Full.
func Between(old, p *Plan) Delta {
	was, is := old.services(), p.services()
	d := Delta{Full: true, Changes: make([]Change, 0, len(is))}
	for i, j := range service.Merge(len(was), len(is), func(i, j int) int { return was[i].Port.Compare(is[j].Port.Key) }) {
		d.Changes = append(d.Changes, Change{at(was, i), at(is, j)})
	}
	return d
}

// Then returns the Delta from where d begins to where next ends.
func (d Delta) Then(next Delta) Delta {
	a, b := d.Changes, next.Changes
	switch {
	case len(a) == 0:
		return Delta{d.Full || next.Full, b}
	case len(b) == 0:
		return Delta{d.Full || next.Full, a}
	}
	out := Delta{Full: d.Full || next.Full, Changes: make([]Change, 0, len(a)+len(b))}
	for i, j := range service.Merge(len(a), len(b), func(i, j int) int { return a[i].Key().Compare(b[j].Key()) }) {
		c := Change{}
		switch {
		case j < 0:
			c = a[i]
		case i < 0:
			c = b[j]
		default:
			c = Change{a[i].Was, b[j].Is}
		}
		if c.Was != nil || c.Is != nil { // else it came and went
			out.Changes = append(out.Changes, c)
		}
	}
	return out
}

// at returns the i-th service, nil for a negative i.
func at(list []*Service, i int) *Service {
	if i < 0 {
		return nil
	}
	return list[i]
}
