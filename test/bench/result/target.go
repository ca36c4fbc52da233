package result

import (
	"fmt"
	"strings"

	"kproxy.dev/kproxy/lab/compare/statistics"
)

// Target is what a subject is to reach without a failure: a ratio to the best of
// others, or an absolute limit when Against is empty.
type Target struct {
	Subject string   `json:"subject"`
	Against []string `json:"against,omitempty"` // the best of them by median counts
	Bound   float64  `json:"bound"`             // at least for higher, at most for lower

	// What came of it, filled in by [Case.Judge].
	Best     string            `json:"best,omitempty"` // of Against
	Got      statistics.Spread `json:"got"`            // ratio, or the figure itself
	Met      bool              `json:"met"`
	Measured bool              `json:"measured"` // false when a subject is missing
}

// Judge fills in what came of the targets.
func (c *Case) Judge() {
	for i := range c.Targets {
		c.judge(&c.Targets[i])
	}
}

func (c *Case) judge(t *Target) {
	t.Best, t.Got, t.Met, t.Measured = "", statistics.Spread{}, false, false
	s := c.Subject(t.Subject)
	if s == nil || len(s.Values) == 0 {
		return
	}
	values := s.Values
	if len(t.Against) > 0 {
		best := c.best(t.Against)
		if best == nil {
			return
		}
		t.Best = best.Name
		if values = s.ratios(best); len(values) == 0 {
			return
		}
	}
	t.Got, t.Measured = statistics.Of(values), true
	t.Met = s.Failures == 0 && (t.Got.Median == t.Bound || c.better(t.Got.Median, t.Bound))
}

// best is the best of some subjects, nil when none was measured. One that carried
// nothing in some round is none.
func (c *Case) best(names []string) *Subject {
	var best *Subject
	for _, name := range names {
		s := c.Subject(name)
		if s == nil || len(s.Values) == 0 || s.Failures > 0 && s.Min == 0 {
			continue
		}
		if best == nil || c.better(s.Median, best.Median) {
			best = s
		}
	}
	return best
}

// better reports whether a is better than b.
func (c *Case) better(a, b float64) bool {
	if c.Better == Lower {
		return a < b
	}
	return a > b
}

// Wanted is the bound as a reader sees it: "≥ 1.10× haproxy".
func (c *Case) Wanted(t *Target) string {
	sign := "≥"
	if c.Better == Lower {
		sign = "≤"
	}
	switch {
	case len(t.Against) == 0:
		return fmt.Sprintf("%s %s %s", sign, statistics.Figure(t.Bound), c.Unit)
	case len(t.Against) == 1:
		return fmt.Sprintf("%s %s× %s", sign, statistics.Figure(t.Bound), t.Against[0])
	}
	return fmt.Sprintf("%s %s× the better of %s", sign, statistics.Figure(t.Bound), strings.Join(t.Against, ", "))
}

// Reached is what came of it: "1.23× (1.20–1.26)".
func (c *Case) Reached(t *Target) string {
	switch {
	case !t.Measured:
		return "not measured"
	case len(t.Against) == 0:
		return fmt.Sprintf("%s %s", t.Got, c.Unit)
	}
	return strings.Replace(t.Got.String(), " ", "× ", 1) + map[bool]string{true: "×"}[t.Got.Min == t.Got.Max]
}
