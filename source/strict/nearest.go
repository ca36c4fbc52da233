package strict

import "strings"

// Nearest returns which of known is written most like word, the first of several;
// empty if none is near enough to have been meant. One slip is, and one for every
// third byte of a longer word; case doesn't count.
func Nearest(word string, known ...string) string {
	nearest, best := "", max(len(word)/3, 1)+1
	for _, k := range known {
		if d := distance(strings.ToLower(word), strings.ToLower(k)); d < best {
			nearest, best = k, d
		}
	}
	return nearest
}

// DidYouMean returns ", did you mean NAME?" with what is [Nearest], to end a
// message with; empty if nothing is near.
func DidYouMean(word string, known ...string) string {
	if n := Nearest(word, known...); n != "" {
		return ", did you mean " + n + "?"
	}
	return ""
}

// distance counts the bytes to insert, delete, replace or swap with the next one
// (optimal string alignment).
func distance(a, b string) int {
	var before []int // the row of the matrix before row
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		next := make([]int, len(b)+1)
		next[0] = i + 1
		for j := range len(b) {
			replace := row[j]
			if a[i] != b[j] {
				replace++
			}
			next[j+1] = min(replace, row[j+1]+1, next[j]+1)
			if i > 0 && j > 0 && a[i] == b[j-1] && a[i-1] == b[j] {
				next[j+1] = min(next[j+1], before[j-1]+1)
			}
		}
		before, row = row, next
	}
	return row[len(b)]
}
