package offline

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
	"kproxy.dev/kproxy/service/lockfile"
)

// Cleanup removes everything kproxy ever programmed on this host, in every
// mode, and forgets the pins, a drain and the services saved in stateDir. Nothing else is touched. It refuses
// while a kproxy runs, which would put everything back.
func Cleanup(ctx context.Context, stateDir string, routeTable int) error {
	lock, err := node.Lock()
	if err != nil {
		return err
	}
	defer lockfile.Release(lock)
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
