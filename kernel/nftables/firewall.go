package nftables

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/netlink"
	"kproxy.dev/kproxy/service"
)

var _ kernel.Warner = (*Plane)(nil)

// Warnings implements [kernel.Warner].
func (*Plane) Warnings() (out []string, err error) {
	chains, err := droppingChains()
	for _, c := range chains {
		out = append(out, c.text+": accept connections to services there (kproxy trace says which, and how)")
	}
	return out, err
}

// dropper is a base chain that drops what none of its rules accepts.
type dropper struct {
	text     string
	passable bool // by rules of another driver: the table is one that it shares
}

// yields returns the texts of those chains in which rules of another driver could accept.
// Where a table of nftables' own drops, another driver is as helpless.
func yields(chains []dropper) (out []string) {
	for _, c := range chains {
		if c.passable {
			out = append(out, c.text)
		}
	}
	return out
}

// hookWords are the hooks at which a filter keeps packets from services.
var hookWords = map[uint32]string{unix.NF_INET_LOCAL_IN: "comes in", unix.NF_INET_FORWARD: "is forwarded", unix.NF_INET_LOCAL_OUT: "goes out"}

// builtinChains are the names of the built-in chains at these hooks.
var builtinChains = map[uint32]string{unix.NF_INET_LOCAL_IN: "INPUT", unix.NF_INET_FORWARD: "FORWARD", unix.NF_INET_LOCAL_OUT: "OUTPUT"}

func droppingText(chain, table string, hook uint32) string {
	return fmt.Sprintf("chain %s of %s drops what %s unless a rule there accepts it, which kproxy's can't", chain, table, hookWords[hook])
}

// droppingChains names the base chains of others that drop by their policy, or by a last rule for
// every packet. Rules of kproxy's own tables can't overrule that.
func droppingChains() ([]dropper, error) {
	out, err := droppingNFTables()
	for _, f := range service.Families {
		legacy, errLegacy := droppingLegacy(f)
		out, err = append(out, legacy...), errors.Join(err, errLegacy)
	}
	return out, err
}

func droppingNFTables() (out []dropper, err error) {
	words := map[uint8]string{unix.NFPROTO_INET: "inet", unix.NFPROTO_IPV4: "ip", unix.NFPROTO_IPV6: "ip6"}
	type base struct {
		family       uint8
		table, chain string
		hook         uint32
		drops        bool
	}
	var all []base
	err = netlink.DumpNFTables(unix.NFT_MSG_GETCHAIN, unix.NFPROTO_UNSPEC, nil, func(family uint8, b []byte) {
		c := base{
			family: family, table: netlink.Text(attribute(b, unix.NFTA_CHAIN_TABLE)), chain: netlink.Text(attribute(b, unix.NFTA_CHAIN_NAME)),
			hook:  number(attribute(attribute(b, unix.NFTA_CHAIN_HOOK), unix.NFTA_HOOK_HOOKNUM)),
			drops: number(attribute(b, unix.NFTA_CHAIN_POLICY)) == codeDrop,
		}
		if c.table != Name && hookWords[c.hook] != "" && words[family] != "" {
			all = append(all, c)
		}
	})
	for _, c := range all {
		if !c.drops && err == nil {
			var last []byte
			err = netlink.DumpNFTables(unix.NFT_MSG_GETRULE, c.family, func(b []byte) []byte {
				return netlink.AppendText(netlink.AppendText(b, unix.NFTA_RULE_TABLE, c.table), unix.NFTA_RULE_CHAIN, c.chain)
			}, func(_ uint8, b []byte) {
				// A kernel that knows no filter lists all rules.
				if netlink.Text(attribute(b, unix.NFTA_RULE_TABLE)) == c.table && netlink.Text(attribute(b, unix.NFTA_RULE_CHAIN)) == c.chain {
					last = attribute(b, unix.NFTA_RULE_EXPRESSIONS)
				}
			})
			if errors.Is(err, unix.ENOENT) {
				err = nil // it has just gone
			}
			c.drops = dropsAll(last)
		}
		if c.drops {
			out = append(out, dropper{
				text:     droppingText(c.chain, "nftables table "+words[c.family]+" "+c.table, c.hook),
				passable: c.family != unix.NFPROTO_INET && c.table == "filter" && c.chain == builtinChains[c.hook], // as iptables-nft names them
			})
		}
	}
	return out, err
}

// dropsAll reports whether a rule of these expressions drops, or rejects, every packet.
func dropsAll(expressions []byte) bool {
	drops := false
	for _, e := range netlink.Attributes(expressions) {
		data := attribute(e, unix.NFTA_EXPR_DATA)
		switch netlink.Text(attribute(e, unix.NFTA_EXPR_NAME)) {
		case "counter", "log":
		case "match":
			if netlink.Text(attribute(data, unix.NFTA_MATCH_NAME)) != "comment" {
				return false
			}
		case "reject":
			drops = true
		case "target":
			drops = netlink.Text(attribute(data, unix.NFTA_TARGET_NAME)) == "REJECT"
		case "immediate":
			verdict := attribute(attribute(data, unix.NFTA_IMMEDIATE_DATA), unix.NFTA_DATA_VERDICT)
			drops = verdict != nil && number(attribute(verdict, unix.NFTA_VERDICT_CODE)) == codeDrop
		default:
			return false
		}
	}
	return drops
}

// The variant, and offsets in struct ipt_entry and ip6t_entry, which begin with what of the IP header
// they match, and in struct xt_standard_target (linux/netfilter_ipv4/ip_tables.h and others).
const (
	legacyProgram  = "iptables-legacy"
	legacyTargetAt = 4 // after the header's part and nfcache
	legacyNextAt   = 6
	legacyName     = 2 // of a target
	legacyVerdict  = 32
	legacyNameSize = 29
	legacyDrop     = -codeDrop - 1
)

// legacyLayout is that of a family's entries: the size of the header's part, and of an entry.
var legacyLayout = [2]struct{ header, entry int }{service.IPv4: {84, 112}, service.IPv6: {136, 168}}

// droppingLegacy is droppingChains of iptables' legacy variant.
func droppingLegacy(f service.Family) (out []dropper, err error) {
	t, err := kernel.ReadLegacyFilter(f)
	if t == nil || err != nil {
		return nil, err
	}
	for hook, chain := range builtinChains {
		if legacyDrops(t.Rules, legacyLayout[f].header, legacyLayout[f].entry, t.First[hook], t.Policy[hook]) {
			out = append(out, dropper{droppingText(chain, legacyProgram+"'s "+nfWord(f)+" table filter", hook), true})
		}
	}
	slices.SortFunc(out, func(x, y dropper) int { return strings.Compare(x.text, y.text) })
	return out, nil
}

// legacyDrops reports whether a built-in chain, whose entries are from first to the one of its policy,
// drops what no entry accepts.
func legacyDrops(rules []byte, header, entry, first, policy int) bool {
	last := -1
	for at := first; at < policy && at+entry <= len(rules); {
		last = at
		next := int(binary.NativeEndian.Uint16(rules[at+header+legacyNextAt:]))
		at += cmp.Or(next, len(rules))
	}
	return legacyEnds(rules, header, entry, policy) || last >= 0 && legacyEnds(rules, header, entry, last)
}

// legacyEnds reports whether the entry drops, or rejects, every packet.
func legacyEnds(rules []byte, header, entry, at int) bool {
	if at+entry+legacyVerdict+4 > len(rules) {
		return false
	}
	e := rules[at:]
	if slices.ContainsFunc(e[:header], func(b byte) bool { return b != 0 }) || int(binary.NativeEndian.Uint16(e[header+legacyTargetAt:])) != entry {
		return false
	}
	target := e[entry:]
	name := netlink.Text(target[legacyName : legacyName+legacyNameSize])
	return name == "REJECT" || name == "" && int32(binary.NativeEndian.Uint32(target[legacyVerdict:])) == legacyDrop
}
