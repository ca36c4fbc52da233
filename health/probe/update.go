package probe

import (
	"math/rand/v2"
	"time"

	"kproxy.dev/kproxy/health"
)

// update makes the entries those of the Targets that are wanted.
func (l *loop) update(now time.Time) {
	l.mu.Lock()
	wanted := l.wanted
	l.mu.Unlock()
	paces := paces(wanted, l.cfg.Rate)
	l.paces.Store(&paces)
	keep := make(map[health.Target]*entry, len(wanted))
	var fresh []*entry
	for _, w := range wanted {
		pace := max(1, paces[w.Namespace])
		if e := keep[w.Target]; e != nil {
			e.pace = min(e.pace, pace)
			continue
		}
		e := l.entries[w.Target]
		if e == nil {
			// Until it has answered it may be one that doesn't, and leaves room to those that do.
			e = &entry{target: w.Target, machine: health.NewMachine(w.Check), place: -1, slow: true}
			fresh = append(fresh, e)
		}
		e.pace = pace
		keep[w.Target] = e
	}
	l.resume(fresh, l.drop(keep))
	l.stagger(fresh, now)
	l.dirty = l.dirty || len(fresh) > 0 || len(keep) != len(l.entries)
	l.entries = keep
	l.targets.Store(int64(len(keep)))
}

// drop takes the entries that aren't in keep out of the schedule, and returns
// what was known of them.
func (l *loop) drop(keep map[health.Target]*entry) map[health.Target]health.State {
	dropped := map[health.Target]health.State{}
	for t, e := range l.entries {
		if keep[t] != nil {
			continue
		}
		dropped[question(t)] = e.machine.State()
		e.gone = true
		switch {
		case e.place < 0: // a probe is under way
		case e.slow:
			l.slow.drop(e)
		default:
			l.fast.drop(e)
		}
		l.dirty = true
	}
	return dropped
}

// question is what a probe asks of whom, without when and how often.
func question(t health.Target) health.Target {
	t.Check.Interval, t.Check.Timeout, t.Check.Rise, t.Check.Fall = 0, 0, 0, 0
	return t
}

// resume gives new entries what was known of the dropped ones they replace.
func (l *loop) resume(fresh []*entry, dropped map[health.Target]health.State) {
	for _, e := range fresh {
		if s, ok := dropped[question(e.target)]; ok {
			e.machine = e.machine.Resume(s)
			l.changed = l.changed || s.Status != health.Unknown
		}
	}
}

// stagger schedules the first probes of new entries: in random order, because
// neighbours are often on one host.
func (l *loop) stagger(fresh []*entry, now time.Time) {
	n := float64(len(fresh))
	for k, i := range rand.Perm(len(fresh)) {
		e := fresh[i]
		window := min(e.interval(), time.Duration(len(fresh))*startGap)
		e.due = now.Add(time.Duration(float64(window) * (float64(k) + rand.Float64()) / n))
		l.enqueue(e)
	}
}
