package lb

import (
	"cmp"
	"math"
	"slices"
)

// SlotLimit bounds the slots of a service whose endpoints have weights, where Slots choose:
// weights that need more are rounded to the closest split.
const SlotLimit = 64

// Slots spreads weights over a sequence of equal slots, for kernel rules that
// can only go round: each element is an index into weights, each index has
// slots in proportion to its weight, and they are interleaved as smooth
// weighted round robin does. Weight 0 has none.
//
// The split is exact if it fits into limit slots after dividing by the
// greatest common divisor. Otherwise it is the closest one that fits, in the
// sum of the deviations; but every weight has at least one slot, so there may
// be more than limit if there are more weights.
func Slots(weights []uint32, limit int) []int {
	counts := slotCounts(weights, limit)
	total := 0
	ids := make([]int32, 0, len(counts))
	for i, c := range counts {
		if total += int(c); c > 0 {
			ids = append(ids, int32(i))
		}
	}
	var turns schedule
	turns.init(counts, ids, 0)
	slots := make([]int, total)
	for i := range slots {
		slots[i] = int(turns.next(nil))
	}
	return slots
}

// Probabilities turns weights into the chances of a cascade of rules, each of
// which is tried when those before it didn't match (iptables' `statistic
// --mode random`). The last rule with a weight has probability 1, and weight 0
// has 0.
func Probabilities(weights []uint32) []float64 {
	out := make([]float64, len(weights))
	var left uint64
	for i, w := range slices.Backward(weights) {
		if left += uint64(w); w > 0 {
			out[i] = float64(w) / float64(left)
		}
	}
	return out
}

// slotCounts returns how many slots each weight gets.
func slotCounts(weights []uint32, limit int) []uint32 {
	var divisor, sum uint64
	positive := 0
	for _, w := range weights {
		if w > 0 {
			divisor, sum, positive = gcd(divisor, uint64(w)), sum+uint64(w), positive+1
		}
	}
	if positive == 0 {
		return make([]uint32, len(weights))
	}
	limit = max(limit, positive)
	if sum/divisor <= uint64(limit) {
		counts := slices.Clone(weights)
		for i := range counts {
			counts[i] /= uint32(divisor)
		}
		return counts
	}
	var best []uint32
	least := math.Inf(1)
	for total := limit; total >= max(positive, limit/2); total-- {
		counts := apportion(weights, sum, total)
		if d := deviation(weights, sum, counts, total); d < least-1e-12 {
			best, least = counts, d
		}
	}
	return best
}

// apportion gives out total slots by largest remainder (Hamilton's method),
// after one slot for each weight that would have less than one.
func apportion(weights []uint32, sum uint64, total int) []uint32 {
	counts := make([]uint32, len(weights))
	rest := make([]float64, len(weights))
	order := make([]int, 0, len(weights))
	given := 0
	for i, w := range weights {
		if w == 0 {
			continue
		}
		share := float64(w) / float64(sum) * float64(total)
		counts[i] = max(1, uint32(share))
		rest[i] = share - float64(counts[i])
		given += int(counts[i])
		order = append(order, i)
	}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(rest[b], rest[a]) })
	for i := 0; given < total; i++ {
		counts[order[i%len(order)]]++
		given++
	}
	if given > total { // the small ones' first slots came at the expense of the big ones
		shave(counts, given-total)
	}
	return counts
}

// shave takes n slots away, one after the other from the largest count, of equal ones the first;
// none gets less than others had.
func shave(counts []uint32, n int) {
	of := map[uint32]int{} // how many have a count
	for _, c := range counts {
		of[c]++
	}
	top := slices.Max(counts)
	for ; n > 0 && n >= of[top]; top-- { // a whole round
		n -= of[top]
		of[top-1] += of[top]
	}
	for i, c := range counts {
		if counts[i] = min(c, top); counts[i] == top && n > 0 {
			counts[i]--
			n--
		}
	}
}

func deviation(weights []uint32, sum uint64, counts []uint32, total int) float64 {
	var d float64
	for i, w := range weights {
		d += math.Abs(float64(w)/float64(sum) - float64(counts[i])/float64(total))
	}
	return d
}

func gcd(a, b uint64) uint64 {
	for b > 0 {
		a, b = b, a%b
	}
	return a
}
