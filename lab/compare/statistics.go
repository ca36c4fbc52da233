package compare

import "slices"

// Spread sums up the rounds: the median, and the least and the greatest.
type Spread struct {
	Median float64 `json:"median"`
	Min    float64 `json:"min"`
	Max    float64 `json:"max"`
}

// spread of no values is zero.
func spread(values []float64) Spread {
	if len(values) == 0 {
		return Spread{}
	}
	s := slices.Sorted(slices.Values(values))
	return Spread{Median: median(s), Min: s[0], Max: s[len(s)-1]}
}

// median of sorted values; the mean of the two in the middle of an even number.
func median(sorted []float64) float64 {
	n := len(sorted)
	if n%2 == 1 {
		return sorted[n/2]
	}
	return (sorted[n/2-1] + sorted[n/2]) / 2
}

// ratios divides round by round, so that what slowed the machine down in one
// round slows down both. A round in which b is zero is left out.
func ratios(a, b []float64) []float64 {
	var out []float64
	for i := range min(len(a), len(b)) {
		if b[i] != 0 {
			out = append(out, a[i]/b[i])
		}
	}
	return out
}

// distinct reports whether a run can tell two from each other: in every round
// the one was greater, or in every round the other. Fewer than three rounds
// agree too easily.
func distinct(ratios []float64) bool {
	if len(ratios) < 3 {
		return false
	}
	s := spread(ratios)
	return s.Min > 1 || s.Max < 1
}
