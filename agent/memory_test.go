package agent

import "testing"

func TestGrowth(t *testing.T) {
	const mib = 1 << 20
	for _, c := range []struct {
		name string
		live uint64
		want int
	}{
		{"nothing is known yet", 0, 100},
		{"a small heap is collected as ever", 10 * mib, 100},
		{"a larger one grows by the headroom", 64 * mib, 50},
		{"however large, not by next to nothing", 1000 * mib, 30},
	} {
		if got := growth(c.live); got != c.want {
			t.Errorf("%s: growth(%d) = %d, want %d", c.name, c.live, got, c.want)
		}
	}
}
