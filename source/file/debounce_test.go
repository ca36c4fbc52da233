package file

import (
	"testing"
	"testing/synctest"
	"time"
)

func TestDebounce(t *testing.T) {
	const ms = time.Millisecond
	cases := map[string]struct {
		events []time.Duration // since the first
		want   []time.Duration // when it fires
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
				events := make(chan struct{})
				start := time.Now()
				go func() {
					defer close(events)
					for _, at := range c.events {
						time.Sleep(time.Until(start.Add(at)))
						events <- struct{}{}
					}
				}()
				d := debounce{quiet: 50 * ms, most: 500 * ms}
				var got []time.Duration
				for len(got) < len(c.want) {
					select {
					case _, ok := <-events:
						if !ok {
							events = nil
							continue
						}
						d.touch()
					case <-d.fired():
						got = append(got, time.Since(start))
						d.reset()
					}
				}
				for i := range c.want {
					if got[i] != c.want[i] {
						t.Errorf("fired after %v, want %v", got, c.want)
						break
					}
				}
				if d.fired() != nil {
					t.Error("fires without an event")
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
