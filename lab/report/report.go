// Package report is what a benchmark found: one JSON format, its statistics, and
// the same as a table, as Markdown and as an HTML page. `kproxy lab compare` and
// `make bench` write it.
//
// A [Case] is one figure of one kind of work, measured for several subjects in
// the same rounds. Ratios are made round by round, so that what slowed the
// machine down in one round slowed down both sides. Nothing here is safe for
// concurrent use.
package report

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Report is one run of a benchmark.
type Report struct {
	Title    string    `json:"title"`
	Version  string    `json:"version"` // of kproxy
	Command  string    `json:"command"`
	Started  time.Time `json:"started"`
	Seconds  float64   `json:"seconds"` // all of it took
	Host     Host      `json:"host"`
	Cases    []Case    `json:"cases"`
	Absent   []Absent  `json:"absent,omitempty"`
	Findings []string  `json:"findings,omitempty"` // what the figures say
	Notes    []Note    `json:"notes,omitempty"`    // how it was measured
	Warnings []string  `json:"warnings,omitempty"` // what makes it doubtful
}

// Note explains something; one with the title of a group of cases stands above it.
type Note struct {
	Title string `json:"title"`
	Text  string `json:"text"`
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
	Group    string    `json:"group"` // cases of one chapter, in order: "TCP"
	Work     string    `json:"work"`  // what was done: "new TCP connections, 64 at a time"
	Figure   string    `json:"figure"`
	Unit     string    `json:"unit"`
	Better   Better    `json:"better"`
	Subjects []Subject `json:"subjects"`
}

// Class tells kproxy, the programs it is compared with, and what limits both apart.
type Class string

// The classes of subjects.
const (
	KProxy Class = "kproxy"
	Peer   Class = "peer"
	Limit  Class = "limit" // no proxy at all
)

// Subject is one program or data plane, and what it reached.
type Subject struct {
	Name     string    `json:"name"` // "haproxy-splice"
	Class    Class     `json:"class"`
	Values   []float64 `json:"values"`           // one for each round
	Rounds   []int     `json:"rounds,omitempty"` // of which each value is; none for 0, 1, 2 and so on
	Spread             // of Values
	Failures int       `json:"failures,omitempty"` // of all rounds: connections, requests, changes
	Error    string    `json:"error,omitempty"`    // the first of them
	Parts    []Part    `json:"parts,omitempty"`    // what the median is made of, roughly: medians of their own
}

// Part is a part of a figure.
type Part struct {
	Name  string  `json:"name"`
	Value float64 `json:"value"`
}

// Case returns the one with a name, or nil.
func (r *Report) Case(name string) *Case {
	i := slices.IndexFunc(r.Cases, func(c Case) bool { return c.Name == name })
	if i < 0 {
		return nil
	}
	return &r.Cases[i]
}

// Subject returns the one with a name; nil if it wasn't measured.
func (c *Case) Subject(name string) *Subject {
	i := slices.IndexFunc(c.Subjects, func(s Subject) bool { return s.Name == name && len(s.Values) > 0 })
	if i < 0 {
		return nil
	}
	return &c.Subjects[i]
}

// Title returns what was done, and the figure.
func (c *Case) Title() string { return c.Work + ": " + c.Figure }

// Add adds a value of a round.
func (s *Subject) Add(round int, v float64) {
	s.Values, s.Rounds = append(s.Values, v), append(s.Rounds, round)
	s.Spread = SpreadOf(s.Values)
}

// Fail counts failures; err is the first of them.
func (s *Subject) Fail(n int, err string) {
	if s.Failures += n; s.Error == "" {
		s.Error = err
	}
}

// Ratio divides a's figure by b's, round by round. Distinct is whether these rounds
// tell the two apart: in each the one was greater, or in each the other. Fewer than
// three rounds agree too easily. ok is false when there is nothing to compare.
func Ratio(a, b *Subject) (ratio Spread, distinct, ok bool) {
	if a == nil || b == nil {
		return ratio, false, false
	}
	round := func(s *Subject, i int) int {
		if len(s.Rounds) == 0 {
			return i
		}
		return s.Rounds[i]
	}
	var ratios []float64
	for i, v := range a.Values {
		for k, w := range b.Values {
			if round(a, i) == round(b, k) && w != 0 {
				ratios = append(ratios, v/w)
			}
		}
	}
	ratio = SpreadOf(ratios)
	return ratio, len(ratios) >= 3 && (ratio.Min > 1 || ratio.Max < 1), len(ratios) > 0
}

// Own are kproxy's subjects.
func (c *Case) Own() (out []*Subject) {
	for i := range c.Subjects {
		if s := &c.Subjects[i]; s.Class == KProxy && len(s.Values) > 0 {
			out = append(out, s)
		}
	}
	return out
}

// Behind says which peers each of kproxy's subjects is behind: by the medians, or by
// the median of the ratios. A subject with failures is behind all, and a peer with
// failures ahead of none.
func (c *Case) Behind() (out []string) {
	for _, own := range c.Own() {
		var peers []string
		for i := range c.Subjects {
			p := &c.Subjects[i]
			if p.Class != Peer || len(p.Values) == 0 || p.Failures > 0 {
				continue
			}
			ratio, distinct, ok := Ratio(own, p)
			ahead := p.Median > own.Median || ratio.Median < 1
			if c.Better == Lower {
				ahead = p.Median < own.Median || ratio.Median > 1
			}
			if ok && (ahead || own.Failures > 0) {
				text := fmt.Sprintf("%s (×%s", p.Name, ratio)
				if !distinct {
					text += ", within noise"
				}
				peers = append(peers, text+")")
			}
		}
		if len(peers) > 0 {
			out = append(out, fmt.Sprintf("%s: %s is behind %s.", c.Title(), own.Name, list(peers)))
		}
	}
	return out
}

const cantTell = "no difference that these rounds can tell"

// Find adds a sentence that compares a's figure with b's; none if one is missing.
func (r *Report) Find(name, a, b string) {
	c := r.Case(name)
	if c == nil {
		return
	}
	ratio, distinct, ok := Ratio(c.Subject(a), c.Subject(b))
	if !ok {
		return
	}
	text := fmt.Sprintf("%s: %s has %s times the figure of %s", c.Title(), a, ratio, b)
	if !distinct {
		text += "; " + cantTell
	}
	r.Findings = append(r.Findings, strings.ToUpper(text[:1])+text[1:]+".")
}

// Doubt adds a warning.
func (r *Report) Doubt(format string, args ...any) {
	r.Warnings = append(r.Warnings, fmt.Sprintf(format, args...))
}

// Finish adds what every report says: where kproxy isn't first, what couldn't be
// measured, and what else the machine did.
func (r *Report) Finish() {
	for i := range r.Cases {
		r.Findings = append(r.Findings, r.Cases[i].Behind()...)
	}
	for _, a := range r.Absent {
		r.Findings = append(r.Findings, fmt.Sprintf("%s was not measured: %s.", a.Subject, strings.TrimSuffix(a.Reason, ".")))
	}
	h := &r.Host
	if h.Others.Median > 0.05 || h.Others.Max > 0.2 {
		r.Doubt("Other programs used %.0f%% of the processors (up to %.0f%% of a run): trust the ratios more than the figures, and neither beyond their spread. Measure again on a calm machine.", 100*h.Others.Median, 100*h.Others.Max)
	}
	if h.Steal.Max > 0.03 {
		r.Doubt("The hypervisor took up to %.0f%% of the processors away during a run.", 100*h.Steal.Max)
	}
	if h.CPUs <= 2 {
		r.Doubt("Client, proxy and backend shared %s, so what the proxy uses the others lack; with processors to spare, differences in throughput are smaller.", Count(h.CPUs, "processor"))
	}
	failures, first := 0, ""
	for i := range r.Cases {
		for k := range r.Cases[i].Subjects {
			if s := &r.Cases[i].Subjects[k]; s.Failures > 0 {
				if failures += s.Failures; first == "" {
					first = fmt.Sprintf("%s, %s: %s", r.Cases[i].Work, s.Name, s.Error)
				}
			}
		}
	}
	if failures > 0 {
		r.Doubt("There were failures, which each table shows; the first: %s.", first)
	}
}

// WriteJSON writes the report as JSON.
func (r *Report) WriteJSON(w io.Writer) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(r)
}

// Spread sums up the rounds: the median, and the least and the greatest.
type Spread struct {
	Median float64 `json:"median"`
	Min    float64 `json:"min"`
	Max    float64 `json:"max"`
}

// SpreadOf sums values up; zero for none. The median of an even number is the mean
// of the two in the middle.
func SpreadOf(values []float64) Spread {
	n := len(values)
	if n == 0 {
		return Spread{}
	}
	s := slices.Sorted(slices.Values(values))
	return Spread{Median: (s[(n-1)/2] + s[n/2]) / 2, Min: s[0], Max: s[n-1]}
}

// String is the median, and the spread if there is one: "1.52 (1.48–1.60)".
func (s Spread) String() string {
	if Figure(s.Min) == Figure(s.Max) {
		return Figure(s.Median)
	}
	return fmt.Sprintf("%s (%s–%s)", Figure(s.Median), Figure(s.Min), Figure(s.Max))
}

// Figure prints a value with three significant digits, and no more decimals
// than that takes.
func Figure(v float64) string {
	switch a := max(v, -v); {
	case a >= 1000:
		return Thousands(int(v + 0.5))
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

// Thousands prints 10000 as 10,000.
func Thousands(n int) string {
	s := strconv.Itoa(n)
	for i := len(s) - 3; i > 0 && s[i-1] != '-'; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

// Count is "1 round", "2 rounds".
func Count(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%s %ss", Thousands(n), what)
}

// list joins words as a sentence does.
func list(words []string) string {
	if len(words) < 2 {
		return strings.Join(words, "")
	}
	return strings.Join(words[:len(words)-1], ", ") + " and " + words[len(words)-1]
}
