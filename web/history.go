package web

import (
	"math"
	"slices"
	"time"

	"kproxy.dev/kproxy/plan"
)

// The figures that history is kept of.
const (
	seriesActive = iota
	seriesConnections
	seriesBytesIn
	seriesBytesOut
	seriesFailed
	seriesRetried
	seriesCount
)

// ring is the last samples of one figure, in order. It holds only those that aren't
// zero: most services are idle most of the time, and hardly any ever fails.
type ring []point

type point struct {
	at    int32 // the number of the sample
	value float32
}

// put adds the sample number at and drops those that are size samples older.
func (r *ring) put(at, size int, v float64) {
	old := 0
	for old < len(*r) && int((*r)[old].at) <= at-size {
		old++
	}
	if *r = slices.Delete(*r, 0, old); v != 0 {
		*r = append(*r, point{int32(at), float32(v)})
	}
	if len(*r) == 0 {
		*r = nil
	}
}

// last returns the n samples before the number next, oldest first.
func (r ring) last(next, n int) []float64 {
	out := make([]float64, n)
	for _, p := range r {
		if i := int(p.at) - (next - n); i >= 0 {
			out[i] = round2(float64(p.value))
		}
	}
	return out
}

// Series is the history of one service port: rates per second, and what was
// active; oldest first.
type Series struct {
	Active      []float64 `json:"active"`
	Connections []float64 `json:"connections"`
	BytesIn     []float64 `json:"bytesIn"`
	BytesOut    []float64 `json:"bytesOut"`
	Failed      []float64 `json:"failed"`
	Retried     []float64 `json:"retried"`
}

// rates returns the rates per second between two readings. A counter that went
// back belongs to a new service port, whose rate isn't known yet.
func rates(was, is plan.Connections, took time.Duration) Rates {
	per := func(was, is uint64) float64 {
		if is <= was || took <= 0 {
			return 0
		}
		return round2(float64(is-was) / took.Seconds())
	}
	return Rates{
		Connections: per(was.Attempts(), is.Attempts()), BytesIn: per(was.BytesIn, is.BytesIn), BytesOut: per(was.BytesOut, is.BytesOut),
		Failed: per(was.Failed, is.Failed), Retried: per(was.Retried, is.Retried),
	}
}

// round2 keeps the two decimals that the dashboard shows, so that smaller changes
// aren't sent.
func round2(v float64) float64 { return math.Round(v*100) / 100 }
