// Package statistics sums up repeated measurements: medians with their spread,
// ratios round by round, and how a reader sees a figure. It is pure.
package statistics

import (
	"fmt"
	"slices"
	"strconv"
)

// Spread sums up the rounds: the median, and the least and the greatest.
type Spread struct {
	Median float64 `json:"median"`
	Min    float64 `json:"min"`
	Max    float64 `json:"max"`
}

// Of sums values up; that of no values is zero.
func Of(values []float64) Spread {
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

// Ratios divides round by round, so that what slowed the machine down in one
// round slows down both. A round in which b is zero is left out.
func Ratios(a, b []float64) []float64 {
	var out []float64
	for i := range min(len(a), len(b)) {
		if b[i] != 0 {
			out = append(out, a[i]/b[i])
		}
	}
	return out
}

// Distinct reports whether a run can tell two from each other: in every round
// the one was greater, or in every round the other. Fewer than three rounds
// agree too easily.
func Distinct(ratios []float64) bool {
	if len(ratios) < 3 {
		return false
	}
	s := Of(ratios)
	return s.Min > 1 || s.Max < 1
}

// Figure prints a value with three significant digits, and no more decimals
// than that takes.
func Figure(v float64) string {
	switch a := max(v, -v); {
	case a >= 1000:
		return Thousands(int(v + 0.5))
	case a >= 100:
		return strconv.FormatFloat(v, 'f', 0, 64)
	case a >= 10:
		return strconv.FormatFloat(v, 'f', 1, 64)
	case a >= 1:
		return strconv.FormatFloat(v, 'f', 2, 64)
	case a == 0:
		return "0"
	}
	return strconv.FormatFloat(v, 'f', 3, 64)
}

// Thousands prints 10000 as 10,000.
func Thousands(n int) string {
	s := strconv.Itoa(n)
	for i := len(s) - 3; i > 0 && s[i-1] != '-'; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

// String is the median, and the spread if there is one: "1.52 (1.48–1.60)".
func (s Spread) String() string {
	if Figure(s.Min) == Figure(s.Max) {
		return Figure(s.Median)
	}
	return fmt.Sprintf("%s (%s–%s)", Figure(s.Median), Figure(s.Min), Figure(s.Max))
}
