package netfilter

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/kernel/netlink"
	"kproxy.dev/kproxy/service"
)

// handles holds the handles of each chain's rules in nf_tables, in order, by "family table chain".
type handles map[string][]uint64

// ReadNumbered is [Read], and remembers the handles of rules, by which the kernel names those
// that a packet meets ([Watcher]).
func ReadNumbered(ctx context.Context, c Config, f service.Family) (*Tables, error) {
	socket, err := netlink.Open(unix.NETLINK_NETFILTER, 64<<10)
	if err != nil {
		return nil, err
	}
	defer socket.Close()
	for i := 0; ; i++ {
		const attempts = 5
		before, err := netlink.Generation(socket)
		if err != nil {
			return nil, fmt.Errorf("read the generation of nf_tables: %w", err)
		}
		t, err := Read(ctx, c, f)
		if err != nil {
			return nil, err
		}
		if t.handles, err = readHandles(); err != nil {
			return nil, fmt.Errorf("list rules of nftables: %w", err)
		}
		// iptables prints rules without handles: the two lists must be of one moment.
		if after, err := netlink.Generation(socket); err != nil || after == before || i == attempts {
			return t, err
		}
	}
}

func readHandles() (handles, error) {
	h := handles{}
	err := netlink.DumpNFTables(unix.NFT_MSG_GETRULE, unix.NFPROTO_UNSPEC, nil, func(family uint8, b []byte) {
		a := attributesOf(b)
		chain := nftFamilies[family] + " " + netlink.Text(a[unix.NFTA_RULE_TABLE]) + " " + netlink.Text(a[unix.NFTA_RULE_CHAIN])
		h[chain] = append(h[chain], a.number(unix.NFTA_RULE_HANDLE))
	})
	return h, err
}

// Met is the rule of a sight, without Matched and Outcome, or of a policy's; Hook only where it
// is a base chain's. It isn't known where the rules have changed since they were read.
func (t *Tables) Met(s *Sight) (step Step, known bool) {
	step = Step{Table: s.Table, Chain: s.Chain, Policy: s.Handle == 0}
	at := slices.Index(t.handles[s.Table+" "+s.Chain], s.Handle)
	for _, b := range t.Bases {
		if t.nftTable(b) != s.Table || b.Source == sourceXTLegacy || b.set == nil {
			continue
		}
		c := b.set.chain(b.Table, s.Chain)
		if c == nil || len(c.rules) != len(t.handles[s.Table+" "+s.Chain]) {
			continue
		}
		step.Source, step.Table = b.Source, b.Table
		if b.Chain == s.Chain {
			step.Hook = b.Hook
		}
		switch {
		case step.Policy && b.Chain == s.Chain:
			step.Text, known = b.policyText(), true
		case at >= 0:
			r := c.rules[at]
			r.prepare()
			step.Index, step.Text, step.Outcome, known = at+1, r.text, r.action.text, true
		}
		if step.Hook != "" {
			break
		}
	}
	return step, known
}

// Silent reports whether the kernel doesn't tell which packets meet a rule: it isn't nf_tables', or packets pass it before
// or behind the chains that mark them.
func Silent(s *Step) bool { return s.Source == sourceXTLegacy || strings.HasPrefix(s.Table, "bridge ") }

// Chooses reports whether a sight is in a base chain of type nat where destinations are chosen;
// with nil, whether there is one whose rules the kernel names.
func (t *Tables) Chooses(s *Sight) bool {
	return slices.ContainsFunc(t.Bases, func(b *Base) bool {
		return b.Type == "nat" && b.order() == priorityNATDst && b.Source != sourceXTLegacy && (s == nil || b.Chain == s.Chain && t.nftTable(b) == s.Table)
	})
}

// nftTable returns the table of b as nftables names it, with its family.
func (t *Tables) nftTable(b *Base) string {
	if b.Source == sourceXTNFT {
		return nftFamily[t.Family] + " " + b.Table
	}
	return b.Table
}

// policyText is the policy as iptables-save or nft print it.
func (b *Base) policyText() string {
	if b.Source == sourceNFT {
		return "policy " + string(b.Policy)
	}
	return fmt.Sprintf(":%s %s", b.Chain, strings.ToUpper(string(b.Policy)))
}
