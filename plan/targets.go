package plan

import (
	"cmp"
	"net/netip"
	"slices"

	"kproxy.dev/kproxy/health"
	"kproxy.dev/kproxy/service"
)

// Targets returns the probes that the endpoints of s need, sorted, each once in a
// namespace, however many of its service ports share it: those of every endpoint that some
// traffic policy could choose, here or, when nodes come and go, later. An
// endpoint that isn't ready is not probed before it is, and one in an excluded
// network never.
func Targets(s *service.Snapshot, d health.Defaults, exclude ...netip.Prefix) []health.Wanted {
	if s == nil {
		return nil
	}
	view := health.NewView(d, nil)
	seen := map[health.Wanted]bool{}
	var out []health.Wanted
	for p, eps := range s.All() {
		if d.Fill(p.Health, p.Protocol).Kind == service.CheckOff {
			continue
		}
		for i := range eps {
			if !eps[i].Ready && !(eps[i].Serving && eps[i].Terminating) || contains(exclude, eps[i].Address.Addr()) {
				continue
			}
			if w := (health.Wanted{Target: view.Target(p, eps[i].Address), Namespace: p.Namespace}); !seen[w] {
				seen[w] = true
				out = append(out, w)
			}
		}
	}
	slices.SortFunc(out, compareTargets)
	return out
}

// SameTargets reports whether the endpoints that are probed are the same before d
// and after: no service port has changed its specification or its endpoints but
// those whose endpoints aren't probed.
func (d Delta) SameTargets(defaults health.Defaults) bool {
	probed := func(s *Service) bool {
		return s != nil && defaults.Fill(s.Port.Health, s.Port.Protocol).Kind != service.CheckOff
	}
	return !slices.ContainsFunc(d.Changes, func(c Change) bool {
		specified := c.Was == nil || c.Is == nil || c.Was.entry != c.Is.entry
		return specified && (probed(c.Was) || probed(c.Is))
	})
}

func compareTargets(a, b health.Wanted) int {
	x, y := a.Check, b.Check
	return cmp.Or(
		a.Address.Compare(b.Address), cmp.Compare(a.Protocol, b.Protocol),
		cmp.Compare(x.Kind, y.Kind), cmp.Compare(x.Path, y.Path), cmp.Compare(x.Port, y.Port),
		cmp.Compare(x.Interval, y.Interval), cmp.Compare(x.Timeout, y.Timeout),
		cmp.Compare(x.Rise, y.Rise), cmp.Compare(x.Fall, y.Fall), cmp.Compare(a.Namespace, b.Namespace),
	)
}
