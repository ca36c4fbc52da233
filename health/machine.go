package health

import (
	"time"

	"kproxy.dev/kproxy/service"
)

// maxFlaps bounds State.Flaps. Decisions look at the last minute and at a
// handful of changes; the rest would only cost memory.
const maxFlaps = 16

// Machine turns the results of a Target's probes into its State, with
// hysteresis: Rise successes in a row make it up, Fall failures in a row make
// it down, and until then it stays what it was. An Unknown one follows the
// same rule rather than its first result, since Unknown endpoints are used:
// there is no hurry to call one up, and one lost packet after a start is no
// reason to call it down.
//
// It has no clock and opens no sockets. It is a plain value, not safe for
// concurrent use; its States are, because Observe never changes one it has
// returned.
type Machine struct {
	rise, fall int
	state      State
	run        int // results in a row that contradict the status: of its opposite, or if it's Unknown, of one kind
	succeeding bool
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

// Observe takes the result of one probe (nil for a success) that ended at now,
// and returns what is known with it.
func (m *Machine) Observe(err error, now time.Time) State {
	ok := err == nil
	if m.run == 0 || ok != m.succeeding {
		m.run, m.succeeding = 0, ok
	}
	m.state.LastError = ""
	if !ok {
		m.state.LastError = err.Error()
	}
	target, need := Up, m.rise
	if !ok {
		target, need = Down, m.fall
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
	m.state.Status, m.state.Since, m.run = target, now, 0
	return m.state
}

// appendFlap returns a copy: earlier States share the old one.
func appendFlap(flaps []time.Time, now time.Time) []time.Time {
	kept := flaps[max(0, len(flaps)-maxFlaps+1):]
	return append(append(make([]time.Time, 0, len(kept)+1), kept...), now)
}
