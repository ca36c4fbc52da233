package kernel

import (
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestMultiset: what was put in more often than it was taken away is there, once, and the lists before stay as they were.
func TestMultiset(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	letter := func() string { return string(rune('a' + rng.IntN(6))) }
	var m Multiset[string]
	var all []string
	for range 2000 {
		var gone, come []string
		want := slices.Clone(all)
		for range rng.IntN(4) {
			if len(want) == 0 {
				break
			}
			i := rng.IntN(len(want))
			gone = append(gone, want[i])
			want = slices.Delete(want, i, i+1)
		}
		for range rng.IntN(4) {
			come = append(come, letter())
		}
		want = append(want, come...)
		slices.Sort(want)
		unique := m.Unique
		was := slices.Clone(unique)
		m.Change(slices.Clone(gone), slices.Clone(come), strings.Compare)
		if diff := cmp.Diff(slices.Compact(append([]string{}, want...)), append([]string{}, m.Unique...)); diff != "" {
			t.Fatalf("%v without %v with %v (-want +got):\n%s", all, gone, come, diff)
		}
		if !slices.Equal(was, unique) {
			t.Fatalf("%v became %v", was, unique)
		}
		all = want
	}
}
