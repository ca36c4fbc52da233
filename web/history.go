package web

import (
	"math"
	"time"

	"kproxy.dev/kproxy/plan"
)

// The figures that history is kept of, in the order of historyNames.
const (
	seriesActive = iota
	seriesConnections
	seriesBytesIn
	seriesBytesOut
	seriesFailed
	seriesRetried
	seriesCount
)

// ring is the last samples of one figure. Rings of a recorder share the place at
// which the next sample goes. One whose samples are all zero takes no memory:
// most services do nothing most of the time, and hardly any ever fails.
type ring struct{ samples *samples }

type samples struct {
	values  []float32
	nonzero int
}

// put writes the sample at a place; size is how many the ring holds.
func (r *ring) put(at, size int, v float64) {
	sample := float32(v)
	if r.samples == nil {
		if sample == 0 {
			return
		}
		r.samples = &samples{values: make([]float32, size)}
	}
	s := r.samples
	if s.values[at] != 0 {
		s.nonzero--
	}
	if sample != 0 {
		s.nonzero++
	}
	if s.values[at] = sample; s.nonzero == 0 {
		r.samples = nil
	}
}

// last returns the n samples before the place at which the next one goes, oldest
// first.
func (r *ring) last(next, size, n int) []float64 {
	out := make([]float64, n)
	if r.samples == nil {
		return out
	}
	for i := range out {
		out[i] = round2(float64(r.samples.values[(next-n+i+size)%size]))
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
// back belongs to something new, of which nothing is known yet.
func rates(was, is plan.Connections, took time.Duration) Rates {
	per := func(was, is uint64) float64 {
		if is <= was || took <= 0 {
			return 0
		}
		return round2(float64(is-was) / took.Seconds())
	}
	return Rates{
		Connections: per(was.Total, is.Total), BytesIn: per(was.BytesIn, is.BytesIn), BytesOut: per(was.BytesOut, is.BytesOut),
		Failed: per(was.Failed, is.Failed), Retried: per(was.Retried, is.Retried),
	}
}

// round2 keeps two decimals: what is shown, and what may change without
// anybody having to be told.
func round2(v float64) float64 { return math.Round(v*100) / 100 }
