package agent

import (
	"sync"

	"kproxy.dev/kproxy/conntrack"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/userspace"
)

// settle brings the counters of both kinds of data planes up to date.
func (a *Agent) settle() {
	a.userspace.Settle()
	a.accounting.Settle()
}

// meters read what the data planes have counted for each service port of a plan. They are found once for each of thousands, as
// long as it stays the same. Safe for concurrent use; the zero value is ready.
type meters struct {
	mu   sync.Mutex
	plan *plan.Plan // whose they are; nil before the first
	read []meter    // in the order of its services
}

// meter reads what userspace and the kernel have counted for a service port.
type meter struct {
	user   userspace.Meter
	kernel *conntrack.Meter
}

// follow finds the meters of p's service ports. One that has only changed keeps those it had, and so does one that has gone meanwhile,
// as p may be the plan before.
func (m *meters) follow(a *Agent, p *plan.Plan) {
	var old []*plan.Service // which are in the same order
	if m.plan != nil {
		old = m.plan.Services
	}
	was, read := m.read, make([]meter, len(p.Services))
	for i, s := range p.Services {
		for len(old) > 0 && old[0] != s && old[0].Port.Key.Compare(s.Port.Key) < 0 {
			old, was = old[1:], was[1:]
		}
		known := len(old) > 0 && old[0].Port.Key == s.Port.Key
		if known && old[0] == s {
			read[i] = was[0]
			continue
		}
		user, ok := a.userspace.Meter(s.Port.Key)
		if known && (!ok || user == was[0].user) {
			read[i] = was[0]
		} else {
			read[i] = meter{user, a.accounting.Meter(s.Port.Key)}
		}
	}
	m.plan, m.read = p, read
}

// of returns those of the service ports of p, which is or was the current plan, in their order. They read as of the last look at live
// connections.
func (m *meters) of(a *Agent, p *plan.Plan) []meter {
	m.mu.Lock()
	defer m.mu.Unlock()
	if p != m.plan {
		m.follow(a, p)
	}
	return m.read
}

// connections returns what was counted, without endpoints.
func (m *meter) connections() plan.Connections {
	us, k := m.user.Totals(), m.kernel.Figures()
	return connectionsOf(&us, &k.Figures)
}

// connectionsOf joins what both kinds of data planes have counted.
func connectionsOf(us *userspace.Counters, k *conntrack.Figures) plan.Connections {
	return plan.Connections{
		Active: us.Active + k.Active, Total: us.Total + k.Total, Failed: us.Failed + k.Failed, Retried: us.Retried,
		BytesIn: us.BytesIn + k.BytesIn, BytesOut: us.BytesOut + k.BytesOut,
	}
}
