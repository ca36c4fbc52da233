package agent

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

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

// leftoversEvery is the least time between two looks at what kube-proxy has left. On a big node they take seconds, and are further apart:
// they take a fiftieth of the time.
const (
	leftoversEvery = 10 * time.Second
	leftoversShare = 50
)

// followLeftovers says, in one line each, that kube-proxy runs here and what one has left behind, and looks again until nothing is there.
// Nothing is touched: others may rely on it.
func (a *Agent) followLeftovers(ctx context.Context) {
	var said []plan.Capability
	for {
		began := time.Now()
		rows, err := lookForLeftovers(ctx)
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			a.log.Warn("what kube-proxy left behind can't be found out", "error", err)
		}
		for _, r := range rows {
			if !slices.ContainsFunc(said, func(before plan.Capability) bool { return before.Name == r.Name }) {
				a.log.Warn("this node isn't kproxy's alone", "report", r.Reason)
			}
		}
		said = rows
		if len(rows) > 0 || err == nil {
			a.left.Store(&rows)
		}
		if len(rows) == 0 || err != nil {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(max(leftoversEvery, leftoversShare*time.Since(began))):
		}
	}
}

func lookForLeftovers(ctx context.Context) ([]plan.Capability, error) {
	rows := []plan.Capability{}
	if pids := leftovers.Running("/proc"); len(pids) > 0 {
		rows = append(rows, plan.Capability{Name: "kube-proxy is gone", Reason: fmt.Sprintf(
			"kube-proxy runs on this node (process %v): it serves the same services and undoes what kproxy does; stop it, then run %s", pids, cleanLeftovers)})
	}
	found, err := leftovers.Look(ctx, kernel.Exec{})
	if err == nil && !found.Empty() {
		rows = append(rows, plan.Capability{Name: "kube-proxy's rules are gone", Reason: fmt.Sprintf(
			"kube-proxy has left behind %s: new connections may go by its rules, also those of services that are gone; when it has stopped, remove them with %s", found, cleanLeftovers)})
	}
	return rows, err
}

// giveWayWithin bounds how long it takes to remove what kproxy has programmed.
const giveWayWithin = 10 * time.Second

// giveWay removes what kproxy has programmed where kube-proxy has come since this process began, as on a node that goes back to it:
// kproxy's rules would come before those of who serves now, and nobody would bring them up to date.
func (a *Agent) giveWay() {
	if left := a.left.Load(); a.relieved.Load() || left == nil || len(*left) > 0 {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), giveWayWithin)
	defer cancel()
	found, err := leftovers.Look(ctx, kernel.Exec{})
	if err != nil || !found.Serves() {
		return
	}
	a.log.Info("kube-proxy serves this node now: removing what kproxy has programmed", "kube-proxy", found)
	for _, d := range node.DriversOf(a.cfg) {
		err = errors.Join(err, d.Remove(ctx, a.cfg.RouteTable))
	}
	if err != nil {
		a.log.Warn("what kproxy has programmed may still be there; remove it with kproxy cleanup", "error", err)
	}
}
