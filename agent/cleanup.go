package agent

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"kproxy.dev/kproxy/config"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/iptables"
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
	sets, err := kernel.OpenIPSets()
	if err != nil {
		return &kernel.Missing{What: "ipset", How: "run kproxy as root, on a kernel with CONFIG_IP_SET", Err: err}
	}
	c := iptables.DefaultConfig()
	c.Sets = sets
	routing := kernel.DefaultRouting()
	routing.Table = routeTable
	err = iptables.Cleanup(ctx, c, routing)
	if rmErr := os.Remove(filepath.Join(stateDir, pinsFile)); rmErr != nil && !errors.Is(rmErr, os.ErrNotExist) {
		err = errors.Join(err, fmt.Errorf("forget pins: %w", rmErr))
	}
	return err
}

// DefaultRouteTable is the routing table unless --route-table says otherwise.
var DefaultRouteTable = config.Default().RouteTable
