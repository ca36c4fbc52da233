package agent

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"kproxy.dev/kproxy/agent/node"
	"kproxy.dev/kproxy/config"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/leftovers"
	"kproxy.dev/kproxy/plan"
)

// Cleanup removes everything kproxy ever programmed on this host, in every
// mode, and forgets the pins, a drain and the services saved in stateDir. Nothing else is touched. It refuses
// while a kproxy runs, which would put everything back.
func Cleanup(ctx context.Context, stateDir string, routeTable int) error {
	lock, err := node.Lock()
	if err != nil {
		return err
	}
	defer node.Unlock(lock)
	for _, d := range node.DriversOf(config.Default()) {
		if err := d.Remove(ctx, routeTable); err != nil {
			return err
		}
	}
	for _, name := range node.StateFiles {
		if err := os.Remove(filepath.Join(stateDir, name)); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("forget what is in --state-dir: %w", err)
		}
	}
	return nil
}

// PreviewCleanup says what [Cleanup] would remove, a line each, and changes nothing. A
// kproxy may run.
func PreviewCleanup(ctx context.Context, stateDir string, routeTable int) ([]string, error) {
	var out []string
	var errs error
	for _, d := range node.DriversOf(config.Default()) {
		lines, err := d.Preview(ctx, routeTable)
		lines = slices.DeleteFunc(lines, func(l string) bool { return slices.Contains(out, l) }) // all have the same routes
		out, errs = append(out, lines...), errors.Join(errs, err)
	}
	for _, name := range node.StateFiles {
		if _, none := os.Stat(filepath.Join(stateDir, name)); none == nil {
			out = append(out, "file "+filepath.Join(stateDir, name))
		}
	}
	return out, errs
}

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

// DefaultRouteTable is the routing table unless --route-table says otherwise.
var DefaultRouteTable = config.Default().RouteTable

// cleanLeftovers is what removes them.
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

// PreviewLeftovers says what [CleanLeftovers] would remove, and what it would keep.
func PreviewLeftovers(ctx context.Context) (found string, kept []string, err error) {
	f, err := leftovers.Look(ctx, kernel.Exec{})
	if errors.Is(err, kernel.ErrPermission) {
		err = kernel.NoPermission(err)
	}
	return f.String(), f.Kept, err
}

// CleanLeftovers removes what kube-proxy has left in the kernel, whether or not
// a kproxy runs, and says what it removed and what others keep in use. It refuses
// while kube-proxy runs, which would put everything back.
func CleanLeftovers(ctx context.Context) (removed string, kept []string, err error) {
	if pids := leftovers.Running("/proc"); len(pids) > 0 {
		return "", nil, fmt.Errorf("%w (process %v); stop it first: kubectl -n kube-system delete daemonset kube-proxy", leftovers.ErrRunning, pids)
	}
	found, err := leftovers.Look(ctx, kernel.Exec{})
	if err == nil {
		err = leftovers.Remove(ctx, kernel.Exec{}, found)
	}
	if errors.Is(err, kernel.ErrPermission) {
		err = kernel.NoPermission(err)
	}
	return found.String(), found.Kept, err
}
