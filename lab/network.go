package lab

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"

	"golang.org/x/sys/unix"
)

// Network is a lab.
type Network struct {
	Config   Config
	Client   *Namespace
	Node     *Namespace
	Backends []*Backend // b1 first
}

// New describes a lab; nothing exists before [Network.Up].
func New(c Config) *Network {
	n := &Network{
		Config: c,
		Client: &Namespace{Name: c.Prefix + "-client"},
		Node:   &Namespace{Name: c.Prefix + "-node"},
	}
	for i := 1; i <= c.Backends; i++ {
		name := fmt.Sprintf("b%d", i)
		n.Backends = append(n.Backends, newBackend(name, &Namespace{Name: c.Prefix + "-" + name}, c.backendAddresses(i)))
	}
	return n
}

// Up removes what an earlier lab with this prefix left behind, builds the
// namespaces, wires them, and starts the backends' servers. When it fails,
// nothing is left.
func (n *Network) Up(ctx context.Context) error {
	if err := n.check(); err != nil {
		return err
	}
	if err := DownAll(n.Config.Prefix); err != nil {
		return fmt.Errorf("remove earlier lab: %w", err)
	}
	err := n.up(ctx)
	if err != nil {
		err = errors.Join(err, n.Down())
	}
	return err
}

func (n *Network) check() error {
	if err := n.Config.Validate(); err != nil {
		return err
	}
	if os.Geteuid() != 0 {
		return fmt.Errorf("build namespaces: %w: run as root", unix.EPERM)
	}
	if _, err := os.Stat("/proc/sys/net/ipv6"); n.Config.IPv6 && err != nil {
		return errors.New("build dual-stack lab: this kernel has no IPv6: enable it, or ask for IPv4 only")
	}
	return nil
}

func (n *Network) up(ctx context.Context) error {
	var add []string
	for _, ns := range n.namespaces() {
		add = append(add, "netns add "+ns.Name)
	}
	if err := (*Namespace)(nil).ip(ctx, add...); err != nil {
		return fmt.Errorf("create namespaces: %w", err)
	}
	for _, ns := range n.namespaces() {
		if err := ns.Prepare(ns == n.Node, n.Config.IPv6); err != nil {
			return err
		}
	}
	if err := n.wire(ctx); err != nil {
		return err
	}
	for _, b := range n.Backends {
		if err := b.Start(ctx); err != nil {
			return fmt.Errorf("start backend %s: %w", b.Name, err)
		}
	}
	return nil
}

// Down stops the backends, ends the processes that run in the namespaces and
// removes the namespaces and the host link. Down of a lab that isn't up does
// nothing.
func (n *Network) Down() error {
	for _, b := range n.Backends {
		b.Stop()
	}
	return DownAll(n.Config.Prefix)
}

// HostAddress returns the address at which the caller's namespace reaches the node, and true if
// the lab has HostAccess.
func (n *Network) HostAddress() (netip.Addr, bool) {
	return nth(n.Config.hostSubnet(), 2), n.Config.HostAccess
}

// Backend returns the backend with a name such as "b1", or nil.
func (n *Network) Backend(name string) *Backend {
	for _, b := range n.Backends {
		if b.Name == name {
			return b
		}
	}
	return nil
}

func (n *Network) namespaces() []*Namespace {
	out := []*Namespace{n.Client, n.Node}
	for _, b := range n.Backends {
		out = append(out, b.Namespace)
	}
	return out
}
