package userspace

// timer tells its owner that a time has come. It belongs to one loop.
type timer struct {
	at    int64 // in nanoseconds since epoch; 0 while it isn't set
	index int   // in the heap
	owner interface{ alarm() }
}

// timers are a loop's, the next one first: a heap in which each has up to fan below
// it. Those lie beside each other with their times, so that a step down reads one
// cache line.
type timers []due

type due struct {
	at    int64
	timer *timer
}

const fan = 4

// set lets t go off at a time, instead of any earlier one.
func (ts *timers) set(t *timer, at int64) {
	if t.at == 0 {
		t.index = len(*ts)
		*ts = append(*ts, due{})
	}
	t.at = at
	(*ts)[t.index] = due{at, t}
	ts.settle(t.index)
}

// stop lets t not go off.
func (ts *timers) stop(t *timer) {
	if t.at == 0 {
		return
	}
	t.at = 0
	n := len(*ts) - 1
	last := (*ts)[n]
	(*ts)[n] = due{}
	*ts = (*ts)[:n]
	if t.index < n {
		(*ts)[t.index] = last
		ts.settle(t.index)
	}
}

// expire calls those that are due.
func (ts *timers) expire(now int64) {
	for len(*ts) > 0 && (*ts)[0].at <= now {
		t := (*ts)[0].timer
		ts.stop(t)
		t.owner.alarm()
	}
}

// settle moves what is in place i to where it belongs.
func (ts timers) settle(i int) {
	d := ts[i]
	for above := (i - 1) / fan; i > 0 && d.at < ts[above].at; above = (i - 1) / fan {
		i = ts.put(i, above)
	}
	for next := ts.below(i); next > 0 && ts[next].at < d.at; next = ts.below(i) {
		i = ts.put(i, next)
	}
	ts[i] = d
	d.timer.index = i
}

// put moves what is in place from to place i, and returns the place that is free
// then.
func (ts timers) put(i, from int) int {
	ts[i] = ts[from]
	ts[i].timer.index = i
	return from
}

// below returns the next to go off of those right below place i; 0 if there are none.
func (ts timers) below(i int) int {
	first := i*fan + 1
	if first >= len(ts) {
		return 0
	}
	next := first
	for k := first + 1; k < min(first+fan, len(ts)); k++ {
		if ts[k].at < ts[next].at {
			next = k
		}
	}
	return next
}
