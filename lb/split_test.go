package lb

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

func TestSlots(t *testing.T) {
	tests := map[string]struct {
		weights []uint32
		limit   int
		want    []int
	}{
		"none":           {nil, 10, []int{}},
		"drained":        {[]uint32{0, 0}, 10, []int{}},
		"equal":          {[]uint32{1, 1, 1}, 10, []int{0, 1, 2}},
		"divided":        {[]uint32{500, 500}, 10, []int{0, 1}},
		"smooth":         {[]uint32{5, 1, 1}, 10, []int{0, 0, 0, 1, 2, 0, 0}},
		"one drains":     {[]uint32{2, 0, 4}, 10, []int{2, 0, 2}},
		"closest":        {[]uint32{667, 333}, 10, []int{0, 1, 0, 0, 1, 0, 0, 1, 0}},
		"small one kept": {[]uint32{1000, 1}, 4, []int{0, 0, 1, 0}},
		"limit too low":  {[]uint32{1, 1, 1}, 2, []int{0, 1, 2}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(tt.want, Slots(tt.weights, tt.limit)); diff != "" {
				t.Errorf("slots (-want +got):\n%s", diff)
			}
		})
	}
}

func FuzzSlots(f *testing.F) {
	f.Add([]byte{1, 2, 3}, uint8(16))
	f.Add([]byte{255, 254, 0, 1}, uint8(5))
	f.Fuzz(func(t *testing.T, b []byte, limit uint8) {
		if len(b) > 64 {
			return
		}
		weights := make([]uint32, len(b))
		positive, sum := 0, 0.0
		for i, w := range b {
			weights[i] = uint32(w) * 4
			sum += float64(weights[i])
			if w > 0 {
				positive++
			}
		}
		slots := Slots(weights, int(limit))
		if len(slots) > max(int(limit), positive) {
			t.Fatalf("%d slots for weights %v, limit %d", len(slots), weights, limit)
		}
		counts := make([]int, len(b))
		for _, i := range slots {
			counts[i]++
		}
		for i, c := range counts {
			if (c > 0) != (weights[i] > 0) {
				t.Fatalf("weight %d has %d slots", weights[i], c)
			}
			// With room for everybody, nobody is off by more than the slots
			// that others got for being small.
			share := float64(weights[i]) / sum * float64(len(slots))
			if positive > 0 && math.Abs(share-float64(c)) > float64(positive) {
				t.Fatalf("weights %v, %d slots: %d has %d, its share is %.2f", weights, len(slots), i, c, share)
			}
		}
	})
}

func TestProbabilities(t *testing.T) {
	tests := map[string]struct {
		weights []uint32
		want    []float64
	}{
		"none":       {nil, []float64{}},
		"equal":      {[]uint32{1, 1, 1}, []float64{1.0 / 3, 0.5, 1}},
		"weighted":   {[]uint32{2, 1, 1}, []float64{0.5, 0.5, 1}},
		"one drains": {[]uint32{3, 1, 0}, []float64{0.75, 1, 0}},
		"all drain":  {[]uint32{0, 0}, []float64{0, 0}},
		"one":        {[]uint32{7}, []float64{1}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(tt.want, Probabilities(tt.weights), cmpopts.EquateApprox(0, 1e-12)); diff != "" {
				t.Errorf("probabilities (-want +got):\n%s", diff)
			}
		})
	}
}

// TestShave: what is taken at once is what would be taken one by one, of the largest each time.
func TestShave(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for range 2000 {
		counts, sum := make([]uint32, 1+random.IntN(20)), 0
		for i := range counts {
			counts[i] = uint32(1 + random.IntN(9))
			sum += int(counts[i])
		}
		n := random.IntN(sum + 1)
		want, got := slices.Clone(counts), slices.Clone(counts)
		for range n {
			want[slices.Index(want, slices.Max(want))]--
		}
		if shave(got, n); !slices.Equal(got, want) {
			t.Fatalf("%v without %d: %v, want %v", counts, n, got, want)
		}
	}
}
