package agent

import (
	"kproxy.dev/kproxy/conntrack"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/userspace"
)

// Glance returns the present plan, nil before the first, and calls traffic for
// every service port that has ever carried anything: what Status says of the
// connections of service ports, without making a row for each of thousands.
func (a *Agent) Glance(traffic func(service.Key, plan.Connections)) *plan.Plan {
	if a.current.Load() == nil {
		return nil
	}
	if err := a.accounting.Refresh(accountingAge, a.conntrack.List); err != nil {
		a.log.Warn("the kernel's connections can't be counted", "error", err)
	}
	a.counting.RLock()
	defer a.counting.RUnlock()
	kernel := a.accounting.Traffic()
	a.userspace.Traffic(func(k service.Key, us userspace.Counters) {
		traffic(k, connectionsOf(us, kernel[k]))
		delete(kernel, k)
	})
	for k, f := range kernel {
		traffic(k, connectionsOf(userspace.Counters{}, f))
	}
	return a.current.Load()
}

// connectionsOf joins what both kinds of data planes have counted.
func connectionsOf(us userspace.Counters, k conntrack.Figures) plan.Connections {
	return plan.Connections{
		Active: us.Active + k.Active, Total: us.Total + k.Total, Failed: us.Failed + k.Failed, Retried: us.Retried,
		BytesIn: us.BytesIn + k.BytesIn, BytesOut: us.BytesOut + k.BytesOut,
	}
}

// Ports returns a row for every port of a service, without the counters; none if
// there is no such service.
func (a *Agent) Ports(namespace, name string) []plan.ServiceStatus {
	p := a.current.Load()
	if p == nil {
		return nil
	}
	return p.RowsOf(namespace, name)
}
