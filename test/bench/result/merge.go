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
	for _, s := range c.Subjects {
		was := have.Subject(s.Name)
		if was == nil {
			have.Subjects = append(have.Subjects, s)
			continue
		}
		sum := NewSubject(s.Name, slices.Concat(was.Values, s.Values))
		sum.Rounds = joinRounds(was, &s)
		sum.Failures, sum.Error = was.Failures+s.Failures, was.Error
		if sum.Error == "" {
			sum.Error = s.Error
		}
		*was = sum
	}
	return nil
}

// joinRounds has b's rounds come after a's.
func joinRounds(a, b *Subject) []int {
	if len(a.Rounds)+len(b.Rounds) == 0 {
		return nil
	}
	var out []int
	for i := range a.Values {
		out = append(out, a.round(i))
	}
	after := 0
	if len(out) > 0 {
		after = slices.Max(out) + 1
	}
	for i := range b.Values {
		out = append(out, after+b.round(i))
	}
	return out
}

// wider joins two spreads of which the values aren't known any more; its median
// is the greater one.
func wider(a, b statistics.Spread) statistics.Spread {
	return statistics.Spread{Median: max(a.Median, b.Median), Min: min(a.Min, b.Min), Max: max(a.Max, b.Max)}
}
