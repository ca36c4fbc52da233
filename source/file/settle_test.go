package file

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/fsnotify/fsnotify"
)

func TestSettle(t *testing.T) {
	const ms = time.Millisecond
	cases := map[string]struct {
		events []time.Duration // since the first
		want   []time.Duration // when what changed is read
	}{
		"one event":                  {[]time.Duration{0}, []time.Duration{50 * ms}},
		"events at once":             {[]time.Duration{0, 0, 0}, []time.Duration{50 * ms}},
		"a second event puts it off": {[]time.Duration{0, 49 * ms}, []time.Duration{99 * ms}},
		"events further apart":       {[]time.Duration{0, 60 * ms}, []time.Duration{50 * ms, 110 * ms}},
		"a burst that doesn't end":   {every(30*ms, 34), []time.Duration{500 * ms, 1010 * ms}},
		"an event just before":       {append(every(40*ms, 13), 499*ms), []time.Duration{500 * ms}},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				events := make(chan fsnotify.Event)
				start := time.Now()
				go func() {
					for _, at := range c.events {
						time.Sleep(time.Until(start.Add(at)))
						events <- fsnotify.Event{}
					}
				}()
				for _, want := range c.want {
					<-events
					settle(t.Context(), events)
					if got := time.Since(start); got != want {
						t.Errorf("read after %v, want %v", got, want)
					}
				}
				select {
				case <-events:
					t.Error("an event is left")
				case <-time.After(time.Second):
				}
			})
		})
	}
}

func every(step time.Duration, n int) (out []time.Duration) {
	for i := range n {
		out = append(out, time.Duration(i)*step)
	}
	return out
}
