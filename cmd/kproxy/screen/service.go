package screen

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"kproxy.dev/kproxy/plan"
)

// historyLength is how many values a sparkline can have: one a second.
const historyLength = 60

// changeShown is how long after a change a service counts as changing.
const changeShown = 10 * time.Second

// service is a service port with what was seen of it over time.
type service struct {
	name   string
	search string // what a filter is compared with, in lower case
	status *plan.ServiceStatus
	at     time.Time // of status
	counts []counts  // the newest is of status; see rateWindow
	rates  rates
	// restarted is set until the first status after its counters began anew.
	restarted bool
	past      []float64 // connections per second, oldest first
	// changed is when its data plane or state last changed while it was watched.
	changed time.Time
	rank    rank // as of the last status
	active  bool // busy, as of the last status
}

// rateWindow is how many statuses a rate is taken over. kproxy reads the
// kernel's counters once a second, and is asked once a second: between two
// answers it may have read them twice, or not at all.
const rateWindow = 4

// counts are a service's counters at a time.
type counts struct {
	at time.Time
	plan.Connections
}

// rates are per second.
type rates struct{ connections, in, out, failed, retried float64 }

// rank says how soon a service wants attention.
type rank uint8

const (
	wrong rank = iota
	changing
	fine
)

func (s *service) update(now *plan.ServiceStatus, at time.Time) {
	was := s.status
	if was != nil && (was.DataPlane != now.DataPlane || was.State != now.State) {
		s.changed = at
	}
	if was != nil && now.Connections.Total < was.Connections.Total {
		s.restart() // it was deleted, and came back
	}
	s.status, s.at = now, at
	if s.restarted {
		s.restarted = false
		return
	}
	s.counts = last(append(s.counts, counts{at, now.Connections}), rateWindow)
	if first := &s.counts[0]; at.After(first.at) {
		s.rates = ratesOf(&first.Connections, &now.Connections, at.Sub(first.at).Seconds())
		s.past = last(append(s.past, s.rates.connections), historyLength)
	}
}

// restart forgets counters that are no longer counted on. The first new one is of up to
// a second before the status, when counting began, so rates begin with the next.
func (s *service) restart() { s.counts, s.rates, s.restarted = nil, rates{}, true }

// busy reports whether connections came in the last minute, or are open.
func (s *service) busy() bool {
	return s.status.Connections.Active > 0 || slices.ContainsFunc(s.past, func(v float64) bool { return v > 0 })
}

func ratesOf(was, now *plan.Connections, seconds float64) rates {
	per := func(a, b uint64) float64 { return float64(max(a, b)-a) / seconds }
	return rates{
		connections: per(was.Attempts(), now.Attempts()), failed: per(was.Failed, now.Failed), retried: per(was.Retried, now.Retried),
		in: per(was.BytesIn, now.BytesIn), out: per(was.BytesOut, now.BytesOut),
	}
}

// attention ranks s: what is wrong first, then what is about to change or did.
func (s *service) attention(now time.Time) rank {
	st := s.status
	switch {
	case st.State != plan.StateRecalled && st.Condition(s.rates.failed > 0) != plan.Fine:
		return wrong
	// A service that waits for its first connection is at rest.
	case st.QualifiesInSeconds > 0 || st.State == plan.StateRecalled || s.rates.retried > 0,
		!s.changed.IsZero() && now.Sub(s.changed) < changeShown:
		return changing
	}
	return fine
}

// state is the state of s in a word, with a countdown while s qualifies.
func (m *Model) state(s *service, now time.Time) string {
	if left, ok := s.countdown(now); ok && m.gone == "" {
		return fmt.Sprintf("%s %ds", s.status.State, int(left.Seconds()+0.999))
	}
	return string(s.status.State)
}

func (s *service) countdown(now time.Time) (time.Duration, bool) {
	if s.status.QualifiesInSeconds <= 0 {
		return 0, false
	}
	left := time.Duration(s.status.QualifiesInSeconds*float64(time.Second)) - now.Sub(s.at)
	return max(left, 0), true
}

// reason says why s is where it is, and everything that is wrong with it.
func (s *service) reason() string {
	parts := []string{s.status.Reason}
	parts = append(parts, s.status.Problems...)
	if s.status.Degraded != "" {
		parts = append(parts, s.status.Degraded)
	}
	for i := range s.status.Endpoints {
		if e := &s.status.Endpoints[i]; e.Health == "down" && e.LastError != "" {
			parts = append(parts, fmt.Sprintf("%s is down: %s", e.Address, e.LastError))
			break // one is enough to know where to look; the endpoints' lines tell of all
		}
	}
	return strings.Join(parts, "; ")
}

func keyOf(s *plan.ServiceStatus) string { return s.Title() + "/" + s.Protocol }

func searchText(s *plan.ServiceStatus) string {
	parts := []string{s.Title(), s.Protocol, s.Algorithm}
	for _, a := range s.Addresses {
		parts = append(parts, a.String())
	}
	return strings.ToLower(strings.Join(parts, " "))
}
