package netfilter

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/service"
)

// Sources of rules.
const (
	sourceXTNFT    = "iptables-nft"
	sourceXTLegacy = "iptables-legacy"
	sourceNFT      = "nftables"
)

// Config is what Read works with.
type Config struct {
	Runner kernel.Runner
	// Variant of iptables that holds kproxy's rules; the other one's are read as
	// well, if there are any.
	Variant kernel.Variant
	// Sets reads sets when a rule asks for them; nil for none.
	Sets SetReader
	// Host answers what rules ask about it; nil leaves that undecided.
	Host Host
}

// DefaultConfig is for this host's own programs. The set reader is the caller's to
// open and close.
func DefaultConfig() Config {
	return Config{Runner: kernel.Exec{}, Variant: kernel.DefaultVariant()}
}

// Read reads back everything that packets of a family meet, in the network
// namespace of the calling thread. What can't be read but may be there is in the
// result: as a base chain that isn't Read, or as a note.
func Read(ctx context.Context, c Config, f service.Family) (*Tables, error) {
	t := &Tables{Family: f, bridged: bridged(f), host: c.Host, sets: c.Sets}
	main := c.Variant
	if main.Name == "" {
		main.Name = c.variantName(ctx)
	}
	other := kernel.VariantLegacy()
	if main.Name == "legacy" {
		other = kernel.VariantNFT()
	}
	printed := map[string]bool{} // base chains of nftables that iptables has printed: "ip nat PREROUTING"
	if err := t.readIPTables(ctx, c.Runner, main, printed); err != nil {
		return nil, err
	}
	if err := t.readIPTables(ctx, c.Runner, other, printed); err != nil && !errors.Is(err, kernel.ErrNoProgram) {
		t.Notes = append(t.Notes, fmt.Sprintf("the rules of %s can't be read: %v", other.Program[f], err))
	}
	if err := t.readNFT(ctx, c.Runner, printed); err != nil {
		return nil, err
	}
	t.sort()
	return t, nil
}

// bridged reads whether packets between ports of a bridge pass netfilter, which
// they don't without the module br_netfilter.
func bridged(f service.Family) Answer {
	name := [2]string{service.IPv4: "bridge-nf-call-iptables", service.IPv6: "bridge-nf-call-ip6tables"}[f]
	b, err := os.ReadFile("/proc/sys/net/bridge/" + name)
	switch {
	case errors.Is(err, fs.ErrNotExist), err == nil && strings.TrimSpace(string(b)) == "0":
		return No
	}
	return Maybe
}

// variantName finds out which variant the host's own is; nft if it can't.
func (c Config) variantName(ctx context.Context) string {
	out, err := c.Runner.Run(ctx, nil, c.Variant.Program[service.IPv4], "--version")
	if err == nil && strings.Contains(string(out), "legacy") {
		return "legacy"
	}
	return "nft"
}

// Parse makes a Tables of what iptables-save -c printed, without sets and without
// a host, for one variant: "nft" or "legacy".
func Parse(f service.Family, variant, text string) (*Tables, error) {
	t := &Tables{Family: f}
	if err := t.addSave("iptables-"+variant, text, nil); err != nil {
		return nil, err
	}
	t.sort()
	return t, nil
}

// With returns t with another reader of sets and another host.
func (t *Tables) With(sets SetReader, host Host) *Tables {
	out := *t
	out.sets, out.host, out.read = sets, host, nil
	return &out
}

func (t *Tables) readIPTables(ctx context.Context, run kernel.Runner, v kernel.Variant, printed map[string]bool) error {
	text, err := run.Run(ctx, nil, v.Program[t.Family]+"-save", "-c")
	if err != nil {
		return fmt.Errorf("read %s rules: %w", t.Family, err)
	}
	source := sourceXTNFT
	if v.Name == "legacy" {
		source = sourceXTLegacy
	}
	if err := t.addSave(source, string(text), printed); err != nil {
		return fmt.Errorf("read %s rules: %w", t.Family, err)
	}
	return nil
}

// addSave adds the base chains of what iptables-save printed.
func (t *Tables) addSave(source, text string, printed map[string]bool) error {
	set, err := parseSave(source, t.Family, text)
	if err != nil {
		return err
	}
	for _, c := range set.chains {
		if !builtin[c.name] || c.policy == "" {
			continue
		}
		h := Hook(c.name)
		p, ok := priority(c.table, h)
		if !ok {
			continue
		}
		b := &Base{
			Source: source, Table: c.table, Chain: c.name, Type: "filter", Hook: h, Priority: p,
			Policy: c.policy, Policies: c.counter, Read: true, Rules: len(c.rules), set: set,
		}
		if c.table == "nat" {
			b.Type = "nat"
		}
		t.Bases = append(t.Bases, b)
		if source == sourceXTNFT && printed != nil {
			printed[nftFamily[t.Family]+" "+c.table+" "+c.name] = true
		}
	}
	return nil
}

// sort brings base chains in the kernel's order. Of those of one priority, the
// one that was registered first comes first, which nothing tells afterwards:
// iptables' come first, as the host's main firewall is likely to be there, then
// in order of name.
func (t *Tables) sort() {
	rank := map[string]int{sourceXTNFT: 0, sourceXTLegacy: 1, sourceNFT: 2}
	slices.SortStableFunc(t.Bases, func(a, b *Base) int {
		return cmp.Or(
			cmp.Compare(a.Hook, b.Hook), cmp.Compare(a.order(), b.order()), cmp.Compare(a.Priority, b.Priority),
			cmp.Compare(rank[a.Source], rank[b.Source]), cmp.Compare(a.Table, b.Table), cmp.Compare(a.Chain, b.Chain))
	})
}

// nftFamily is what nftables calls a family.
var nftFamily = [2]string{service.IPv4: "ip", service.IPv6: "ip6"}
