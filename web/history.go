package web

import (
	"math"
	"slices"
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

// samples has all values, or as long as these are few, those that aren't zero: of
// thousands of services most have had a connection or two within minutes.
type samples struct {
	few     []placed // in the place of all
	all     []float32
	nonzero int // of all
}

type placed struct {
	at    int32
	value float32
}

// fewSamples is how many take much less room on their own.
const fewSamples = 16

// put writes the sample at a place; size is how many the ring holds.
func (r *ring) put(at, size int, v float64) {
	value := float32(v)
	if r.samples == nil {
		if value == 0 {
			return
		}
		r.samples = &samples{}
	}
	s := r.samples
	if s.all == nil && len(s.few) == fewSamples && value != 0 {
		s.spread(size)
	}
	if s.all == nil {
		s.few = slices.DeleteFunc(s.few, func(o placed) bool { return o.at == int32(at) })
		if value != 0 {
			s.few = append(s.few, placed{int32(at), value})
		}
	} else {
		if s.all[at] != 0 {
			s.nonzero--
		}
		if s.all[at] = value; value != 0 {
			s.nonzero++
		}
	}
	if s.nonzero+len(s.few) == 0 {
		r.samples = nil
	}
}

// spread gives every value its place.
func (s *samples) spread(size int) {
	s.all, s.nonzero = make([]float32, size), len(s.few)
	for _, o := range s.few {
		s.all[o.at] = o.value
	}
	s.few = nil
}

// last returns the n samples before the place at which the next one goes, oldest
// first.
func (r *ring) last(next, size, n int) []float64 {
	out := make([]float64, n)
	if r.samples == nil {
		return out
	}
	first := next - n + size
	for i := range r.samples.all[:min(n, len(r.samples.all))] {
		out[i] = round2(float64(r.samples.all[(first+i)%size]))
	}
	for _, o := range r.samples.few {
		if i := (int(o.at) - first + 2*size) % size; i < n {
			out[i] = round2(float64(o.value))
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
// back belongs to something new, of which nothing is known yet.
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

// round2 keeps two decimals: what is shown, and what may change without
// anybody having to be told.
func round2(v float64) float64 { return math.Round(v*100) / 100 }
