package netfilter

import (
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
		return kernel.AnySet{}, fmt.Errorf("sets can't be read")
	}
	s, err := t.sets.ReadAny(name)
	if t.read == nil {
		t.read = map[string]setRead{}
	}
	t.read[name] = setRead{s, err}
	return s, err
}

// maxNested bounds sets of sets, which the kernel lets be one deep.
const maxNested = 4

// inSet is the match set. Its other options compare counters of the entry, or
// update them.
func inSet(w *walker, p *Packet, m *module) held {
	o, ok := find(m.options, "--match-set")
	if !ok {
		return maybe("the match set can't be read")
	}
	exceptions := false // --return-nomatch
	for _, other := range m.options {
		switch other.name {
		case "--match-set", "--update-counters", "--update-subcounters":
		case "--return-nomatch":
			exceptions = true
		default:
			return maybe("the counters of sets aren't known (%s)", other.name)
		}
	}
	s, err := w.tables.set(o.arg(0))
	if err != nil {
		return maybe("%v", err)
	}
	dirs := strings.Split(o.arg(1), ",")
	e, h := w.lookup(&s, dirs, p, 0)
	switch {
	case h.answer == Maybe:
		return h
	case h.answer == Yes && e.NoMatch == exceptions:
		h.why = fmt.Sprintf("in set %s: %s", s.Name, describeEntry(&s, &e))
	default:
		h = held{answer: No, why: fmt.Sprintf("not in set %s: %s", s.Name, element(dirs, &s, p))}
	}
	return h.invert(o.not)
}

// lookup finds the entry that a packet is in. The kernel tries the longest
// networks first (mtype_test_cidrs in ip_set_hash_gen.h).
func (w *walker) lookup(s *kernel.AnySet, dirs []string, p *Packet, depth int) (kernel.AnyEntry, held) {
	if s.Masked {
		return kernel.AnyEntry{}, maybe("the bitmask of set %s can't be read", s.Name)
	}
	kind, fields, _ := strings.Cut(s.Type, ":")
	if kind == "list" {
		return w.lookupList(s, dirs, p, depth)
	}
	var names []string
	for f := range strings.SplitSeq(fields, ",") {
		names = append(names, f)
	}
	if len(dirs) < len(names) {
		return kernel.AnyEntry{}, held{answer: No}
	}
	// A set of addresses has a family; packets of the other are in none.
	if (names[0] == "ip" || names[0] == "net") && s.Family != p.Family() {
		return kernel.AnyEntry{}, held{answer: No}
	}
	var best *kernel.AnyEntry
	unknown := held{answer: No}
	for i := range s.Entries {
		e := &s.Entries[i]
		h := covers(s, e, names, dirs, p)
		switch {
		case h.answer == Maybe && unknown.answer != Maybe:
			unknown = h
		case h.answer == Yes && (best == nil || e.Net.Bits()+e.Net2.Bits() > best.Net.Bits()+best.Net2.Bits()):
			best = e
		}
	}
	if best == nil {
		return kernel.AnyEntry{}, unknown
	}
	return *best, held{answer: Yes}
}

// lookupList asks the sets of a list, in order.
func (w *walker) lookupList(s *kernel.AnySet, dirs []string, p *Packet, depth int) (kernel.AnyEntry, held) {
	if depth == maxNested {
		return kernel.AnyEntry{}, maybe("set %s leads to itself", s.Name)
	}
	out := held{answer: No}
	for _, e := range s.Entries {
		member, err := w.tables.set(e.Member)
		if err != nil {
			return kernel.AnyEntry{}, maybe("%v", err)
		}
		found, h := w.lookup(&member, dirs, p, depth+1)
		if h.answer == Yes && !found.NoMatch {
			e.Remaining = found.Remaining
			return e, h
		}
		if h.answer == Maybe {
			out = h
		}
	}
	return kernel.AnyEntry{}, out
}

// covers compares an entry with a packet, field by field; each has its
// direction.
func covers(s *kernel.AnySet, e *kernel.AnyEntry, names, dirs []string, p *Packet) held {
	first, unknown := true, held{answer: Yes}
	for i, name := range names {
		src := dirs[i] == "src"
		at := p.Dst
		if src {
			at = p.Src
		}
		yes := true
		switch name {
		case "ip", "net":
			n := e.Net2
			if first {
				n = e.Net
			}
			if !at.Addr().IsValid() {
				unknown = maybe("an address of the packet isn't known")
				break
			}
			yes = n.Contains(at.Addr())
			if first && e.Last.IsValid() {
				yes = n.Addr().Compare(at.Addr()) <= 0 && at.Addr().Compare(e.Last) <= 0
			}
			first = false
		case "port":
			yes = (e.Protocol == 0 || service.Protocol(e.Protocol) == p.Protocol) && (at.Port() == 0 || e.Port == at.Port())
			if at.Port() == 0 && yes {
				unknown = maybe("the source port isn't known")
			}
		case "mark":
			yes = e.Mark == p.Mark&s.MarkMask
		case "iface":
			have := p.Out
			if src {
				have = p.In
			}
			if yes = have == e.Interface || have == AnyInterface; yes && (e.Physical || have == AnyInterface) {
				unknown = maybe("the interface isn't known")
			}
		default: // mac
			unknown = maybe("the hardware address isn't known")
		}
		if !yes {
			return held{answer: No}
		}
	}
	return unknown
}

// describeEntry prints an entry as ipset does, with its lifetime.
func describeEntry(s *kernel.AnySet, e *kernel.AnyEntry) string {
	out := e.Text(s.Type)
	if e.NoMatch {
		out += " nomatch"
	}
	if s.Timed && e.Remaining > 0 {
		out += fmt.Sprintf(", for %d s yet", e.Remaining)
	}
	return out
}

// element prints what was looked for.
func element(dirs []string, s *kernel.AnySet, p *Packet) string {
	var out []string
	_, fields, _ := strings.Cut(s.Type, ":")
	for i, name := range strings.Split(fields, ",") {
		if i >= len(dirs) {
			break
		}
		at := p.Dst
		if dirs[i] == "src" {
			at = p.Src
		}
		switch {
		case name == "port" && fields == "port":
			out = append(out, fmt.Sprint(at.Port()))
		case name == "port":
			out = append(out, fmt.Sprintf("%s:%d", p.Protocol, at.Port()))
		case name == "mark":
			out = append(out, fmt.Sprintf("%#x", p.Mark))
		case name == "ip" || name == "net":
			out = append(out, at.Addr().String())
		default:
			out = append(out, name)
		}
	}
	return strings.Join(out, ",")
}
