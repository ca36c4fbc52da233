package leftovers

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/kernel/netlink"
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
	err = netlink.DumpNFTables(unix.NFT_MSG_GETTABLE, unix.NFPROTO_UNSPEC, nil, func(family uint8, attributes []byte) {
		for typ, value := range netlink.Attributes(attributes) {
			if typ == unix.NFTA_TABLE_NAME && netlink.Text(value) == nftTable && (family == unix.NFPROTO_IPV4 || family == unix.NFPROTO_IPV6) {
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
	s, err := netlink.Open(unix.NETLINK_NETFILTER, 4<<10)
	if err != nil {
		return fmt.Errorf("remove nftables tables: %w", err)
	}
	defer s.Close()
	var requests [][]byte
	for _, t := range tables {
		b := netlink.AppendNetfilter(netlink.AppendRequest(nil, unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_DELTABLE, 0), t.family)
		requests = append(requests, netlink.AppendText(b, unix.NFTA_TABLE_NAME, nftTable))
	}
	if err := s.Transaction(unix.NFNL_SUBSYS_NFTABLES, requests); err != nil {
		return fmt.Errorf("remove nftables tables %v: %w", tables, err)
	}
	return nil
}
