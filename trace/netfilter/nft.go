package netfilter

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/service"
)

// nftObject is one object that nft -j prints (libnftables-json(5)).
type nftObject struct {
	Chain *nftChain `json:"chain"`
	Rule  *nftRule  `json:"rule"`
	Set   *nftSet   `json:"set"`
	Map   *nftSet   `json:"map"`
}

type nftChain struct {
	Family string          `json:"family"`
	Table  string          `json:"table"`
	Name   string          `json:"name"`
	Type   string          `json:"type"`
	Hook   string          `json:"hook"` // empty: no base chain
	Prio   int             `json:"prio"`
	Policy string          `json:"policy"`
	Dev    json.RawMessage `json:"dev"` // a name, or several
}

type nftRule struct {
	Family string                       `json:"family"`
	Table  string                       `json:"table"`
	Chain  string                       `json:"chain"`
	Handle uint64                       `json:"handle"`
	Expr   []map[string]json.RawMessage `json:"expr"`
}

// nftSet is a set, or a map with the verdicts or values of its elements.
type nftSet struct {
	Family string          `json:"family"`
	Table  string          `json:"table"`
	Name   string          `json:"name"`
	Elem   json.RawMessage `json:"elem"`
}

// elements are the set's, or the map's pairs.
func (s *nftSet) elements() []any {
	list, _ := decodeNumbers(s.Elem).([]any)
	return list
}

func (c *nftChain) table() string { return c.Family + " " + c.Table }

// devices are those that an ingress or egress chain is for.
func (c *nftChain) devices() []string {
	var one string
	var several []string
	if json.Unmarshal(c.Dev, &one) == nil {
		return []string{one}
	}
	if json.Unmarshal(c.Dev, &several) == nil {
		return several
	}
	return nil
}

// nftHooks are the hooks by the words of nftables.
var nftHooks = map[string]Hook{
	"ingress": Ingress, "prerouting": Prerouting, "input": Input, "forward": Forward, "output": Output,
	"postrouting": Postrouting, "egress": Egress,
}

// readNFT adds the base chains of nftables that iptables hasn't printed. Printed
// are chains by "family table chain".
func (t *Tables) readNFT(ctx context.Context, run kernel.Runner, printed map[string]bool) error {
	chains, err := nftList(ctx, run, "chains")
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err != nil { // no such program, or a kernel without nftables
		return t.readNFTChains(printed, err)
	}
	var wanted []string
	for _, o := range chains {
		c := o.Chain
		if c == nil || c.Hook == "" || printed[c.table()+" "+c.Name] {
			continue
		}
		switch c.Family {
		case nftFamily[t.Family], "inet", "netdev":
			if !slices.Contains(wanted, c.table()) {
				wanted = append(wanted, c.table())
			}
		case "bridge":
			t.note("nftables chain %s %s is at hook %s of bridges, with policy %s: what it does to packets between ports of a bridge isn't followed", c.table(), c.Name, c.Hook, orAccept(c.Policy))
		}
	}
	for _, table := range wanted {
		if err := t.readNFTTable(ctx, run, table, printed); err != nil {
			return fmt.Errorf("read nftables: %w", err)
		}
	}
	return nil
}

func (t *Tables) note(format string, args ...any) {
	t.Notes = append(t.Notes, fmt.Sprintf(format, args...))
}

func orAccept(policy string) string {
	if policy == "" {
		return "accept"
	}
	return policy
}

func nftList(ctx context.Context, run kernel.Runner, what ...string) ([]nftObject, error) {
	text, err := run.Run(ctx, nil, "nft", append([]string{"-j", "list"}, what...)...)
	if err != nil {
		return nil, err
	}
	return parseNFT(text)
}

func parseNFT(text []byte) ([]nftObject, error) {
	var out struct {
		Objects []nftObject `json:"nftables"`
	}
	if err := json.Unmarshal(text, &out); err != nil {
		return nil, fmt.Errorf("parse what nft printed: %w", err)
	}
	return out.Objects, nil
}

// readNFTTable adds the base chains of one table, "inet filter". Its text comes
// from a second listing: JSON has none.
func (t *Tables) readNFTTable(ctx context.Context, run kernel.Runner, table string, printed map[string]bool) error {
	family, name, _ := strings.Cut(table, " ")
	objects, err := nftList(ctx, run, "table", family, name)
	if errors.Is(err, kernel.ErrNotFound) {
		return nil // it has gone meanwhile
	}
	if err != nil {
		return err
	}
	text, err := run.Run(ctx, nil, "nft", "-a", "list", "table", family, name)
	if err != nil {
		return err
	}
	t.addNFT(objects, string(text), printed)
	return nil
}

// ruleTexts are the lines of nft -a list by their handles. Only rules' lines
// matter; those of chains and sets have handles as well, which are counted
// apart from rules' but in the same table.
func ruleTexts(text string) map[uint64]string {
	out := map[uint64]string{}
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		rule, handle, ok := cutLast(line, " # handle ")
		if !ok || strings.HasSuffix(rule, "{") {
			continue
		}
		if n, err := strconv.ParseUint(handle, 10, 64); err == nil {
			out[n] = strings.TrimSpace(rule)
		}
	}
	return out
}

// chainDevices are the devices of the chains in a table's text:
//
//	chain in { # handle 1
//		type filter hook ingress devices = { "eth0", "eth1" } priority filter; policy accept;
func chainDevices(text string) map[string][]string {
	out := map[string][]string{}
	name := ""
	for line := range strings.Lines(text) {
		words := strings.Fields(line)
		switch {
		case len(words) > 2 && words[0] == "chain":
			name = words[1]
		case len(words) > 4 && words[0] == "type" && words[2] == "hook":
			rest, _, _ := strings.Cut(line, " priority ")
			if _, devices, ok := strings.Cut(rest, " device"); ok {
				out[name] = strings.FieldsFunc(strings.TrimPrefix(devices, "s"), func(r rune) bool { return strings.ContainsRune(` ={},"`, r) })
			}
		}
	}
	return out
}

func cutLast(s, sep string) (before, after string, ok bool) {
	i := strings.LastIndex(s, sep)
	if i < 0 {
		return s, "", false
	}
	return s[:i], s[i+len(sep):], true
}

// addNFT adds what nft printed of a table.
func (t *Tables) addNFT(objects []nftObject, text string, printed map[string]bool) {
	texts, devices := ruleTexts(text), chainDevices(text)
	set := &ruleset{source: sourceNFT, family: t.Family, chains: map[string]*chain{}, sets: map[string][]any{}}
	for _, o := range objects {
		switch {
		case o.Chain != nil:
			set.chains[o.Chain.table()+" "+o.Chain.Name] = &chain{table: o.Chain.table(), name: o.Chain.Name}
		case o.Set != nil:
			set.sets[o.Set.Name] = o.Set.elements()
		case o.Map != nil:
			set.sets[o.Map.Name] = o.Map.elements()
		}
	}
	for _, o := range objects {
		if o.Rule == nil {
			continue
		}
		if c := set.chain(o.Rule.Family+" "+o.Rule.Table, o.Rule.Chain); c != nil {
			r := parseNFTRule(o.Rule, set)
			if r.text = texts[o.Rule.Handle]; r.text == "" {
				r.text = fmt.Sprintf("rule with handle %d", o.Rule.Handle)
			}
			c.rules = append(c.rules, r)
		}
	}
	for _, o := range objects {
		c := o.Chain
		if c == nil || c.Hook == "" || printed[c.table()+" "+c.Name] {
			continue
		}
		h, known := nftHooks[c.Hook]
		if !known {
			t.note("nftables chain %s %s is at the hook %s, which isn't known to this program", c.table(), c.Name, c.Hook)
			continue
		}
		b := &Base{
			Source: sourceNFT, Table: c.table(), Chain: c.Name, Type: c.Type, Hook: h, Priority: c.Prio,
			Devices: c.devices(), Policy: Accept, Read: true, Rules: len(set.chain(c.table(), c.Name).rules), set: set,
		}
		if c.Policy == "drop" {
			b.Policy = Drop
		}
		if len(b.Devices) == 0 {
			b.Devices = devices[c.Name] // versions of nft before 1.0.7 have them in the text only
		}
		t.Bases = append(t.Bases, b)
	}
}

// ParseNFT adds to t what nft -j list table printed, with the text of rules that
// nft -a list table printed.
func (t *Tables) ParseNFT(list []byte, text string) error {
	objects, err := parseNFT(list)
	if err != nil {
		return err
	}
	t.addNFT(slices.DeleteFunc(objects, func(o nftObject) bool { return o.of() == otherFamily[t.Family] }), text, nil)
	t.sort()
	return nil
}

var otherFamily = [2]string{service.IPv4: "ip6", service.IPv6: "ip"}

// of is the family that an object belongs to.
func (o *nftObject) of() string {
	switch {
	case o.Chain != nil:
		return o.Chain.Family
	case o.Rule != nil:
		return o.Rule.Family
	}
	return ""
}
