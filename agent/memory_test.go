package agent

import (
	"runtime"
	"testing"
)

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

func TestReadHeap(t *testing.T) {
	kept := make([]byte, 8<<20)
	garbage := make([]byte, 16<<20)
	clear(garbage)
	runtime.GC() // both are in use
	runtime.KeepAlive(garbage)
	before := readHeap()
	runtime.GC() // garbage isn't any more
	after := readHeap()
	runtime.KeepAlive(kept)
	if before.live < 24<<20 || after.live > before.live-(15<<20) {
		t.Errorf("live: %d, and %d without the garbage", before.live, after.live)
	}
	if after.taken < 24<<20 || after.spare < 8<<20 {
		t.Errorf("taken %d, spare %d", after.taken, after.spare)
	}
}
