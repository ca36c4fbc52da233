package netfilter

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"kproxy.dev/kproxy/service"
)

// Kinds of values.
const (
	kindAddress = "address"
	kindNumber  = "number"
	kindName    = "name"  // "tcp", "local", an interface
	kindNames   = "names" // any of which may hold at a time: flags
	kindTuple   = "tuple"
)

// value is what an expression of nftables gives for a packet.
type value struct {
	kind    string
	address netip.Addr
	number  uint64
	names   []string
	parts   []value
	// more says that there may be other flags than names.
	more bool
	// absent says that the packet doesn't have the field at all: the rule doesn't
	// match, whatever it compares with (NFT_BREAK).
	absent bool
}

func absent() (value, bool)                { return value{absent: true}, true }
func numeric(n uint64) (value, bool)       { return value{kind: kindNumber, number: n}, true }
func named(name string) (value, bool)      { return value{kind: kindName, names: []string{name}}, true }
func addressed(a netip.Addr) (value, bool) { return value{kind: kindAddress, address: a}, a.IsValid() }

// holds implements [part].
func (m nftMatch) holds(w *walker, p *Packet) held {
	have, ok := evaluate(w, p, m.left)
	if !ok {
		return maybe("%s can't be decided", leftText(m.left))
	}
	if have.absent {
		return held{answer: No, why: "it has no " + leftText(m.left)}
	}
	no := func(yes, known bool) held {
		if !known {
			return maybe("%s can't be compared", leftText(m.left))
		}
		return is(yes, false, "its %s is %s", leftText(m.left), have)
	}
	exact := m.op == "==" || m.op == "!="
	switch m.op {
	case "==", "in", "!=":
		answer := have.in(m.right, m.set)
		if exact && have.kind == kindNames {
			answer = have.exactly(m.right)
		}
		return no((answer == Yes) == (m.op != "!="), answer != Maybe)
	case "<", ">", "<=", ">=":
		want, ok := m.right.(json.Number)
		n, err := strconv.ParseUint(string(want), 10, 64)
		if !ok || err != nil || have.kind != kindNumber {
			return no(false, false)
		}
		return no(map[string]bool{"<": have.number < n, ">": have.number > n, "<=": have.number <= n, ">=": have.number >= n}[m.op], true)
	}
	return no(false, false)
}

// leftText names an expression as nft writes it.
func leftText(left any) string {
	m, _ := left.(map[string]any)
	for kind, detail := range m {
		switch d := detail.(type) {
		case map[string]any:
			words := []string{}
			for _, k := range []string{"dir", "protocol", "field", "key", "result"} {
				if s, ok := d[k].(string); ok {
					words = append(words, s)
				}
			}
			if kind == "payload" {
				return strings.Join(words, " ")
			}
			return kind + " " + strings.Join(words, " ")
		case []any:
			var parts []string
			for _, e := range d {
				parts = append(parts, leftText(e))
			}
			return strings.Join(parts, map[bool]string{true: " . ", false: " " + kind + " "}[kind == "concat"])
		}
	}
	return fmt.Sprint(left)
}

// evaluate gives an expression's value for a packet; false if it can't.
func evaluate(w *walker, p *Packet, expr any) (value, bool) {
	if n, ok := expr.(json.Number); ok {
		v, err := strconv.ParseUint(n.String(), 10, 64)
		return value{kind: kindNumber, number: v}, err == nil
	}
	m, _ := expr.(map[string]any)
	for kind, detail := range m {
		d, _ := detail.(map[string]any)
		list, _ := detail.([]any)
		key, _ := d["key"].(string)
		switch kind {
		case "payload":
			protocol, _ := d["protocol"].(string)
			field, _ := d["field"].(string)
			return payload(p, protocol, field)
		case "meta":
			return metaKey(w, p, key)
		case "ct":
			dir, _ := d["dir"].(string)
			return ctKey(w, p, key, dir)
		case "fib":
			return fib(w, p, d)
		case "concat":
			return tuple(w, p, list)
		case "&", "|", "^":
			return bitwise(w, p, kind, list)
		}
	}
	return value{}, false
}

func tuple(w *walker, p *Packet, list []any) (value, bool) {
	out := value{kind: kindTuple}
	for _, e := range list {
		v, ok := evaluate(w, p, e)
		if !ok {
			return v, false
		}
		out.absent = out.absent || v.absent
		out.parts = append(out.parts, v)
	}
	return out, true
}

func bitwise(w *walker, p *Packet, op string, list []any) (value, bool) {
	if len(list) != 2 {
		return value{}, false
	}
	a, ok := evaluate(w, p, list[0])
	if ok && a.absent {
		return a, true
	}
	if ok && a.kind == kindNames && op == "&" { // TCP flags
		var left []string
		for _, f := range a.names {
			if slices.ContainsFunc(flat(list[1]), func(e any) bool { return e == any(f) }) {
				left = append(left, f)
			}
		}
		return value{kind: kindNames, names: left}, true
	}
	b, ok2 := evaluate(w, p, list[1])
	if !ok || !ok2 || a.kind != kindNumber || b.kind != kindNumber {
		return value{}, false
	}
	return numeric(map[string]uint64{"&": a.number & b.number, "|": a.number | b.number, "^": a.number ^ b.number}[op])
}

// flat is a list, or the operands of "|", or one value alone.
func flat(v any) []any {
	if list, ok := v.([]any); ok {
		return list
	}
	if m, ok := v.(map[string]any); ok {
		if list, ok := m["|"].([]any); ok {
			var out []any
			for _, e := range list {
				out = append(out, flat(e)...)
			}
			return out
		}
	}
	return []any{v}
}

// payload is a field of a header.
func payload(p *Packet, protocol, field string) (value, bool) {
	switch protocol {
	case "ip", "ip6":
		if (protocol == "ip6") != (p.Family() == service.IPv6) {
			return absent()
		}
		switch field {
		case "saddr":
			return addressed(p.Src.Addr())
		case "daddr":
			return addressed(p.Dst.Addr())
		case "protocol", "nexthdr":
			return named(p.Protocol.String())
		}
	case "tcp", "udp", "sctp", "th":
		if protocol != "th" && protocol != p.Protocol.String() {
			return absent()
		}
		switch field {
		case "sport":
			return value{kind: kindNumber, number: uint64(p.Src.Port())}, p.Src.Port() > 0
		case "dport":
			return numeric(uint64(p.Dst.Port()))
		case "flags":
			flags, ok := p.flags()
			return value{kind: kindNames, names: flags}, ok
		}
	case "icmp", "icmpv6", "igmp", "esp", "ah", "dccp", "udplite", "arp", "comp":
		return absent()
	}
	return value{}, false
}

func metaKey(w *walker, p *Packet, key string) (value, bool) {
	switch key {
	case "iifname", "iif": // of a packet that comes in on none, the empty name (nft_meta_store_ifname)
		return value{kind: kindName, names: []string{p.In}}, p.In != AnyInterface
	case "oifname", "oif":
		return value{kind: kindName, names: []string{p.Out}}, p.Out != AnyInterface
	case "mark":
		return numeric(uint64(p.Mark))
	case "l4proto":
		return named(p.Protocol.String())
	case "nfproto":
		return named([2]string{service.IPv4: "ipv4", service.IPv6: "ipv6"}[p.Family()])
	case "protocol":
		return named(nftFamily[p.Family()])
	}
	return value{}, false
}

func ctKey(w *walker, p *Packet, key, dir string) (value, bool) {
	states := w.states(p)
	switch key {
	case "state":
		return named(strings.ToLower(states[0]))
	case "status":
		out := value{kind: kindNames, more: true}
		for _, s := range states[1:] {
			out.names = append(out.names, strings.ToLower(s))
		}
		return out, p.State == New
	case "mark":
		return numeric(uint64(p.ConnMark))
	case "direction":
		return value{kind: kindName, names: []string{p.direction()}}, true
	}
	at := p.OrigSrc
	switch {
	case dir != "original":
		return value{}, false
	case strings.HasSuffix(key, "daddr"), strings.HasSuffix(key, "proto-dst"):
		at = p.OrigDst
	}
	switch key {
	case "ip saddr", "ip daddr", "ip6 saddr", "ip6 daddr", "saddr", "daddr":
		return addressed(at.Addr())
	case "proto-src", "proto-dst":
		return value{kind: kindNumber, number: uint64(at.Port())}, at.Port() > 0
	}
	return value{}, false
}

// fib is a question about routes: the type of an address, or whether a packet
// back to the source would leave by the interface that it came in on.
func fib(w *walker, p *Packet, d map[string]any) (value, bool) {
	var flags []string
	for _, f := range flat(d["flags"]) {
		s, _ := f.(string)
		flags = append(flags, s)
	}
	has := func(f string) bool { return slices.Contains(flags, f) }
	switch d["result"] {
	case "type":
		a := p.Src.Addr()
		if has("daddr") {
			a = p.Dst.Addr()
		}
		if has("iif") || has("oif") || w.tables.host == nil || !a.IsValid() {
			return value{}, false
		}
		typ, err := w.tables.host.AddressType(a)
		if err != nil {
			return value{}, false
		}
		return named(strings.ToLower(typ))
	case "oif", "oifname":
		if has("saddr") && has("iif") && (p.Reversed == Yes || p.Reversed == No) {
			return value{kind: kindName, names: []string{strconv.FormatBool(p.Reversed == Yes)}}, true
		}
	}
	return value{}, false
}
