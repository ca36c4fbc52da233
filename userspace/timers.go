package userspace

import "container/heap"

// timer tells its owner that a time has come. It belongs to one loop.
type timer struct {
	at    int64 // in nanoseconds since epoch; 0 while it isn't set
	index int   // in the heap
	owner interface{ alarm() }
}

// timers are a loop's, the next one first.
type timers []*timer

// set lets t go off at a time, instead of any earlier one.
func (ts *timers) set(t *timer, at int64) {
	if t.at != 0 {
		t.at = at
		heap.Fix(ts, t.index)
		return
	}
	t.at = at
	heap.Push(ts, t)
}

// stop lets t not go off.
func (ts *timers) stop(t *timer) {
	if t.at != 0 {
		heap.Remove(ts, t.index)
		t.at = 0
	}
}

// expire calls those that are due.
func (ts *timers) expire(now int64) {
	for len(*ts) > 0 && (*ts)[0].at <= now {
		t := (*ts)[0]
		ts.stop(t)
		t.owner.alarm()
	}
}

// Len, Less, Swap, Push and Pop implement heap.Interface.

func (ts timers) Len() int           { return len(ts) }
func (ts timers) Less(i, j int) bool { return ts[i].at < ts[j].at }
func (ts timers) Swap(i, j int) {
	ts[i], ts[j] = ts[j], ts[i]
	ts[i].index, ts[j].index = i, j
}

func (ts *timers) Push(x any) {
	t := x.(*timer)
	t.index = len(*ts)
	*ts = append(*ts, t)
}

func (ts *timers) Pop() any {
	last := len(*ts) - 1
	t := (*ts)[last]
	(*ts)[last] = nil
	*ts = (*ts)[:last]
	return t
}
