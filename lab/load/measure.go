package load

import (
	"context"
	"slices"

	"kproxy.dev/kproxy/lab/report"
)

// Work is a load, and the figures that come of it.
type Work struct {
	Group, Title string
	Load         Load
	Figures      []Figure
}

// Figure makes a number of an outcome.
type Figure struct {
	Name, Title, Unit string // the name is that of the report's case
	Better            report.Better
	Value             func(*Outcome) float64
	Parts             func(*Outcome) []report.Part // nil for a figure that isn't made of any
	Proxied           bool                         // makes sense for proxies only
}

// Micros is the figure of a time.
func Micros(name, title string, value func(*Outcome) float64) Figure {
	return Figure{Name: name, Title: title, Unit: "µs", Better: report.Lower, Value: value}
}

// Rate returns Count per second.
func (o *Outcome) Rate() float64 { return float64(o.Count) / o.Seconds }

// Gigabits is the throughput in Gbit/s.
func (o *Outcome) Gigabits() float64 { return float64(o.Bytes) * 8 / 1e9 / o.Seconds }

// P50 is the median exchange in microseconds; 0 if there was none, which is a failure.
func (o *Outcome) P50() float64 { return o.Exchange.P50 }

// P99 is the 99th percentile likewise.
func (o *Outcome) P99() float64 { return o.Exchange.P99 }

// Subject describes what is measured.
type Subject struct {
	Name    string
	Class   report.Class
	Proxied bool
	Run     func(context.Context, Load) (Outcome, error)
}

// Measurement runs loads through subjects and adds their figures to a report.
type Measurement struct {
	Report        *report.Report
	Begins        func(w Work, round, rounds int)                // called before each round
	Ended         func(s Subject, w Work, round int, o *Outcome) // and after each run
	others, steal []float64                                      // shares of the processors
}

// Rounds interleaves: every subject has a run before any has another. Each round
// begins with another subject, so that none is always first.
func (m *Measurement) Rounds(ctx context.Context, w Work, rounds int, subjects []Subject) error {
	for round := range rounds {
		m.Begins(w, round, rounds)
		for k := range subjects {
			s := subjects[(k+round)%len(subjects)]
			out, err := s.Run(ctx, w.Load)
			if ctx.Err() != nil {
				return ctx.Err()
			}
			if err != nil {
				return err
			}
			m.Ended(s, w, round, &out)
			m.note(w, s, round, &out)
		}
	}
	// In the report subjects have the order in which they were given.
	for _, f := range w.Figures {
		if c := m.Report.Case(f.Name); c != nil {
			at := func(r report.Subject) int {
				return slices.IndexFunc(subjects, func(s Subject) bool { return s.Name == r.Name })
			}
			slices.SortStableFunc(c.Subjects, func(a, b report.Subject) int { return at(a) - at(b) })
		}
	}
	m.Report.Host.Others, m.Report.Host.Steal = report.SpreadOf(m.others), report.SpreadOf(m.steal)
	return nil
}

// shortest is how long a run must be for the ticks of /proc/stat to tell what else the
// machine did, in seconds.
const shortest = 0.3

func (m *Measurement) note(w Work, s Subject, round int, out *Outcome) {
	if capacity := out.Seconds * float64(m.Report.Host.CPUs); out.Seconds >= shortest {
		m.others, m.steal = append(m.others, out.CPU.Others()/capacity), append(m.steal, out.CPU.Steal/capacity)
	}
	for _, f := range w.Figures {
		if f.Proxied && !s.Proxied {
			continue
		}
		to := m.Add(w, f, s, round, f.Value(out))
		if out.Failed > 0 {
			to.Fail(out.Failed, out.Error)
		}
		if f.Parts != nil {
			to.Parts = f.Parts(out)
		}
	}
}

// Add adds a value of a round to the figure's case, and returns the subject there.
func (m *Measurement) Add(w Work, f Figure, s Subject, round int, v float64) *report.Subject {
	c := m.Report.Case(f.Name)
	if c == nil {
		m.Report.Cases = append(m.Report.Cases, report.Case{Name: f.Name, Group: w.Group, Work: w.Title, Figure: f.Title, Unit: f.Unit, Better: f.Better})
		c = &m.Report.Cases[len(m.Report.Cases)-1]
	}
	i := slices.IndexFunc(c.Subjects, func(x report.Subject) bool { return x.Name == s.Name })
	if i < 0 {
		i = len(c.Subjects)
		c.Subjects = append(c.Subjects, report.Subject{Name: s.Name, Class: s.Class})
	}
	c.Subjects[i].Add(round, v)
	return &c.Subjects[i]
}
