package load

import (
	"math"
	"slices"
	"time"
)

// Percentiles sum up how long something took, in microseconds.
type Percentiles struct {
	Count int     `json:"count"`
	P50   float64 `json:"p50"`
	P99   float64 `json:"p99"`
	Max   float64 `json:"max"`
}

// PercentilesOf sorts d. None of none.
func PercentilesOf(d []time.Duration) *Percentiles {
	if len(d) == 0 {
		return nil
	}
	slices.Sort(d)
	at := func(p float64) float64 {
		// Nearest rank: the smallest value that at least p of all don't exceed.
		return microseconds(d[max(0, int(math.Ceil(p*float64(len(d))))-1)])
	}
	return &Percentiles{Count: len(d), P50: at(0.5), P99: at(0.99), Max: microseconds(d[len(d)-1])}
}

func microseconds(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }
