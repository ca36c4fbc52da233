package netfilter

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
	"kproxy.dev/kproxy/kernel/nlmsg"
)

// Attributes of include/uapi/linux/netfilter/nf_tables.h: of chains, of their
// hooks, and of rules.
const (
	chainTable  = 1
	chainName   = 3
	chainHook   = 4
	chainPolicy = 5
	chainType   = 7
	hookNum     = 1
	hookPrio    = 2
	hookDev     = 3
	hookDevs    = 4
	ruleTable   = 1
)

// nftFamilies are those whose chains packets of both families may meet.
var nftFamilies = map[uint8]string{unix.NFPROTO_INET: "inet", unix.NFPROTO_IPV4: "ip", unix.NFPROTO_IPV6: "ip6", unix.NFPROTO_NETDEV: "netdev"}

// readNFTChains is for hosts where the program nft doesn't work, with why: it asks the kernel which
// base chains there are. Their rules aren't read; a table without any is known
// to do what its policies say.
func (t *Tables) readNFTChains(printed map[string]bool, why error) error {
	c, err := netlink.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		return fmt.Errorf("list chains of nftables: %w", err)
	}
	defer c.Close()
	chains, err := dump(c, unix.NFT_MSG_GETCHAIN)
	if err != nil {
		return fmt.Errorf("list chains of nftables: %w", err)
	}
	rules, err := dump(c, unix.NFT_MSG_GETRULE)
	if err != nil {
		return fmt.Errorf("list rules of nftables: %w", err)
	}
	full := map[string]bool{} // tables with rules
	for _, m := range rules {
		for typ, v := range nlmsg.Attributes(m.body) {
			if typ == ruleTable {
				full[nftFamilies[m.family]+" "+nlmsg.Text(v)] = true
			}
		}
	}
	for _, m := range chains {
		b, ok := m.base()
		if !ok || printed[b.Table+" "+b.Chain] || nftFamilies[m.family] == otherFamily[t.Family] {
			continue
		}
		b.Why = fmt.Sprintf("table %s, chain %s, policy %s, has rules that can't be read: %v", b.Table, b.Chain, b.Policy, why)
		if !full[b.Table] {
			b.Read = true
			b.set = &ruleset{source: sourceNFT, family: t.Family, chains: map[string]*chain{b.Table + " " + b.Chain: {table: b.Table, name: b.Chain}}}
		}
		t.Bases = append(t.Bases, b)
	}
	return nil
}

// nftMessage is an answer with its family.
type nftMessage struct {
	family uint8
	body   []byte
}

// dump asks for all objects of a kind. A kernel without nf_tables has none.
func dump(c *netlink.Conn, what uint16) ([]nftMessage, error) {
	request := netlink.Message{
		Header: netlink.Header{Type: netlink.HeaderType(unix.NFNL_SUBSYS_NFTABLES<<8 | what), Flags: netlink.Request | netlink.Dump},
		Data:   []byte{unix.NFPROTO_UNSPEC, unix.NFNETLINK_V0, 0, 0},
	}
	answers, err := c.Execute(request)
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var out []nftMessage
	for _, a := range answers {
		if len(a.Data) >= 4 {
			out = append(out, nftMessage{a.Data[0], a.Data[4:]})
		}
	}
	return out, nil
}

// nfHooks are hooks by number (enum nf_inet_hooks; that of netdev is
// NF_NETDEV_INGRESS, then NF_NETDEV_EGRESS).
var nfHooks = []Hook{Prerouting, Input, Forward, Output, Postrouting, Ingress}

// base reads a base chain; false for other chains and other families.
func (m nftMessage) base() (*Base, bool) {
	family, known := nftFamilies[m.family]
	b := &Base{Source: sourceNFT, Policy: Accept, Type: "filter"}
	hooked := false
	for typ, v := range nlmsg.Attributes(m.body) {
		switch typ {
		case chainTable:
			b.Table = family + " " + nlmsg.Text(v)
		case chainName:
			b.Chain = nlmsg.Text(v)
		case chainType:
			b.Type = nlmsg.Text(v)
		case chainPolicy:
			if len(v) == 4 && binary.BigEndian.Uint32(v) == 0 { // NF_DROP
				b.Policy = Drop
			}
		case chainHook:
			hooked = b.decodeHook(v, family)
		}
	}
	return b, known && hooked
}

func (b *Base) decodeHook(attrs []byte, family string) bool {
	known := false
	for typ, v := range nlmsg.Attributes(attrs) {
		switch typ {
		case hookDev:
			b.Devices = append(b.Devices, nlmsg.Text(v))
		case hookDevs:
			for _, name := range nlmsg.Attributes(v) {
				b.Devices = append(b.Devices, nlmsg.Text(name))
			}
		}
		if len(v) != 4 || typ != hookNum && typ != hookPrio {
			continue
		}
		n := binary.BigEndian.Uint32(v)
		switch {
		case typ == hookPrio:
			b.Priority = int(int32(n))
		case typ == hookNum && family == "netdev" && n < 2:
			b.Hook, known = [2]Hook{Ingress, Egress}[n], true
		case typ == hookNum && family != "netdev" && int(n) < len(nfHooks):
			b.Hook, known = nfHooks[n], true
		}
	}
	return known
}
