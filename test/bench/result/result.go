// Package result is what a benchmark found: the schema of its JSON, the targets
// that figures are held to, the ratios that a later run is compared with, and the
// report as Markdown and as an HTML page.
//
// A [Case] is one figure of one kind of work, measured for several subjects in
// the same rounds. Ratios are made round by round, so that what slowed the
// machine down in one round slows down both sides; only they can be compared
// with another run's. Nothing here is safe for concurrent use.
package result

import (
	"time"

	"kproxy.dev/kproxy/lab/compare/statistics"
)

// Report is one run of benchmarks, or several of one machine merged.
type Report struct {
	KProxy   string    `json:"kproxy"` // version or commit that was measured
	Command  string    `json:"command"`
	Started  time.Time `json:"started"`
	Seconds  float64   `json:"seconds"` // all of it took
	Quick    bool      `json:"quick"`   // too short to be believed
	Host     Host      `json:"host"`
	Cases    []Case    `json:"cases"`
	Absent   []Absent  `json:"absent,omitempty"`
	Notes    []string  `json:"notes,omitempty"`    // how it was measured
	Warnings []string  `json:"warnings,omitempty"` // what makes it doubtful
}

// Host is where it was measured.
type Host struct {
	Kernel    string  `json:"kernel"`
	CPUs      int     `json:"cpus"`
	CPUModel  string  `json:"cpuModel,omitempty"`
	MemoryGiB float64 `json:"memoryGiB"`
	Go        string  `json:"go"`
	Peers     []Peer  `json:"peers,omitempty"`
	// Steal is the share of the processors that the hypervisor gave to others
	// during a run, Others what this machine did besides; between 0 and 1.
	Steal  statistics.Spread `json:"steal"`
	Others statistics.Spread `json:"others"`
}

// Peer is a program that kproxy is compared with.
type Peer struct {
	Name    string `json:"name"`
	Version string `json:"version"`
}

// Absent is a subject that this host can't have, and why.
type Absent struct {
	Subject string `json:"subject"`
	Reason  string `json:"reason"`
}

// Better says which of two figures is the better one.
type Better string

// The two kinds of figures.
const (
	Higher Better = "higher"
	Lower  Better = "lower"
)

// Case is one figure of one kind of work.
type Case struct {
	Name     string    `json:"name"`  // unique in the report: "tcp-short/rate"
	Group    string    `json:"group"` // cases of one chapter, in order: "TCP", "Programming the kernel"
	Work     string    `json:"work"`  // what was done: "new TCP connections, 64 at a time"
	Figure   string    `json:"figure"`
	Unit     string    `json:"unit"`
	Better   Better    `json:"better"`
	Subjects []Subject `json:"subjects"`
	Targets  []Target  `json:"targets,omitempty"`
}

// Subject is one program or way, and what it reached.
type Subject struct {
	Name              string    `json:"name"`             // "haproxy-splice"
	Values            []float64 `json:"values"`           // one for each round
	Rounds            []int     `json:"rounds,omitempty"` // of which each value is; none for 0, 1, 2 and so on
	statistics.Spread           // of Values
	Failures          int       `json:"failures,omitempty"` // of all rounds: connections, requests, changes
	Error             string    `json:"error,omitempty"`    // the first of them
}

// NewSubject sums up values.
func NewSubject(name string, values []float64) Subject {
	return Subject{Name: name, Values: values, Spread: statistics.Of(values)}
}

// round is the one of the i-th value.
func (s *Subject) round(i int) int {
	if len(s.Rounds) == 0 {
		return i
	}
	return s.Rounds[i]
}

// ratios divides by another's values of the same rounds.
func (s *Subject) ratios(other *Subject) []float64 {
	var own, others []float64
	for i, v := range s.Values {
		for k, o := range other.Values {
			if s.round(i) == other.round(k) {
				own, others = append(own, v), append(others, o)
			}
		}
	}
	return statistics.Ratios(own, others)
}

// Subject returns the one with a name, or nil.
func (c *Case) Subject(name string) *Subject {
	for i := range c.Subjects {
		if c.Subjects[i].Name == name {
			return &c.Subjects[i]
		}
	}
	return nil
}

// Case returns the one with a name, or nil.
func (r *Report) Case(name string) *Case {
	for i := range r.Cases {
		if r.Cases[i].Name == name {
			return &r.Cases[i]
		}
	}
	return nil
}
