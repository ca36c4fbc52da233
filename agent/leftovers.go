package agent

import (
	"context"
	"errors"
	"fmt"

	"kproxy.dev/kproxy/agent/node"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/leftovers"
	"kproxy.dev/kproxy/plan"
)

// displace removes what an earlier kproxy left by drivers that this process doesn't use,
// but for routes, which all have in common. Until then it served new connections. What its
// connections still need it returns; that is removed once they have drained.
func (a *Agent) displace(ctx context.Context) (left []retired) {
	for _, d := range node.DriversOf(a.cfg) {
		if d.Planes()[0] == a.driver.Planes()[0] {
			continue
		}
		lines, err := d.Preview(ctx, node.NoRoutes)
		if len(lines) > 0 && err == nil {
			a.log.Info("removing what a kproxy of another mode programmed", "objects", len(lines))
			var drainer kernel.Drainer
			if drainer, err = d.Retire(ctx); drainer != nil {
				left = append(left, retired{drainer, d})
			}
		}
		var missing *kernel.Missing // there is nothing of it here
		if err != nil && !errors.As(err, &missing) && ctx.Err() == nil {
			a.log.Warn("what a kproxy of another mode programmed can't be removed", "error", err)
		}
	}
	return left
}

// retired are connections of a driver that this process doesn't use.
type retired struct {
	kernel.Drainer
	driver kernel.Driver
}

// cleanLeftovers removes what kube-proxy has left behind.
const cleanLeftovers = "kproxy cleanup --kube-proxy"

// reportLeftovers says, in one line each, that kube-proxy runs here and what one
// has left behind. Nothing is touched: others may rely on it.
func (a *Agent) reportLeftovers(ctx context.Context) {
	rows := []plan.Capability{}
	defer a.left.Store(&rows)
	report := func(name, reason string) {
		a.log.Warn("this node isn't kproxy's alone", "report", reason)
		rows = append(rows, plan.Capability{Name: name, Reason: reason})
	}
	if pids := leftovers.Running("/proc"); len(pids) > 0 {
		report("kube-proxy is gone", fmt.Sprintf("kube-proxy runs on this node (process %v): it serves the same services and undoes what kproxy does; stop it, then run %s", pids, cleanLeftovers))
	}
	found, err := leftovers.Look(ctx, kernel.Exec{})
	if ctx.Err() != nil {
		return
	} else if err != nil {
		a.log.Warn("what kube-proxy left behind can't be found out", "error", err)
		return
	}
	if !found.Empty() {
		report("kube-proxy's rules are gone", fmt.Sprintf("kube-proxy has left behind %s: new connections may go by its rules, also those of services that are gone; when it has stopped, remove them with %s", found, cleanLeftovers))
	}
}
