package service

import "iter"

// Merge walks two sorted sequences of n and m elements side by side. compare
// compares the i-th of the first with the j-th of the second. Merge yields the
// indexes of elements that compare equal together, and -1 for the index of one
// that the other sequence lacks.
func Merge(n, m int, compare func(i, j int) int) iter.Seq2[int, int] {
	return func(yield func(i, j int) bool) {
		for i, j := 0, 0; i < n || j < m; {
			order := 0
			switch {
			case j == m:
				order = -1
			case i == n:
				order = 1
			default:
				order = compare(i, j)
			}
			at, other := i, j
			if order <= 0 {
				i++
			} else {
				at = -1
			}
			if order >= 0 {
				j++
			} else {
				other = -1
			}
			if !yield(at, other) {
				return
			}
		}
	}
}
