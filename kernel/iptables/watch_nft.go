package iptables

import (
	"fmt"

	"golang.org/x/sys/unix"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/netlink"
)

// generation is the stamper of the nft variant: the kernel counts commits.
type generation struct{ socket *netlink.Socket }

func newGeneration() (*generation, error) {
	s, err := netlink.Open(unix.NETLINK_NETFILTER, 4096)
	return &generation{s}, err
}

func (g *generation) close() { g.socket.Close() }

func (g *generation) stamp() (stamp, error) {
	out, err := netlink.Generation(g.socket)
	if err != nil {
		return nil, fmt.Errorf("read nftables' generation: %w", err)
	}
	return out, nil
}

func (*generation) follows(old, now stamp, commits int, _, _ *kernel.Ruleset) (follows, sure bool) {
	return now.(uint32) == old.(uint32)+uint32(commits), true
}
