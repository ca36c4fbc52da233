package netfilter

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/kernel/netlink"
)

// lookup finds the packet in a set or a map.
func (d *nftDecoder) lookup(a attributes) instruction {
	name, at := netlink.Text(a[unix.NFTA_LOOKUP_SET]), offset(a.number(unix.NFTA_LOOKUP_SREG))
	set := d.set.nft.sets[name]
	if set == nil {
		d.say("@%s", name)
		return func(*walker, *nftState, position) effect { return may("the set %s isn't there", name) }
	}
	not := a.number(unix.NFTA_LOOKUP_FLAGS)&unix.NFT_LOOKUP_F_INV != 0
	key, parts := d.key(at, set.keyLen)
	maps, data := a.has(unix.NFTA_LOOKUP_DREG), offset(a.number(unix.NFTA_LOOKUP_DREG))
	shown := "@" + name
	if set.flags&unix.NFT_SET_ANONYMOUS != 0 {
		shown = d.set.nft.contents(set, parts)
	}
	switch {
	case set.verdicts && maps:
		d.ends, d.stops = true, true
		d.act("%s vmap %s", key, shown)
	case maps:
		d.hold(data, symbol{text: key + " map " + shown, size: 4, kind: map[uint32]kindOfField{typeMark: asMark}[set.dataType]})
	default:
		d.say("%s", strings.Join(strings.Fields(key+map[bool]string{true: " != "}[not]+" "+shown), " "))
	}
	return func(w *walker, s *nftState, where position) effect {
		v, k := s.get(at, set.keyLen)
		e, found, err := s.packet.stored(d.set.nft, set, v, k)
		looked := looked(parts, v)
		switch {
		case err != nil:
			return may("%v", err)
		case found == Maybe && set.verdicts && maps:
			return unknown(w, s, "its map, of which isn't known which element is for the packet,")
		case found == Maybe:
			return may("whether it is in set %s isn't known", name)
		case (found == Yes) == not:
			return breaks("%s set %s: %s", map[bool]string{true: "in", false: "not in"}[not], name, looked)
		case set.verdicts && maps:
			return e.verdict.apply(w, s, where)
		case maps:
			value, mask, _ := known(e.data...)
			s.set(data, value, mask)
		}
		if !not && set.flags&unix.NFT_SET_ANONYMOUS == 0 {
			return effect{matched: matched{answer: Yes, why: fmt.Sprintf("in set %s: %s", name, looked)}}
		}
		return goOn
	}
}

// looked writes what was looked up.
func looked(parts []symbol, v []byte) string {
	var out []string
	for _, f := range parts {
		n := min(len(v), max(f.size, 1))
		out = append(out, f.printLoaded(v[:n]))
		v = v[min(len(v), (n+3)&^3):]
	}
	return strings.Join(out, " . ")
}

// typeMark is nft's number of the type mark (enum datatypes in its include/datatype.h).
const typeMark = 19

// fieldTypes are the types of fields, by nft's numbers of them.
var fieldTypes = map[uint32]symbol{
	7: {size: 4, kind: asAddress}, 8: {size: 16, kind: asAddress}, 9: {size: 6, kind: asHardware},
	12: {size: 1, kind: asProtocol}, 13: {size: 2, kind: asNumber}, typeMark: {size: 4, kind: asMark}, 41: {size: unix.IFNAMSIZ, kind: asName},
}

// typed writes a key, or a map's data, by the number of its type: that of a concatenation has six bits for each field.
func typed(types uint32, v []byte) string {
	var parts []symbol
	for ; types != 0 || parts == nil; types >>= 6 {
		f, known := fieldTypes[types&0x3f]
		if !known {
			return "0x" + hex.EncodeToString(v)
		}
		parts = slices.Insert(parts, 0, f)
	}
	return looked(parts, v)
}

// contents writes the elements of a set without a name.
func (t *nftTable) contents(s *nftSet, parts []symbol) string {
	const shown = 16
	t.readElements(s)
	var out []string
	for i := range s.elements {
		if len(out) == shown {
			out = append(out, "...")
			break
		}
		out = append(out, s.text(&s.elements[i], func(key []byte) string { return looked(parts, key) }))
	}
	return "{ " + strings.Join(out, ", ") + " }"
}

// text writes an element, whose keys are written by key.
func (s *nftSet) text(e *nftElement, key func([]byte) string) string {
	text := key(e.key)
	switch {
	case e.all:
		text = "*"
	case !bytes.Equal(e.key, e.end):
		text += "-" + key(e.end)
	}
	if s.verdicts {
		text += " : " + e.verdict.String()
	} else if len(e.data) > 0 {
		text += " : " + typed(s.dataType, e.data)
	}
	return text
}

// storing is an element that a rule has added to a set, or deleted.
type storing struct {
	set, key, data string
	deleted        bool
}

// stored finds a key in a set, as it is when rules have changed it for this packet.
func (p *Packet) stored(t *nftTable, s *nftSet, key, known []byte) (nftElement, Answer, error) {
	if p.added.set == t.name+" "+s.name && p.added.key == string(key) && allKnown(known) {
		return nftElement{data: []byte(p.added.data)}, answerTo(!p.added.deleted), nil
	}
	return t.find(s, key, known)
}

// dynset adds to a set or a map, or renews what is there. What is added changes what this packet
// meets next.
func (d *nftDecoder) dynset(a attributes) instruction {
	const ops, opDelete, timeout, expressions = 3, 2, 6, 10 // NFTA_DYNSET_OP, NFT_DYNSET_OP_DELETE, NFTA_DYNSET_TIMEOUT, NFTA_DYNSET_EXPRESSIONS
	name, at := netlink.Text(a[unix.NFTA_DYNSET_SET_NAME]), offset(a.number(unix.NFTA_DYNSET_SREG_KEY))
	set := d.set.nft.sets[name]
	op := a.number(ops)
	word := [...]string{"add", "update", "delete"}[min(op, 2)]
	if set == nil {
		d.act("%s @%s", word, name)
		return nil
	}
	key, _ := d.key(at, set.keyLen)
	if ms := a.number(timeout); ms > 0 {
		key += " timeout " + lifetime(ms/1000)
	}
	value := ""
	if a.has(unix.NFTA_DYNSET_SREG_DATA) {
		value = " : " + d.held(offset(a.number(unix.NFTA_DYNSET_SREG_DATA))).String()
	}
	var nested [][]byte
	if a.has(unix.NFTA_DYNSET_EXPR) {
		nested = append(nested, a[unix.NFTA_DYNSET_EXPR])
	}
	for _, e := range netlink.Attributes(a[expressions]) {
		nested = append(nested, e)
	}
	var counts []func(*Packet) matched // of the element
	for _, e := range nested {
		x := attributesOf(e)
		text, holds := limited(netlink.Text(x[unix.NFTA_EXPR_NAME]), attributesOf(x[unix.NFTA_EXPR_DATA]))
		if holds != nil {
			key, counts = key+" "+text, append(counts, holds)
		}
	}
	d.act("%s @%s { %s%s }", word, name, key, value)
	return func(_ *walker, s *nftState, _ position) effect {
		v, k := s.get(at, set.keyLen)
		_, found, err := s.packet.stored(d.set.nft, set, v, k)
		for _, holds := range counts {
			if m := assumed(holds(&s.packet), !d.stops); m.answer != Yes || m.assumes != "" {
				return effect{matched: m}
			}
		}
		if err != nil || found == Maybe {
			return goOn
		}
		from := offset(a.number(unix.NFTA_DYNSET_SREG_DATA))
		data := s.value[from:min(from+4, len(s.value))]
		switch {
		case op == opDelete:
			s.packet.added = storing{set: d.set.nft.name + " " + name, key: string(v), deleted: true}
		case found == No:
			s.packet.added = storing{set: d.set.nft.name + " " + name, key: string(v), data: string(data)}
		}
		return goOn
	}
}
