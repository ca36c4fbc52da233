package web

import (
	"math/rand/v2"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// A ring gives back the last samples it got, however many of them are zero.
func TestRing(t *testing.T) {
	const size = 40
	for _, share := range []float64{0, 0.02, 0.3, 1} {
		random := rand.New(rand.NewPCG(1, 2))
		var r ring
		var put []float64
		for at := range 4 * size {
			v := 0.0
			if random.Float64() < share {
				v = float64(1 + random.IntN(9))
			}
			if at >= 3*size {
				v = 0
			}
			r.put(at, size, v)
			put = append(put, v)
			n := min(len(put), size)
			if d := cmp.Diff(put[len(put)-n:], r.last(len(put), n)); d != "" {
				t.Fatalf("share %v, after %d samples (-want +got):\n%s", share, len(put), d)
			}
		}
		if r != nil {
			t.Errorf("share %v: samples that are all zero take memory", share)
		}
	}
}
