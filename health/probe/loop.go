package probe

import (
	"cmp"
	"container/heap"
	"context"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"

	"kproxy.dev/kproxy/health"
	"kproxy.dev/kproxy/service/wake"
)

const (
	// startGap spreads the first probes of new Targets: that far apart, but
	// within an interval. One new endpoint is probed at once, 10,000 are spread
	// over the interval of 2s.
	startGap = 500 * time.Microsecond
	// jitter is how much an interval is longer or shorter by chance, so that
	// probes that began together drift apart.
	jitter = 0.1
	// publishGap bounds the rate of new Views: making one takes milliseconds
	// with 10,000 Targets.
	publishGap = 100 * time.Millisecond
	// limitBurst is for how long Config.Rate may go unused and be made up for.
	limitBurst = 50 * time.Millisecond
)

// loop is the state of one Run, used by its goroutine only.
type loop struct {
	*Scheduler
	entries    map[health.Target]*entry
	fast, slow queue // Targets that wait, by how their last probe went
	results    chan result
	inFlight   int
	slowOnes   int // of inFlight, started from the slow queue

	dirty     bool // entries differ from the View
	changed   bool // in some Status
	published time.Time
	limiter   *rate.Limiter
}

type result struct {
	entry *entry
	err   error
	took  time.Duration
	slow  bool // started from the slow queue
}

func newLoop(s *Scheduler) *loop {
	limit := rate.Inf
	if s.cfg.Rate > 0 {
		limit = rate.Limit(s.cfg.Rate)
	}
	return &loop{
		Scheduler: s, entries: map[health.Target]*entry{}, results: make(chan result, s.cfg.Workers),
		limiter: rate.NewLimiter(limit, max(1, int(s.cfg.Rate*limitBurst.Seconds()))),
	}
}

func (l *loop) run(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	defer func() {
		cancel()
		for l.inFlight > 0 {
			l.release(<-l.results)
		}
	}()
	wake.Up(l.updates) // Targets of before
	timer := time.NewTimer(0)
	defer timer.Stop()
	for ctx.Err() == nil {
		now := time.Now()
		l.start(ctx, now)
		l.publish(now)
		if wait, ok := l.wait(now); ok {
			timer.Reset(wait)
		} else {
			timer.Stop()
		}
		select {
		case <-ctx.Done():
		case <-timer.C:
		case <-l.updates:
			l.update(time.Now())
		case r := <-l.results:
			l.release(r)
			l.observe(r, time.Now())
		}
	}
}

// start begins the probes that are due, as far as there are slots and the rate allows.
func (l *loop) start(ctx context.Context, now time.Time) {
	for q := l.next(); q != nil && !q.first().due.After(now) && l.limiter.AllowN(now, 1); q = l.next() {
		e := q.take()
		r := result{entry: e, slow: q == &l.slow}
		l.inFlight++
		if r.slow {
			l.slowOnes++
		}
		go func() {
			began := time.Now()
			ctx, cancel := context.WithTimeout(ctx, e.target.Check.Timeout)
			defer cancel()
			r.err = l.cfg.Prober.Probe(ctx, e.target)
			r.took = time.Since(began)
			l.results <- r
		}()
	}
}

// next returns the queue whose first entry may be probed next, or nil if
// there is none or no slot for it. Slow Targets leave a quarter of the slots
// to the others.
func (l *loop) next() *queue {
	if l.inFlight >= l.cfg.Workers {
		return nil
	}
	f, s := l.fast.first(), l.slow.first()
	if l.slowOnes >= l.cfg.Workers*3/4 {
		s = nil
	}
	switch {
	case f == nil && s == nil:
		return nil
	case f == nil || s != nil && s.due.Before(f.due):
		return &l.slow
	}
	return &l.fast
}

// wait returns how long nothing happens by itself, or false for ever.
func (l *loop) wait(now time.Time) (d time.Duration, ok bool) {
	if q := l.next(); q != nil {
		d, ok = max(q.first().due.Sub(now), l.allowed(now)), true
	}
	if l.dirty {
		if p := l.published.Add(publishGap).Sub(now); !ok || p < d {
			d, ok = p, true
		}
	}
	return max(0, d), ok
}

// allowed returns after how long the rate allows a probe.
func (l *loop) allowed(now time.Time) time.Duration {
	if l.limiter.Limit() == rate.Inf {
		return 0
	}
	lack := 1 - l.limiter.TokensAt(now)
	return time.Duration(math.Ceil(lack / float64(l.limiter.Limit()) * 1e9))
}

func (l *loop) release(r result) {
	l.inFlight--
	if r.slow {
		l.slowOnes--
	}
}

// observe takes note of a probe's result and schedules the next one: an
// interval after this one was due, or at once if that has passed.
func (l *loop) observe(r result, now time.Time) {
	e := r.entry
	if e.gone {
		return
	}
	e.last.Store(&Check{At: now, Took: r.took})
	e.slow = r.took > e.target.Check.Timeout/2
	if !Inconclusive(r.err) {
		before := e.machine.State()
		after := e.machine.Observe(r.err, now)
		l.changed = l.changed || after.Status != before.Status
		l.dirty = l.dirty || after.Status != before.Status || after.LastError != before.LastError
	} else {
		l.cfg.Logger.Debug("endpoint not probed", "endpoint", e.target.Address, "error", r.err)
	}
	e.due = e.due.Add(time.Duration(float64(e.interval()) * (1 - jitter + 2*jitter*rand.Float64())))
	if e.due.Before(now) {
		e.due = now
	}
	l.enqueue(e)
}

func (l *loop) enqueue(e *entry) {
	if e.slow {
		l.slow.add(e)
	} else {
		l.fast.add(e)
	}
}

// publish makes a new View if there is something new and the last one isn't
// too young.
func (l *loop) publish(now time.Time) {
	if !l.dirty || now.Before(l.published.Add(publishGap)) {
		return
	}
	states := make(map[health.Target]health.State, len(l.entries))
	for t, e := range l.entries {
		states[t] = e.machine.State()
	}
	v := health.NewView(l.cfg.Defaults, states)
	v.Revision = l.view.Load().Revision + 1
	l.view.Store(v)
	if l.changed {
		wake.Up(l.changes)
	}
	l.dirty, l.changed, l.published = false, false, now
}

// entry is a Target with its schedule. The Scheduler's loop owns it.
type entry struct {
	target  health.Target
	machine health.Machine
	pace    float64   // times as long between probes as the Target asks for, at least 1
	due     time.Time // of the next probe, or of the one under way
	place   int       // in its queue; -1 while a probe is under way
	slow    bool      // its last probe took more than half of its time-out, or there was none
	gone    bool      // no longer wanted; drop what its probe finds

	last atomic.Pointer[Check] // for any goroutine; nil before there was one
}

// interval is the time between two probes of e.
func (e *entry) interval() time.Duration {
	return time.Duration(float64(e.target.Check.Interval) * e.pace)
}

// queue holds the entries that wait, the one that is due first at the top.
type queue []*entry

func (q queue) Len() int           { return len(q) }
func (q queue) Less(i, j int) bool { return q[i].due.Before(q[j].due) }
func (q queue) Swap(i, j int) {
	q[i], q[j] = q[j], q[i]
	q[i].place, q[j].place = i, j
}

// Push and Pop are for container/heap; use add, take and drop.
func (q *queue) Push(x any) {
	e := x.(*entry)
	e.place = len(*q)
	*q = append(*q, e)
}

func (q *queue) Pop() any {
	last := len(*q) - 1
	e := (*q)[last]
	(*q)[last] = nil
	*q = (*q)[:last]
	e.place = -1
	return e
}

func (q *queue) add(e *entry)  { heap.Push(q, e) }
func (q *queue) take() *entry  { return heap.Pop(q).(*entry) }
func (q *queue) drop(e *entry) { heap.Remove(q, e.place) }

// first returns the entry that is due first, or nil.
func (q queue) first() *entry {
	if len(q) == 0 {
		return nil
	}
	return q[0]
}

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
	l.resume(fresh, l.known)
	l.known = nil
	l.resume(fresh, l.drop(keep))
	l.stagger(fresh, now)
	l.dirty = l.dirty || len(fresh) > 0 || len(keep) != len(l.entries)
	l.entries = keep
	l.shown.Store(&keep)
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

// question returns what a probe asks and which endpoint it asks, without when and how often.
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

// paces shares out rate probes a second among the namespaces that want them: how
// many times as long as they ask for is between two probes of their Targets. A
// namespace that isn't in it has what it asks for. What each may have is the same
// (max-min fairness), so one that asks for more than its share slows down itself
// alone. A rate of 0 is no bound.
func paces(wanted []health.Wanted, rate float64) map[string]float64 {
	if rate <= 0 {
		return nil
	}
	asked, all := map[string]float64{}, 0.0
	for _, w := range wanted {
		asked[w.Namespace] += 1 / w.Check.Interval.Seconds()
	}
	names := slices.SortedFunc(maps.Keys(asked), func(a, b string) int {
		return cmp.Or(cmp.Compare(asked[a], asked[b]), strings.Compare(a, b))
	})
	for _, n := range names {
		all += asked[n]
	}
	if all <= rate {
		return nil
	}
	out, left := map[string]float64{}, rate
	for i, n := range names { // who asks for least first
		if share := left / float64(len(names)-i); asked[n] > share {
			out[n] = asked[n] / share
			left -= share
		} else {
			left -= asked[n]
		}
	}
	return out
}
