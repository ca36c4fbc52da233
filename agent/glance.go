package agent

import (
	"kproxy.dev/kproxy/conntrack"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/userspace"
)

// Traffic calls each for every service port of the plan: what Status says of its
// connections, without making a row for each of thousands.
func (a *Agent) Traffic(each func(service.Key, plan.Connections)) {
	p := a.current.Load()
	if p == nil {
		return
	}
	if err := a.accounting.Refresh(accountingAge, a.conntrack.List); err != nil {
		a.log.Warn("the kernel's connections can't be counted", "error", err)
	}
	a.counting.RLock()
	defer a.counting.RUnlock()
	kernel := a.accounting.Traffic()
	user := map[service.Key]userspace.Counters{}
	a.userspace.Traffic(func(k service.Key, c userspace.Counters) { user[k] = c })
	for _, s := range p.Services {
		each(s.Port.Key, connectionsOf(user[s.Port.Key], kernel[s.Port.Key]))
	}
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
