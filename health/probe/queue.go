package probe

import (
	"container/heap"
	"time"

	"kproxy.dev/kproxy/health"
)

// entry is a Target with its schedule. The Scheduler's loop owns it.
type entry struct {
	target  health.Target
	machine health.Machine
	pace    float64   // times as long between probes as the Target asks for, at least 1
	due     time.Time // of the next probe, or of the one under way
	place   int       // in its queue; -1 while a probe is under way
	slow    bool      // its last probe took more than half of its time-out, or there was none
	gone    bool      // no longer wanted; drop what its probe finds
}

// interval is the time between two probes of e.
func (e *entry) interval() time.Duration {
	return time.Duration(float64(interval(e.target)) * e.pace)
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
