package iptables

import (
	"encoding/binary"
	"fmt"

	"golang.org/x/sys/unix"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/nlmsg"
)

// generation is the stamper of the nft variant: the kernel counts commits to the
// tables of a network namespace, of all families together.
type generation struct{ socket *nlmsg.Socket }

func newGeneration() (*generation, error) {
	s, err := nlmsg.Open(unix.NETLINK_NETFILTER, 4096)
	return &generation{s}, err
}

func (g *generation) close() { g.socket.Close() }

func (g *generation) stamp() (stamp, error) {
	var out stamp
	var failure error
	err := g.socket.Do(1, func(b []byte, _ int) []byte {
		return nlmsg.AppendNetfilter(nlmsg.AppendRequest(b, unix.NFT_MSG_GETGEN|unix.NFNL_SUBSYS_NFTABLES<<8, 0), unix.AF_UNSPEC)
	}, func(_ int, body []byte, err error) {
		failure = err
		for typ, v := range nlmsg.Attributes(body[min(len(body), nlmsg.SizeofNetfilter):]) {
			if typ == unix.NFTA_GEN_ID && len(v) >= 4 {
				out = binary.BigEndian.Uint32(v)
			}
		}
	})
	if err == nil {
		err = failure
	}
	if err == nil && out == nil {
		err = nlmsg.ErrNoAnswer
	}
	if err != nil {
		return nil, fmt.Errorf("read nftables' generation: %w", err)
	}
	return out, nil
}

func (*generation) follows(old, now stamp, commits int, _, _ *kernel.Ruleset) (follows, sure bool) {
	return now.(uint32) == old.(uint32)+uint32(commits), true
}
