package iptables

import (
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestPatchRepeated: a list that is patched is the one that is sorted anew, and so
// is the number of its repetitions; the old list stays as it was.
func TestPatchRepeated(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	letter := func() string { return string(rune('a' + rng.IntN(6))) }
	var list []string
	repeated := 0
	for range 2000 {
		var gone, come []string
		want := slices.Clone(list)
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
		was := slices.Clone(list)
		got, more := patchRepeated(list, gone, come, strings.Compare)
		if diff := cmp.Diff(append([]string{}, want...), append([]string{}, got...)); diff != "" {
			t.Fatalf("%v without %v with %v (-want +got):\n%s", was, gone, come, diff)
		}
		if repeated += more; repeated != len(want)-len(slices.Compact(slices.Clone(want))) {
			t.Fatalf("%v without %v with %v: %d repetitions in %v", was, gone, come, repeated, want)
		}
		if !slices.Equal(was, list) {
			t.Fatalf("%v became %v", was, list)
		}
		list = got
	}
}
