package plan

import (
	"reflect"
	"time"

	"kproxy.dev/kproxy/service"
)

// record is what the next Compute may build on of one service port. It is never
// modified, and plans share it.
type record struct {
	facts  facts
	memory memory
	wake   time.Time // when time alone changes where the service stands
}

// told is what Compute was told of services one by one. Its maps are the inputs'
// own, which nobody modifies: one that is still the same map says nothing new.
type told struct {
	carried    map[service.Key]uint64
	programmed map[service.Key]uint64
	holds      []*Service
	failed     map[service.Key]Failure
	pins       map[service.Key]service.Preference
	refusals   bool
}

func toldOf(in *Inputs) told {
	return told{
		carried: in.Observed.Carried, programmed: in.Observed.Programmed, holds: in.Observed.Holds, failed: in.Failed, pins: in.Pins,
		refusals: len(in.Observed.Refused) > 0,
	}
}

// news says of which services the inputs tell something that they didn't tell
// the previous Compute.
type news struct {
	// ofAll: of any of them; who is concerned isn't known.
	ofAll bool
	// of are those concerned, by their place in the snapshot, and those that are
	// known to have changed themselves; nil if there are none.
	of []bool
}

// findNews compares the inputs with those of the previous plan.
func (c *computation) findNews() news {
	old := c.previous
	if old == nil || !c.sameWorld || old.contests != c.contests || old.health != c.in.Health || !c.sameStanding(&old.Policy) ||
		old.told.refusals || len(c.in.Observed.Refused) > 0 || !old.Wake.IsZero() && !c.in.Now.Before(old.Wake) {
		return news{ofAll: true}
	}
	var n news
	mark := func(i int) {
		if n.of == nil {
			n.of = make([]bool, c.snapshot.Len())
		}
		n.of[i] = true
	}
	concerns := func(k service.Key) {
		if i, found := c.snapshot.Find(k); found {
			mark(i)
		}
	}
	for _, i := range c.places {
		mark(i)
	}
	now := toldOf(&c.in)
	if (old.told.holds == nil) != (now.holds == nil) {
		return news{ofAll: true}
	}
	eachChange(old.told.carried, now.carried, concerns)
	eachChange(old.told.programmed, now.programmed, concerns)
	eachDifference(old.told.holds, now.holds, func(was, is *Service) bool {
		switch {
		case is == nil:
			concerns(was.Port.Key)
		case was == nil || was.KernelHash != is.KernelHash:
			concerns(is.Port.Key)
		}
		return true
	})
	eachChange(old.told.failed, now.failed, concerns)
	eachChange(old.told.pins, now.pins, concerns)
	return n
}

// sameStanding reports whether old and today's policy move services alike.
func (c *computation) sameStanding(old *Policy) bool {
	p := &c.in.Policy
	return old.OffloadAfter == p.OffloadAfter && old.OffloadMinConnections == p.OffloadMinConnections &&
		old.BackoffMax == p.BackoffMax && old.FlapLimit == p.FlapLimit
}

// untouched reports whether the snapshot's i-th service port, the previous plan's
// at-th, is as it was, and so is all that decides about it.
func (c *computation) untouched(at, i int) bool {
	if c.news.ofAll || c.news.of != nil && c.news.of[i] {
		return false
	}
	port, _, entry := c.snapshot.At(i)
	was, _, before := c.previous.snapshot.At(at)
	return port == was && entry == before
}

// port returns the i-th service port.
func (p *Plan) port(i int) *service.Port {
	port, _, _ := p.snapshot.At(i)
	return port
}

// comparePorts compares by key.
func comparePorts(a, b *service.Port) int {
	if a == b {
		return 0
	}
	return a.Key.Compare(b.Key)
}

// eachChange calls f with the keys of what was and is don't have alike.
func eachChange[V comparable](was, is map[service.Key]V, f func(service.Key)) {
	if sameMap(was, is) {
		return
	}
	common := 0
	for k, v := range is {
		old, there := was[k]
		if there {
			common++
		}
		if !there || old != v {
			f(k)
		}
	}
	if common == len(was) {
		return
	}
	for k := range was {
		if _, there := is[k]; !there {
			f(k)
		}
	}
}

// sameMap reports whether a and b are one map.
func sameMap[K comparable, V any](a, b map[K]V) bool {
	return reflect.ValueOf(a).Pointer() == reflect.ValueOf(b).Pointer()
}
