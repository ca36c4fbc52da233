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
	"kproxy.dev/kproxy/kernel/ipvs"
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
	if err := cleanUp(ctx, routeTable); errors.Is(err, kernel.ErrPermission) {
		return &kernel.Missing{What: "permission", How: "run kproxy as root, or give it CAP_NET_ADMIN and CAP_NET_RAW", Err: kernel.ErrPermission}
	} else if err != nil {
		return err
	}
	if err := os.Remove(filepath.Join(stateDir, pinsFile)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("forget pins: %w", err)
	}
	return nil
}

// cleanUp removes what is in the kernel.
func cleanUp(ctx context.Context, routeTable int) error {
	sets, err := kernel.OpenIPSets()
	if err != nil {
		return &kernel.Missing{What: "ipset", How: "run kproxy as root, on a kernel with CONFIG_IP_SET", Err: err}
	}
	c := iptables.DefaultConfig()
	c.Sets = sets
	routing := kernel.DefaultRouting()
	routing.Table = routeTable
	return ipvs.Cleanup(ctx, sets, func(ctx context.Context) error { return iptables.Cleanup(ctx, c, routing) })
}

// DefaultRouteTable is the routing table unless --route-table says otherwise.
var DefaultRouteTable = config.Default().RouteTable
