// Package health holds what is known about endpoints' health: the immutable
// [View] and the pure rise/fall [Machine] that makes it. It opens no sockets;
// probes live in health/probe. [Ejection] is the passive counterpart: what the
// connects of clients prove about an endpoint.
package health

import (
	"errors"
	"time"

	"kproxy.dev/kproxy/service"
)

// maxFlaps bounds State.Flaps. Decisions use the last minute and a
// handful of changes; the rest would only cost memory.
const maxFlaps = 16

// ErrSilent is the result of a probe that got no answer where that need not
// mean anything: UDP servers owe none, and ICMP errors may be lost or delayed.
var ErrSilent = errors.New("no answer")

// minSilent is the least number of silent probes in a row that make up what
// was down.
const minSilent = 5

// Machine turns the results of a Target's probes into its State, with
// hysteresis: Rise successes in a row make it up, Fall failures in a row make
// it down, and until then it stays what it was. An Unknown one follows the
// same rule rather than its first result, since Unknown endpoints are used:
// there is no hurry to call one up, and one lost packet after a start is no
// reason to call it down.
//
// Silence (ErrSilent) counts as success, but proves little. It doesn't bring
// back what is down, unless some probe of the row was answered or the row is
// max(5, 2*Rise) long.
//
// It has no clock and opens no sockets. It is a plain value, not safe for
// concurrent use; its States are, because Observe never changes one it has
// returned.
type Machine struct {
	rise, fall int
	state      State
	run        int // results in a row that contradict the status: of its opposite, or if it's Unknown, of one kind
	succeeding bool
	answered   bool // one of run at least was not silent
}

// NewMachine returns the machine for a check. Rise and Fall below 1 count as 1.
func NewMachine(c service.HealthCheck) Machine {
	return Machine{rise: max(1, c.Rise), fall: max(1, c.Fall)}
}

// Resume returns m with the State s of a probe that it replaces, for a check
// whose parameters changed.
func (m Machine) Resume(s State) Machine {
	m.state, m.run = s, 0
	return m
}

// State returns what is known now.
func (m *Machine) State() State { return m.state }

// Observe takes the result of one probe (nil for a success, ErrSilent for
// none) that ended at now, and returns what is known with it.
func (m *Machine) Observe(err error, now time.Time) State {
	silent := errors.Is(err, ErrSilent)
	ok := err == nil || silent
	if m.run == 0 || ok != m.succeeding {
		m.run, m.succeeding, m.answered = 0, ok, false
	}
	m.answered = m.answered || !silent
	target, need := Up, m.rise
	switch {
	case !ok:
		target, need = Down, m.fall
		m.state.LastError = err.Error()
	case m.state.Status == Down && !m.answered:
		need = max(minSilent, 2*m.rise) // and LastError still says what is wrong
	default:
		m.state.LastError = ""
	}
	if m.state.Status == target {
		m.run = 0
		return m.state
	}
	if m.run++; m.run < need {
		return m.state
	}
	if m.state.Status != Unknown {
		m.state.Flaps = appendFlap(m.state.Flaps, now)
	}
	if ok {
		m.state.LastError = ""
	}
	m.state.Status, m.state.Since, m.run = target, now, 0
	return m.state
}

// appendFlap returns a copy: earlier States share the old one.
func appendFlap(flaps []time.Time, now time.Time) []time.Time {
	kept := flaps[max(0, len(flaps)-maxFlaps+1):]
	return append(append(make([]time.Time, 0, len(kept)+1), kept...), now)
}
