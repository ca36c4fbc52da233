package result

import (
	"fmt"
	"slices"

	"kproxy.dev/kproxy/lab/compare/statistics"
)

// add adds a case, or its values to those of the case that is there already.
func (r *Report) add(c Case) error {
	have := r.Case(c.Name)
	if have == nil {
		c.Subjects = slices.Clone(c.Subjects)
		r.Cases = append(r.Cases, c)
		return nil
	}
	if have.Unit != c.Unit || have.Better != c.Better {
		return fmt.Errorf("merge case %s: one is in %s, the other in %s", c.Name, have.Unit, c.Unit)
	}
	after := have.rounds()
	for _, s := range c.Subjects {
		s.Rounds = s.roundsAfter(after)
		was := have.Subject(s.Name)
		if was == nil {
			have.Subjects = append(have.Subjects, s)
			continue
		}
		sum := NewSubject(s.Name, slices.Concat(was.Values, s.Values))
		sum.Rounds = slices.Concat(was.roundsAfter(0), s.Rounds)
		sum.Failures, sum.Error = was.Failures+s.Failures, was.Error
		if sum.Error == "" {
			sum.Error = s.Error
		}
		*was = sum
	}
	return nil
}

// rounds is how many there were.
func (c *Case) rounds() int {
	n := 0
	for i := range c.Subjects {
		for k := range c.Subjects[i].Values {
			n = max(n, c.Subjects[i].round(k)+1)
		}
	}
	return n
}

// roundsAfter are the rounds of the values where so many were before.
func (s *Subject) roundsAfter(n int) []int {
	out := make([]int, len(s.Values))
	for i := range out {
		out[i] = n + s.round(i)
	}
	return out
}

// wider joins two spreads of which the values aren't known any more; its median
// is the greater one.
func wider(a, b statistics.Spread) statistics.Spread {
	return statistics.Spread{Median: max(a.Median, b.Median), Min: min(a.Min, b.Min), Max: max(a.Max, b.Max)}
}
