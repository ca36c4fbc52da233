package probe

import (
	"cmp"
	"maps"
	"slices"
	"strings"

	"kproxy.dev/kproxy/health"
)

// paces shares out rate probes a second among the namespaces that want them: how
// many times as long as they ask for is between two probes of their Targets. A
// namespace that isn't in it has what it asks for. What each may have is the same
// (max-min fairness), so one that asks for more than its share slows down itself
// alone. A rate of 0 is no bound.
func paces(wanted []health.Wanted, rate float64) map[string]float64 {
	if rate <= 0 {
		return nil
	}
	asked, all := map[string]float64{}, 0.0
	for _, w := range wanted {
		asked[w.Namespace] += 1 / interval(w.Target).Seconds()
	}
	names := slices.SortedFunc(maps.Keys(asked), func(a, b string) int {
		return cmp.Or(cmp.Compare(asked[a], asked[b]), strings.Compare(a, b))
	})
	for _, n := range names {
		all += asked[n]
	}
	if all <= rate {
		return nil
	}
	out, left := map[string]float64{}, rate
	for i, n := range names { // who asks for least first
		if share := left / float64(len(names)-i); asked[n] > share {
			out[n] = asked[n] / share
			left -= share
		} else {
			left -= asked[n]
		}
	}
	return out
}
