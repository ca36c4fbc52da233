package agent

import (
	"net/netip"
	"testing"

	"kproxy.dev/kproxy/conntrack"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/userspace"
)

// TestMetersOfAServiceThatGoes: who began to read before a service port went reads what it had, also where the plan had only
// just changed it; what takes its name later begins anew.
func TestMetersOfAServiceThatGoes(t *testing.T) {
	a := &Agent{userspace: &userspace.Server{}, accounting: conntrack.NewAccounting(func(netip.Addr) bool { return false })}
	key := service.Key{Namespace: "default", Name: "web", Port: "http"}
	with := func() *plan.Plan {
		return &plan.Plan{Services: []*plan.Service{{Port: &service.Port{Key: key}}}}
	}
	var last *plan.Plan
	commit := func(p *plan.Plan) *plan.Plan {
		a.accounting.SetPlan(p, plan.Between(last, p))
		last = p
		return p
	}
	check := func(when string, p *plan.Plan, want uint64) {
		t.Helper()
		if got := a.meters.of(a, p)[0].connections().Total; got != want {
			t.Errorf("%s: %d connections, want %d", when, got, want)
		}
	}
	first := commit(with())
	a.accounting.Resume(map[service.Key]conntrack.ServiceFigures{key: {Figures: conntrack.Figures{Total: 5}}})
	a.accounting.Settle()
	check("at first", first, 5)
	changed := commit(with())
	commit(&plan.Plan{})
	check("gone since it was changed", changed, 5)
	a.meters.of(a, last)
	check("come back", commit(with()), 0)
}
