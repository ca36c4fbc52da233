package file

import "time"

// debounce turns a burst of events into one: it fires when quiet has passed
// since the last event, at the latest when most has passed since the first. A
// file that is being written is so read when its writer has finished.
type debounce struct {
	quiet, most time.Duration

	timer *time.Timer
	first time.Time
}

// touch notes an event.
func (d *debounce) touch() {
	now := time.Now()
	if d.timer == nil {
		d.first = now
		d.timer = time.NewTimer(d.quiet)
		return
	}
	d.timer.Reset(min(d.quiet, d.first.Add(d.most).Sub(now)))
}

// fired returns the channel that says that it is time. It has to be asked anew
// after every touch.
func (d *debounce) fired() <-chan time.Time {
	if d.timer == nil {
		return nil
	}
	return d.timer.C
}

// reset makes ready for the next burst.
func (d *debounce) reset() {
	if d.timer != nil {
		d.timer.Stop()
		d.timer = nil
	}
}
