package leftovers

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/kernel/nlmsg"
)

// nft is one of kube-proxy's own tables; its family is NFPROTO_IPV4 or _IPV6.
type nft struct{ family uint8 }

func (n nft) String() string {
	if n.family == unix.NFPROTO_IPV6 {
		return "ip6 " + nftTable
	}
	return "ip " + nftTable
}

// findNFT lists the tables. There may be no program nft on the host.
func findNFT() (out []nft, err error) {
	err = nlmsg.DumpNFTables(unix.NFT_MSG_GETTABLE, unix.NFPROTO_UNSPEC, nil, func(family uint8, attributes []byte) {
		for typ, value := range nlmsg.Attributes(attributes) {
			if typ == unix.NFTA_TABLE_NAME && nlmsg.Text(value) == nftTable && (family == unix.NFPROTO_IPV4 || family == unix.NFPROTO_IPV6) {
				out = append(out, nft{family})
			}
		}
	})
	if errors.Is(err, unix.EPERM) { // which who has rules of iptables to read lacks as well
		return nil, nil
	} else if err != nil {
		return nil, fmt.Errorf("list nftables tables: %w", err)
	}
	return out, nil
}

// removeNFT deletes tables with all that is in them.
func removeNFT(tables []nft) error {
	if len(tables) == 0 {
		return nil
	}
	s, err := nlmsg.Open(unix.NETLINK_NETFILTER, 4<<10)
	if err != nil {
		return fmt.Errorf("remove nftables tables: %w", err)
	}
	defer s.Close()
	for _, t := range tables {
		if err := t.remove(s); err != nil {
			return fmt.Errorf("remove nftables table %s: %w", t, err)
		}
	}
	return nil
}

// remove is a batch of one: nf_tables takes changes in batches only. Their ends aren't
// acknowledged, by kernels before 6.10 not even when asked to.
func (n nft) remove(s *nlmsg.Socket) error {
	const subsystem = unix.NFNL_SUBSYS_NFTABLES
	answered, failure := false, error(nil)
	err := s.Do(3, func(b []byte, i int) []byte {
		if i == 1 {
			b = nlmsg.AppendNetfilter(nlmsg.AppendRequest(b, subsystem<<8|unix.NFT_MSG_DELTABLE, unix.NLM_F_ACK), n.family)
			return nlmsg.AppendText(b, unix.NFTA_TABLE_NAME, nftTable)
		}
		kind := [...]uint16{0: unix.NFNL_MSG_BATCH_BEGIN, 2: unix.NFNL_MSG_BATCH_END}[i]
		return append(nlmsg.AppendRequest(b, kind, 0), unix.AF_UNSPEC, 0, 0, subsystem) // in network byte order
	}, func(_ int, _ []byte, err error) { answered, failure = true, errors.Join(failure, err) })
	if answered {
		return failure
	}
	return err
}
