package netfilter

import (
	"errors"
	"fmt"
	"strings"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/service"
)

// set reads a set, once.
func (t *Tables) set(name string) (kernel.AnySet, error) {
	if r, ok := t.read[name]; ok {
		return r.set, r.err
	}
	if t.sets == nil {
		return kernel.AnySet{}, errors.New("sets can't be read")
	}
	s, err := t.sets.ReadAny(name)
	if t.read == nil {
		t.read = map[string]setRead{}
	}
	t.read[name] = setRead{s, err}
	return s, err
}

// inSet is the match set. Its other options compare counters of the entry, or
// update them.
func inSet(w *walker, p *Packet, m *extension) matched {
	o, ok := m.find("--match-set")
	if !ok {
		return maybe("the match set can't be read")
	}
	exceptions := m.has("--return-nomatch")
	for _, other := range m.options {
		switch other.name {
		case "--match-set", "--update-counters", "--update-subcounters", "--return-nomatch":
		default:
			return maybe("the counters of sets aren't known (%s)", other.name)
		}
	}
	s, err := w.tables.set(o.arg(0))
	if err != nil {
		return maybe("%v", err)
	}
	dirs := strings.Split(o.arg(1), ",")
	e, found := w.lookup(&s, dirs, p)
	switch {
	case found.answer == Maybe:
		return found
	case found.answer == Yes && e.NoMatch == exceptions:
		found.why = fmt.Sprintf("in set %s: %s", s.Name, entryText(&s, &e))
	default:
		var looked []string
		for _, v := range w.element(&s, dirs, p) {
			looked = append(looked, v.text)
		}
		found = matched{answer: No, why: fmt.Sprintf("not in set %s: %s", s.Name, strings.Join(looked, ","))}
	}
	return found.invert(o.not)
}

// part holds what a packet is looked up by in one of a set's dimensions.
type part struct {
	value
	kind string // as in the set's type
	text string
}

// setFields are the fields of a packet by the dimensions of sets, source first. The hardware
// address isn't known.
var setFields = map[string][2]string{
	"ip": {"saddr", "daddr"}, "net": {"saddr", "daddr"}, "port": {"sport", "dport"},
	"mark": {"meta mark", "meta mark"}, "iface": {"meta iifname", "meta oifname"},
}

// element returns what a packet is looked up by, dimension by dimension.
func (w *walker) element(s *kernel.AnySet, dirs []string, p *Packet) []part {
	var out []part
	_, dimensions, _ := strings.Cut(s.Type, ":")
	for kind := range strings.SplitSeq(dimensions, ",") {
		if len(out) == len(dirs) {
			break
		}
		side := 1
		if dirs[len(out)] == "src" {
			side = 0
		}
		v := w.field(p, setFields[kind][side])
		text := v.String()
		switch {
		case kind == "port" && dimensions != "port":
			text = p.Protocol.String() + ":" + text
		case kind == "mark":
			text = fmt.Sprintf("%#x", p.Mark)
		case v.kind == isUnknown:
			text = kind
		}
		out = append(out, part{v, kind, text})
	}
	return out
}

// lookup finds the entry that a packet is in. The kernel tries the longest
// networks first (mtype_test_cidrs in ip_set_hash_gen.h).
func (w *walker) lookup(s *kernel.AnySet, dirs []string, p *Packet) (kernel.AnyEntry, matched) {
	if s.Masked {
		return kernel.AnyEntry{}, maybe("the bitmask of set %s can't be read", s.Name)
	}
	kind, dimensions, _ := strings.Cut(s.Type, ":")
	if kind == "list" {
		return w.lookupList(s, dirs, p)
	}
	parts := w.element(s, dirs, p)
	// A set of addresses has a family; packets of the other are in none.
	if len(parts) <= strings.Count(dimensions, ",") || (parts[0].kind == "ip" || parts[0].kind == "net") && s.Family != p.Family() {
		return kernel.AnyEntry{}, matched{answer: No}
	}
	var best *kernel.AnyEntry
	unknown := matched{answer: No}
	for i := range s.Entries {
		e := &s.Entries[i]
		m := covers(s, e, parts, p.Protocol)
		switch {
		case m.answer == Maybe && unknown.answer != Maybe:
			unknown = m
		case m.answer == Yes && (best == nil || e.Net.Bits()+e.Net2.Bits() > best.Net.Bits()+best.Net2.Bits()):
			best = e
		}
	}
	if best == nil {
		return kernel.AnyEntry{}, unknown
	}
	return *best, matched{answer: Yes}
}

// lookupList asks the sets of a list, in order. The kernel lets none of them be a list.
func (w *walker) lookupList(s *kernel.AnySet, dirs []string, p *Packet) (kernel.AnyEntry, matched) {
	out := matched{answer: No}
	for _, e := range s.Entries {
		member, err := w.tables.set(e.Member)
		if err != nil {
			return kernel.AnyEntry{}, maybe("%v", err)
		}
		found, m := w.lookup(&member, dirs, p)
		if m.answer == Yes && !found.NoMatch {
			e.Remaining = found.Remaining
			return e, m
		}
		if m.answer == Maybe {
			out = m
		}
	}
	return kernel.AnyEntry{}, out
}

// covers compares an entry with a packet, dimension by dimension.
func covers(s *kernel.AnySet, e *kernel.AnyEntry, parts []part, proto service.Protocol) matched {
	net, out := e.Net, matched{answer: Yes}
	for i, v := range parts {
		unknown, yes := v.value.kind == isUnknown, true
		switch v.kind {
		case "ip", "net":
			if yes = unknown || net.Contains(v.address); i == 0 && e.Last.IsValid() && !unknown {
				yes = net.Addr().Compare(v.address) <= 0 && v.address.Compare(e.Last) <= 0
			}
			net = e.Net2
		case "port":
			yes = (e.Protocol == 0 || service.Protocol(e.Protocol) == proto) && (unknown || uint64(e.Port) == v.number)
		case "mark":
			yes = e.Mark == uint32(v.number)&s.MarkMask
		case "iface":
			yes = unknown || e.Interface == v.words[0]
			unknown = unknown || e.Physical
		}
		if !yes {
			return matched{answer: No}
		}
		if unknown {
			out = maybe("the packet's %s isn't known", map[string]string{"ip": "address", "net": "address", "port": "source port", "iface": "interface", "mac": "hardware address"}[v.kind])
		}
	}
	return out
}

// entryText prints an entry as ipset does, with its lifetime.
func entryText(s *kernel.AnySet, e *kernel.AnyEntry) string {
	out := e.Text(kernel.SetType(s.Type))
	if e.NoMatch {
		out += " nomatch"
	}
	if s.Timed && e.Remaining > 0 {
		out += fmt.Sprintf(", expires in %d s", e.Remaining)
	}
	return out
}
