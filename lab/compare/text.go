package compare

import (
	"fmt"
	"strconv"
)

// figure prints a value with three significant digits, and no more decimals
// than that takes.
func figure(v float64) string {
	switch a := max(v, -v); {
	case a >= 1000:
		return thousands(int(v + 0.5))
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

// thousands prints 10000 as 10,000.
func thousands(n int) string {
	s := strconv.Itoa(n)
	for i := len(s) - 3; i > 0 && s[i-1] != '-'; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

// String is the median, and the spread if there is one: "1.52 (1.48–1.60)".
func (s Spread) String() string {
	if figure(s.Min) == figure(s.Max) {
		return figure(s.Median)
	}
	return fmt.Sprintf("%s (%s–%s)", figure(s.Median), figure(s.Min), figure(s.Max))
}

// Name is what readers call a plane.
func (p Plane) Name() string {
	switch p {
	case Direct:
		return "direct routing"
	case IPVS:
		return "IPVS"
	}
	return string(p)
}
