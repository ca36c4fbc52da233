package main

import (
	"context"
	"fmt"
	"os"

	"kproxy.dev/kproxy/lab"
)

// The backends of the lab: two that serve, and one whose namespace is the
// control plane's.
const (
	sides        = 2
	controlPlane = 2
)

// newNetwork builds the lab and has its first two backends own the endpoints'
// networks (AnyIP: a local route makes all of a network the host's own addresses).
func newNetwork(ctx context.Context) (*lab.Network, error) {
	c := lab.DefaultConfig()
	c.Prefix, c.Backends, c.IPv6 = fmt.Sprintf("kpp-%d", os.Getpid()), sides+1, false
	n := lab.New(c)
	if err := n.Up(ctx); err != nil {
		return nil, err
	}
	n.Backends[controlPlane].Stop() // it serves nothing but the API
	for side, network := range endpointNetworks {
		b := n.Backends[side]
		err := command(ctx, n.Node, "ip", "route", "add", network.String(), "via", b.Addresses[0].String(), "dev", b.Name, "onlink")
		if err == nil {
			err = command(ctx, b.Namespace, "ip", "route", "add", "local", network.String(), "dev", "lo")
		}
		if err != nil {
			return nil, fmt.Errorf("give backend %s its network: %w (%w)", b.Name, err, n.Down())
		}
	}
	return n, nil
}

// command runs a command in a namespace.
func command(ctx context.Context, ns *lab.Namespace, name string, args ...string) error {
	if out, err := ns.Command(ctx, name, args...).CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", name, err, out)
	}
	return nil
}
