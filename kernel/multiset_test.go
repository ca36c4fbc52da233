package kernel

import (
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestMultiset: what changed is what is sorted anew, and the lists before stay as they were.
func TestMultiset(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	letter := func() string { return string(rune('a' + rng.IntN(6))) }
	var m Multiset[string]
	for range 2000 {
		var gone, come []string
		want := slices.Clone(m.all)
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
		for _, l := range [][]string{gone, come, want} {
			slices.Sort(l)
		}
		all, unique := m.all, m.Unique
		was, wasUnique := slices.Clone(all), slices.Clone(unique)
		m.Change(slices.Clone(gone), slices.Clone(come), strings.Compare)
		got := [][]string{append([]string{}, m.all...), append([]string{}, m.Unique...)}
		if diff := cmp.Diff([][]string{append([]string{}, want...), slices.Compact(append([]string{}, want...))}, got); diff != "" {
			t.Fatalf("%v without %v with %v (-want +got):\n%s", was, gone, come, diff)
		}
		if !slices.Equal(was, all) || !slices.Equal(wasUnique, unique) {
			t.Fatalf("%v became %v, and %v %v", was, all, wasUnique, unique)
		}
	}
}
