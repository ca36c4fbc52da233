package plan

import (
	"fmt"
	"strings"
)

// Condition says how a service port fares for its clients: what `kproxy status` and the
// dashboard count and sort by.
type Condition string

// The conditions.
const (
	Unanswered Condition = "unanswered" // it has endpoints, and none that is up takes connections
	Failing    Condition = "failing"    // some connections find no endpoint that answers
	PartlyDown Condition = "down"       // the health check of some endpoint fails
	Troubled   Condition = "troubled"   // it says what is wrong with it
	Vacant     Condition = "vacant"     // nothing is behind it here: scaled to zero, or local to other nodes
	Fine       Condition = "fine"
)

// Conditions are all of them, worst first, with what is said of one service port and of
// several.
var Conditions = []struct {
	Condition
	one, several string
}{
	{Unanswered, "doesn't answer", "don't answer"},
	{Failing, "fails connections", "fail connections"},
	{PartlyDown, "has an endpoint down", "have an endpoint down"},
	{Troubled, "has a problem", "have a problem"},
	{Vacant, "has no endpoint here", "have no endpoint here"},
	{Fine, "is fine", "are fine"},
}

// Condition returns how s fares. Failing says whether its connections fail now, which
// only two readings of its counters tell.
func (s *ServiceStatus) Condition(failing bool) Condition {
	answering, down := 0, 0
	for i := range s.Endpoints {
		switch e := &s.Endpoints[i]; {
		case e.Health == "down": // though it may be usable, where all are
			down++
		case e.Usable:
			answering++
		}
	}
	switch {
	case s.State == StateExcluded:
		return Fine
	case len(s.Endpoints) == 0 || s.Cause == CauseNotLocal:
		return Vacant
	case answering == 0:
		return Unanswered
	case failing:
		return Failing
	case down > 0:
		return PartlyDown
	case s.Degraded != "" || len(s.Problems) > 0 || s.State == StateRecalled:
		return Troubled
	}
	return Fine
}

// Tally counts the service ports in one condition, and says that in words.
type Tally struct {
	Condition Condition `json:"condition"`
	Count     int       `json:"count"`
	Text      string    `json:"text"`
}

// Summarize words how many service ports are in each condition, worst first; conditions
// that none is in are left out.
func Summarize(counts map[Condition]int) []Tally {
	out := []Tally{}
	for _, c := range Conditions {
		n := counts[c.Condition]
		if n == 0 {
			continue
		}
		said, unit := c.several, "service ports "
		if n == 1 {
			said, unit = c.one, "service port "
		}
		if len(out) > 0 {
			unit = "" // the first has said of what
		}
		out = append(out, Tally{c.Condition, n, fmt.Sprintf("%d %s%s", n, unit, said)})
	}
	if len(out) == 1 && out[0].Condition == Fine && out[0].Count > 1 {
		out[0].Text = "all " + out[0].Text
	}
	return out
}

// Verdict says in one line how all service ports fare.
func (s *Status) Verdict() string {
	counts := map[Condition]int{}
	for i := range s.Services {
		counts[s.Services[i].Condition(false)]++
	}
	return VerdictOf(Summarize(counts))
}

// VerdictOf joins tallies to one line.
func VerdictOf(tallies []Tally) string {
	if len(tallies) == 0 {
		return "no services"
	}
	texts := make([]string, len(tallies))
	for i, t := range tallies {
		texts[i] = t.Text
	}
	return strings.Join(texts, ", ")
}
