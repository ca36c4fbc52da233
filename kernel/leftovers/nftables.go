package leftovers

import (
	"errors"
	"fmt"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// nft is one of kube-proxy's own tables; its family is NFPROTO_IPV4 or _IPV6.
type nft struct{ family uint8 }

func (n nft) String() string {
	if n.family == unix.NFPROTO_IPV6 {
		return "ip6 " + nftTable
	}
	return "ip " + nftTable
}

// Messages of nf_tables (include/uapi/linux/netfilter/nf_tables.h) and of
// nfnetlink. There may be no program nft on the host.
const (
	getTable = unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_GETTABLE
	delTable = unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_DELTABLE
)

// findNFT lists the tables. A kernel without nf_tables has none.
func findNFT() ([]nft, error) {
	c, err := netlink.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		return nil, fmt.Errorf("list nftables tables: %w", err)
	}
	defer c.Close()
	answers, err := c.Execute(netlink.Message{
		Header: netlink.Header{Type: getTable, Flags: netlink.Request | netlink.Dump}, Data: []byte{unix.NFPROTO_UNSPEC, 0, 0, 0},
	})
	if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EPERM) {
		return nil, nil // no nf_tables; or no permission, which who has rules of iptables to read lacks as well
	} else if err != nil {
		return nil, fmt.Errorf("list nftables tables: %w", err)
	}
	var out []nft
	for _, m := range answers {
		if len(m.Data) < 4 {
			continue
		}
		attributes, err := netlink.NewAttributeDecoder(m.Data[4:])
		if err != nil {
			return nil, fmt.Errorf("list nftables tables: %w", err)
		}
		family, name := m.Data[0], ""
		for attributes.Next() {
			if attributes.Type() == unix.NFTA_TABLE_NAME {
				name = attributes.String()
			}
		}
		if name == nftTable && (family == unix.NFPROTO_IPV4 || family == unix.NFPROTO_IPV6) {
			out = append(out, nft{family})
		}
	}
	return out, nil
}

// removeNFT deletes tables with all that is in them.
func removeNFT(tables []nft) error {
	if len(tables) == 0 {
		return nil
	}
	c, err := netlink.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		return fmt.Errorf("remove nftables tables: %w", err)
	}
	defer c.Close()
	for _, t := range tables {
		if err := deleteTable(c, t); err != nil {
			return fmt.Errorf("remove nftables table %s: %w", t, err)
		}
	}
	return nil
}

// deleteTable is a batch of one: nf_tables takes changes in batches only.
func deleteTable(c *netlink.Conn, t nft) error {
	name, err := netlink.MarshalAttributes([]netlink.Attribute{{Type: unix.NFTA_TABLE_NAME, Data: append([]byte(nftTable), 0)}})
	if err != nil {
		return err
	}
	bound := []byte{unix.AF_UNSPEC, 0, 0, unix.NFNL_SUBSYS_NFTABLES} // the subsystem, in network byte order
	if _, err := c.SendMessages([]netlink.Message{
		{Header: netlink.Header{Type: unix.NFNL_MSG_BATCH_BEGIN, Flags: netlink.Request}, Data: bound},
		{Header: netlink.Header{Type: delTable, Flags: netlink.Request | netlink.Acknowledge}, Data: append([]byte{t.family, 0, 0, 0}, name...)},
		{Header: netlink.Header{Type: unix.NFNL_MSG_BATCH_END, Flags: netlink.Request}, Data: bound},
	}); err != nil {
		return err
	}
	_, err = c.Receive()
	return err
}
