package netfilter

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/nlmsg"
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
	Family string `json:"family"`
	Table  string `json:"table"`
	Name   string `json:"name"`
	Type   string `json:"type"`
	Hook   string `json:"hook"` // empty: no base chain
	Prio   int    `json:"prio"`
	Policy string `json:"policy"`
	Dev    any    `json:"dev"` // a name, or several
}

type nftRule struct {
	Family string           `json:"family"`
	Table  string           `json:"table"`
	Chain  string           `json:"chain"`
	Handle uint64           `json:"handle"`
	Expr   []map[string]any `json:"expr"`
}

// nftSet is a set with its elements, or a map with the verdicts or values of them.
type nftSet struct {
	Name string `json:"name"`
	Elem []any  `json:"elem"`
}

func (c *nftChain) table() string { return c.Family + " " + c.Table }

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
			policy := "accept"
			if c.Policy != "" {
				policy = c.Policy
			}
			t.note("nftables chain %s %s is at hook %s of bridges, with policy %s: what it does to packets between ports of a bridge isn't followed", c.table(), c.Name, c.Hook, policy)
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
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	if err := d.Decode(&out); err != nil {
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

// What the text of a table says that its JSON doesn't: how a rule is written, and, of versions
// of nft before 1.0.7, the devices of a chain:
//
//	chain in { # handle 1
//		type filter hook ingress devices = { "eth0", "eth1" } priority filter; policy accept;
var (
	ruleText    = regexp.MustCompile(`(?m)^\s*(.*[^{\s]) # handle (\d+)$`)
	deviceText  = regexp.MustCompile(`chain (\S+) \{.*\n\s*type \w+ hook \w+ devices? (.*) priority`)
	quotedNames = regexp.MustCompile(`[^ ={},"]+`)
)

// addNFT adds what nft printed of a table.
func (t *Tables) addNFT(objects []nftObject, text string, printed map[string]bool) {
	ruleTexts, devices := map[string]string{}, map[string][]string{}
	for _, m := range ruleText.FindAllStringSubmatch(text, -1) {
		ruleTexts[m[2]] = m[1]
	}
	for _, m := range deviceText.FindAllStringSubmatch(text, -1) {
		devices[m[1]] = quotedNames.FindAllString(m[2], -1)
	}
	set := &ruleset{source: sourceNFT, family: t.Family, chains: map[string]*chain{}, sets: map[string][]any{}}
	for _, o := range objects {
		switch {
		case o.Chain != nil:
			set.chains[o.Chain.table()+" "+o.Chain.Name] = &chain{table: o.Chain.table(), name: o.Chain.Name}
		case o.Set != nil:
			set.sets[o.Set.Name] = o.Set.Elem
		case o.Map != nil:
			set.sets[o.Map.Name] = o.Map.Elem
		}
	}
	for _, o := range objects {
		if o.Rule == nil {
			continue
		}
		if c := set.chain(o.Rule.Family+" "+o.Rule.Table, o.Rule.Chain); c != nil {
			r := &rule{text: ruleTexts[fmt.Sprint(o.Rule.Handle)]}
			if r.text == "" {
				r.text = fmt.Sprintf("rule with handle %d", o.Rule.Handle)
			}
			for _, e := range o.Rule.Expr {
				for key, value := range e {
					r.addStatement(key, value, set)
				}
			}
			c.rules = append(c.rules, r)
		}
	}
	for _, o := range objects {
		c := o.Chain
		if c == nil || c.Hook == "" || printed[c.table()+" "+c.Name] {
			continue
		}
		h := Hook(strings.ToUpper(c.Hook))
		if !slices.Contains(append(nfHooks, Egress), h) {
			t.note("nftables chain %s %s is at the hook %s, which isn't known to this program", c.table(), c.Name, c.Hook)
			continue
		}
		b := &Base{
			Source: sourceNFT, Table: c.table(), Chain: c.Name, Type: c.Type, Hook: h, Priority: c.Prio,
			Devices: devices[c.Name], Policy: Accept, Read: true, Rules: len(set.chain(c.table(), c.Name).rules), set: set,
		}
		if c.Policy == "drop" {
			b.Policy = Drop
		}
		if c.Dev != nil {
			b.Devices = texts(c.Dev)
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
	other := otherFamily[t.Family]
	t.addNFT(slices.DeleteFunc(objects, func(o nftObject) bool {
		return o.Chain != nil && o.Chain.Family == other || o.Rule != nil && o.Rule.Family == other
	}), text, nil)
	t.sort()
	return nil
}

var otherFamily = [2]string{service.IPv4: "ip6", service.IPv6: "ip"}

// nftPassive are statements that change nothing a walk looks at. Adding to a set
// changes what later packets meet.
var nftPassive = []string{"log", "flow", "set", "ct helper", "ct timeout", "ct expectation", "continue", "dup", "secmark", "map"}

// nftDepends says what statements that may end a rule look at.
var nftDepends = map[string]string{
	"limit": "it depends on the rate of packets (limit)", "quota": "it depends on how much has passed (quota)",
	"ct count": "it depends on how many connections there are (ct count)", "meter": "it depends on the rate of packets (meter)",
	"xt": "it has a match of iptables that nft can't print",
}

// addStatement adds a match or a statement. A match that follows on something
// that was changed would have to be asked later than the others; none is known
// to need it, and the rule is undecided.
func (r *rule) addStatement(key string, detail any, set *ruleset) {
	d, _ := detail.(map[string]any)
	undecided := func(why string) condition { return func(*walker, *Packet) matched { return maybe("%s", why) } }
	switch {
	case key == "match" && len(r.actions) > 0:
		r.conditions = append(r.conditions, undecided("it looks at a packet that it has changed before"))
	case key == "match":
		r.conditions = append(r.conditions, compare(d["left"], fmt.Sprint(d["op"]), d["right"], set))
	case key == "counter":
		r.counter, _ = parseCounter(fmt.Sprint(d["packets"], ":", d["bytes"]))
	case slices.Contains(nftPassive, key):
	case nftDepends[key] != "":
		r.conditions = append(r.conditions, undecided(nftDepends[key]))
	default:
		r.actions = append(r.actions, nftAction(key, detail, set))
	}
}

// nftAction is a statement that changes the packet or decides.
func nftAction(key string, detail any, set *ruleset) action {
	d, _ := detail.(map[string]any)
	target, _ := d["target"].(string)
	out := action{text: key, what: "the statement " + key}
	switch key {
	case "accept", "drop", "reject", "return":
		out.verdict = Verdict(key)
	case "jump":
		out.text, out.chain = "jump to "+target, target
	case "goto":
		out.text, out.chain, out.leave = "go to "+target, target, true
	case "notrack":
		out.change = modify(untrack)
	case "vmap":
		out.text, out.change = "verdict by map", verdictMap(d["key"], d["data"], set)
	case "mangle":
		out.text, out.change = "set a mark", mangle(fieldName(d["key"]), d["value"])
	case "dnat", "snat", "redirect", "masquerade":
		out.change = translate(key, func() (addressRange, bool) { return nftRange(detail) })
	}
	return out
}

// nftRange is what nat statements lead to; false for what a map decides.
func nftRange(detail any) (addressRange, bool) {
	m, ok := detail.(map[string]any)
	if !ok {
		return addressRange{}, detail == nil // masquerade, redirect: null
	}
	one := func(v any) (string, bool) { // or a range
		switch v := v.(type) {
		case nil:
			return "", true
		case string, json.Number:
			return fmt.Sprint(v), true
		case map[string]any:
			ends, ok := v["range"].([]any)
			return fmt.Sprint(append(ends, "", "")[0], "-", append(ends, "", "")[1]), ok && len(ends) == 2
		}
		return "", false
	}
	text, ok := one(m["addr"])
	port, ok2 := one(m["port"])
	if strings.Contains(text, ":") {
		text = "[" + text + "]"
	}
	if port != "" {
		text += ":" + port
	}
	to, ok3 := parseRange(text)
	return to, ok && ok2 && ok3
}

// mangle sets a mark; it can't be told what it does where it sets something else, or by
// something that isn't known.
func mangle(field string, to any) func(*walker, way, position) (result, bool) {
	return func(w *walker, x way, _ position) (result, bool) {
		v := w.evaluate(&x.packet, to)
		switch field {
		case "meta priority", "meta nftrace", "ip dscp", "ip6 dscp":
			return stays(x), true
		case "meta mark":
			x.packet.Mark = uint32(v.number)
		case "ct mark":
			x.packet.ConnMark = uint32(v.number)
		default:
			return result{}, false
		}
		return stays(x), v.kind == isNumber
	}
}

// verdictMap looks the packet up in a map of verdicts.
func verdictMap(key, data any, set *ruleset) func(*walker, way, position) (result, bool) {
	elements, known := elementsOf(data, set)
	isAll := func(e any) int { // the element "*" is for what no other is for
		if pair, _ := e.([]any); len(pair) == 2 && pair[0] == any("*") {
			return 1
		}
		return 0
	}
	elements = slices.SortedStableFunc(slices.Values(elements), func(a, b any) int { return isAll(a) - isAll(b) })
	return func(w *walker, x way, at position) (result, bool) {
		have := w.evaluate(&x.packet, key)
		if have.kind == isAbsent {
			return stays(x), true // the rule doesn't match a packet without the field
		}
		out, known := result{}, known
		for _, e := range elements {
			pair, _ := e.([]any)
			if len(pair) != 2 {
				known = false
				continue
			}
			answer := Maybe
			if have.kind != isUnknown {
				answer = have.in(pair[0], set)
			}
			if answer == No {
				continue
			}
			hit := x
			if answer != Yes {
				hit.doubt(at.step)
				x.doubt(at.step)
			}
			verdict, _ := pair[1].(map[string]any)
			for key, detail := range verdict {
				a := nftAction(key, detail, set)
				r := a.apply(w, at, []way{hit})
				out.add(r)
				out.stay = append(out.stay, r.stay...)
			}
			if answer == Yes {
				return out, true
			}
		}
		if !known {
			out.ended = append(out.ended, w.giveUp([]way{x}, "its map can't be read")...)
			return out, true
		}
		out.stay = append(out.stay, x)
		return out, true
	}
}

// nftFamilies are those whose chains packets of both families may meet.
var nftFamilies = map[uint8]string{unix.NFPROTO_INET: "inet", unix.NFPROTO_IPV4: "ip", unix.NFPROTO_IPV6: "ip6", unix.NFPROTO_NETDEV: "netdev"}

// readNFTChains is for hosts where the program nft doesn't work, with why: it asks the kernel which
// base chains there are. Their rules aren't read; a table without any is known
// to do what its policies say.
func (t *Tables) readNFTChains(printed map[string]bool, why error) error {
	full := map[string]bool{} // tables with rules
	if err := dumpNFT(unix.NFT_MSG_GETRULE, func(family string, rule []byte) {
		for typ, v := range nlmsg.Attributes(rule) {
			if typ == unix.NFTA_RULE_TABLE {
				full[family+" "+nlmsg.Text(v)] = true
			}
		}
	}); err != nil {
		return fmt.Errorf("list rules of nftables: %w", err)
	}
	err := dumpNFT(unix.NFT_MSG_GETCHAIN, func(family string, attributes []byte) {
		b := decodeChain(family, attributes)
		if b.Hook == "" || printed[b.Table+" "+b.Chain] || family == otherFamily[t.Family] {
			return
		}
		b.Why = fmt.Sprintf("table %s, chain %s, policy %s, has rules that can't be read: %v", b.Table, b.Chain, b.Policy, why)
		if !full[b.Table] {
			b.Read = true
			b.set = &ruleset{source: sourceNFT, family: t.Family, chains: map[string]*chain{b.Table + " " + b.Chain: {table: b.Table, name: b.Chain}}}
		}
		t.Bases = append(t.Bases, b)
	})
	if err != nil {
		return fmt.Errorf("list chains of nftables: %w", err)
	}
	return nil
}

// dumpNFT lists all objects of a kind, of known families.
func dumpNFT(message uint16, each func(family string, attributes []byte)) error {
	return nlmsg.DumpNFTables(message, func(number uint8, attributes []byte) {
		if family, known := nftFamilies[number]; known {
			each(family, attributes)
		}
	})
}

// nfHooks are hooks by number (enum nf_inet_hooks; that of netdev is
// NF_NETDEV_INGRESS, then NF_NETDEV_EGRESS).
var nfHooks = []Hook{Prerouting, Input, Forward, Output, Postrouting, Ingress}

// decodeChain reads a chain; one that isn't a base chain has no hook.
func decodeChain(family string, attributes []byte) *Base {
	b := &Base{Source: sourceNFT, Policy: Accept, Type: "filter"}
	number := func(v []byte) int {
		if len(v) != 4 {
			return -1
		}
		return int(int32(binary.BigEndian.Uint32(v)))
	}
	for typ, v := range nlmsg.Attributes(attributes) {
		switch typ {
		case unix.NFTA_CHAIN_TABLE:
			b.Table = family + " " + nlmsg.Text(v)
		case unix.NFTA_CHAIN_NAME:
			b.Chain = nlmsg.Text(v)
		case unix.NFTA_CHAIN_TYPE:
			b.Type = nlmsg.Text(v)
		case unix.NFTA_CHAIN_POLICY:
			if number(v) == 0 { // NF_DROP
				b.Policy = Drop
			}
		case unix.NFTA_CHAIN_HOOK:
			for typ, v := range nlmsg.Attributes(v) {
				hooks := nfHooks
				if family == "netdev" {
					hooks = []Hook{Ingress, Egress}
				}
				switch n := number(v); {
				case typ == unix.NFTA_HOOK_HOOKNUM && n >= 0 && n < len(hooks):
					b.Hook = hooks[n]
				case typ == unix.NFTA_HOOK_PRIORITY:
					b.Priority = n
				case typ == unix.NFTA_HOOK_DEV:
					b.Devices = append(b.Devices, nlmsg.Text(v))
				case typ == hookDevices:
					for _, name := range nlmsg.Attributes(v) {
						b.Devices = append(b.Devices, nlmsg.Text(name))
					}
				}
			}
		}
	}
	return b
}

// hookDevices is NFTA_HOOK_DEVS.
const hookDevices = 4
