package agent

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"kproxy.dev/kproxy/config"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/steering"
)

// Cleanup removes everything kproxy ever programmed on this host, in every
// mode, and forgets the pins in stateDir. Nothing else is touched. It refuses
// while a kproxy runs, which would put everything back.
func Cleanup(ctx context.Context, stateDir string, routeTable int) error {
	release, err := lockNode()
	if err != nil {
		return err
	}
	defer release()
	err = inKernel(routeTable, func(ps planes, e *steering.Env) error {
		remove := func(context.Context) error { return nil }
		for i := range slices.Backward(ps) {
			below := remove
			remove = func(ctx context.Context) error { return ps[i].Remove(ctx, e, below) }
		}
		return remove(ctx)
	})
	if err != nil {
		return err
	}
	if err := os.Remove(filepath.Join(stateDir, pinsFile)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("forget pins: %w", err)
	}
	return nil
}

// PreviewCleanup says what [Cleanup] would remove, a line each, and changes nothing. A
// kproxy may run.
func PreviewCleanup(ctx context.Context, stateDir string, routeTable int) ([]string, error) {
	var out []string
	err := inKernel(routeTable, func(ps planes, e *steering.Env) error {
		for i := range ps {
			lines, err := ps[i].Preview(ctx, e)
			if out = append(out, lines...); err != nil {
				return err
			}
		}
		return nil
	})
	if _, none := os.Stat(filepath.Join(stateDir, pinsFile)); none == nil {
		out = append(out, "file "+filepath.Join(stateDir, pinsFile))
	}
	return out, err
}

// inKernel calls f with what kproxy's things in the kernel are reached by.
func inKernel(routeTable int, f func(planes, *steering.Env) error) error {
	sets, err := kernel.OpenIPSets()
	if err != nil {
		return &kernel.Missing{What: "ipset", How: "run kproxy as root, on a kernel with CONFIG_IP_SET", Err: err}
	}
	defer sets.Close()
	e := steering.Env{Options: steering.DefaultOptions(), Runner: kernel.Exec{}, Sets: sets, Variant: kernel.DefaultVariant(), Routing: steering.DefaultRouting()}
	e.Routing.Table = routeTable
	if err = f(planesOf(config.Default()), &e); errors.Is(err, kernel.ErrPermission) {
		return noPermission(kernel.ErrPermission)
	}
	return err
}

// DefaultRouteTable is the routing table unless --route-table says otherwise.
var DefaultRouteTable = config.Default().RouteTable
