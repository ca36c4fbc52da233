package screen

import (
	"fmt"
	"math"
	"time"
)

// Count shortens a number: 999, 12.3k, 4.5M.
func Count(v float64) string { return scaled(v, 1000, "kMGTP") }

// Bytes shortens a number of bytes in powers of 1024, as ls -h does: 999, 12.3K, 4.5M.
func Bytes(v float64) string { return scaled(v, 1024, "KMGTP") }

func scaled(v, step float64, units string) string {
	if v < step {
		return fmt.Sprintf("%.0f", v)
	}
	i := -1
	for v >= step && i < len(units)-1 {
		v /= step
		i++
	}
	if v >= 100 || i < 0 {
		return fmt.Sprintf("%.0f%c", math.Floor(v), units[i])
	}
	return fmt.Sprintf("%.1f%c", math.Floor(v*10)/10, units[i])
}

// Rate is a number per second: one digit after the point where it is small.
func Rate(v float64) string {
	if v > 0 && v < 9.95 {
		return fmt.Sprintf("%.1f", v)
	}
	return Count(v)
}

// Age shortens a duration to its two largest units: 850ms, 12s, 3m2s, 5h1m, 3d4h.
func Age(d time.Duration) string {
	switch {
	case d < 0:
		return "0s"
	case d < time.Second:
		return fmt.Sprintf("%dms", d.Milliseconds())
	case d < time.Minute:
		return fmt.Sprintf("%ds", int(d.Seconds()))
	case d < time.Hour:
		return fmt.Sprintf("%dm%ds", int(d.Minutes()), int(d.Seconds())%60)
	case d < 24*time.Hour:
		return fmt.Sprintf("%dh%dm", int(d.Hours()), int(d.Minutes())%60)
	}
	return fmt.Sprintf("%dd%dh", int(d.Hours())/24, int(d.Hours())%24)
}
