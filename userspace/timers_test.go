package userspace

import (
	"math/rand/v2"
	"testing"
)

// recorder notes when its timer went off.
type recorder struct {
	timer
	clock *int64
	at    int64 // 0 until then
}

func (r *recorder) alarm() { r.at = *r.clock }

func TestManyTimersGoOffWhenTheyAreDue(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	var ts timers
	var clock int64
	want := map[*recorder]int64{}
	all := make([]*recorder, 300)
	for i := range all {
		all[i] = &recorder{clock: &clock}
		all[i].owner = all[i]
	}
	for range 3000 { // set, put off, bring forward, stop
		r := all[rnd.IntN(len(all))]
		if rnd.IntN(4) == 0 {
			ts.stop(&r.timer)
			delete(want, r)
			continue
		}
		want[r] = 1 + rnd.Int64N(500)
		ts.set(&r.timer, want[r])
	}
	for clock = 1; clock <= 500; clock++ {
		ts.expire(clock)
	}
	for i, r := range all {
		if r.at != want[r] {
			t.Errorf("timer %d went off at %d, want %d (0: not at all)", i, r.at, want[r])
		}
	}
	if len(ts) != 0 {
		t.Errorf("%d timers are left", len(ts))
	}
}
