package netfilter

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"iter"
	"maps"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/kernel/netlink"
	"kproxy.dev/kproxy/service"
)

// nftFamilies are those whose chains packets of both families may meet.
var nftFamilies = map[uint8]string{unix.NFPROTO_INET: "inet", unix.NFPROTO_IPV4: "ip", unix.NFPROTO_IPV6: "ip6", unix.NFPROTO_NETDEV: "netdev", unix.NFPROTO_BRIDGE: "bridge"}

var otherFamily = [2]string{service.IPv4: "ip6", service.IPv6: "ip"}

// nftTable is a table of nftables, of which rules look at sets.
type nftTable struct {
	family uint8
	name   string
	sets   map[string]*nftSet
}

// readNFT adds the base chains of nftables that iptables hasn't printed, from the kernel
// itself. Printed are chains by "family table chain".
func (t *Tables) readNFT(printed map[string]bool) error {
	dormant, err := dormantTables()
	if err != nil {
		return fmt.Errorf("list tables of nftables: %w", err)
	}
	sets := map[string]*ruleset{} // by table
	var found []*Base
	listed := map[string]int{} // chains by "family table chain": the kernel lists the ones made first first
	err = netlink.DumpNFTables(unix.NFT_MSG_GETCHAIN, unix.NFPROTO_UNSPEC, nil, func(number uint8, attributes []byte) {
		family, known := nftFamilies[number]
		if !known || family == otherFamily[t.Family] {
			return
		}
		b := decodeChain(family, attributes)
		if dormant[b.Table] {
			b.Hook = ""
		} else if b.Hook != "" {
			listed[b.Table+" "+b.Chain] = len(listed) + 1
		}
		if strings.HasPrefix(b.Table, family+" "+watchTable) {
			return
		}
		if sets[b.Table] == nil {
			sets[b.Table] = &ruleset{source: sourceNFT, family: t.Family, chains: map[string]*chain{}, nft: &nftTable{family: number, name: strings.TrimPrefix(b.Table, family+" ")}}
		}
		b.set = sets[b.Table]
		b.set.chains[b.Table+" "+b.Chain] = &chain{table: b.Table, name: b.Chain}
		if b.Hook != "" && !printed[b.Table+" "+b.Chain] {
			found = append(found, b)
		}
	})
	if err != nil {
		return fmt.Errorf("list chains of nftables: %w", err)
	}
	t.Bases = slices.DeleteFunc(t.Bases, func(b *Base) bool {
		if b.Source != sourceXTNFT {
			return false
		}
		table := nftFamily[t.Family] + " " + b.Table
		b.made = listed[table+" "+b.Chain]
		return dormant[table]
	})
	for _, b := range found {
		b.made = listed[b.Table+" "+b.Chain]
		if b.set.nft.sets == nil {
			if err := b.set.readNFT(b.Table); err != nil {
				return fmt.Errorf("read nftables table %s: %w", b.Table, err)
			}
		}
		b.Rules = len(b.set.chain(b.Table, b.Chain).rules)
		t.Bases = append(t.Bases, b)
	}
	return nil
}

// dormantTables lists those whose chains the kernel doesn't call, as "family table".
func dormantTables() (map[string]bool, error) {
	out := map[string]bool{}
	err := netlink.DumpNFTables(unix.NFT_MSG_GETTABLE, unix.NFPROTO_UNSPEC, nil, func(family uint8, b []byte) {
		if a := attributesOf(b); a.number(unix.NFTA_TABLE_FLAGS)&tableIsDormant != 0 {
			out[nftFamilies[family]+" "+netlink.Text(a[unix.NFTA_TABLE_NAME])] = true
		}
	})
	return out, err
}

// readNFT reads the sets of a table, without elements, and its rules.
func (r *ruleset) readNFT(table string) error {
	r.nft.sets = map[string]*nftSet{}
	err := r.nft.dump(unix.NFT_MSG_GETSET, unix.NFTA_SET_TABLE, func(a attributes) {
		s := decodeSet(a)
		r.nft.sets[s.name] = s
	})
	if err != nil {
		return err
	}
	return r.nft.dump(unix.NFT_MSG_GETRULE, unix.NFTA_RULE_TABLE, func(a attributes) {
		if c := r.chain(table, netlink.Text(a[unix.NFTA_RULE_CHAIN])); c != nil {
			c.rules = append(c.rules, decodeRule(r, a))
		}
	})
}

// dump lists objects of the table; tableAttribute holds its name, in the request and in the answer.
func (t *nftTable) dump(message, tableAttribute uint16, each func(attributes)) error {
	err := netlink.DumpNFTables(message, t.family, func(b []byte) []byte { return netlink.AppendText(b, tableAttribute, t.name) }, func(_ uint8, b []byte) {
		if a := attributesOf(b); netlink.Text(a[tableAttribute]) == t.name { // kernels that don't filter list all
			each(a)
		}
	})
	if errors.Is(err, unix.ENOENT) {
		return nil // it has gone meanwhile
	}
	return err
}

// attributes holds the attributes of a netlink message, or of one of its attributes, by type.
type attributes map[uint16][]byte

func attributesOf(b []byte) attributes {
	return maps.Collect(netlink.Attributes(b))
}

// number is one in network byte order; 0 if there is none.
func (a attributes) number(typ uint16) (n uint64) {
	if len(a[typ]) <= 8 {
		for _, b := range a[typ] {
			n = n<<8 | uint64(b)
		}
	}
	return n
}

func (a attributes) has(typ uint16) bool { _, ok := a[typ]; return ok }

// data returns what NFTA_DATA_VALUE says in an attribute.
func (a attributes) data(typ uint16) []byte { return attributesOf(a[typ])[unix.NFTA_DATA_VALUE] }

// verdict reads what NFTA_DATA_VERDICT says in an attribute.
func (a attributes) verdict(typ uint16) nftVerdict {
	v := attributesOf(attributesOf(a[typ])[unix.NFTA_DATA_VERDICT])
	return nftVerdict{int32(v.number(unix.NFTA_VERDICT_CODE)), netlink.Text(v[unix.NFTA_VERDICT_CHAIN])}
}

// nfHooks are hooks by number (enum nf_inet_hooks; that of netdev is
// NF_NETDEV_INGRESS, then NF_NETDEV_EGRESS).
var nfHooks = []Hook{Prerouting, Input, Forward, Output, Postrouting, Ingress}

// decodeChain reads a chain; one that isn't a base chain has no hook.
func decodeChain(family string, message []byte) *Base {
	a := attributesOf(message)
	b := &Base{
		Source: sourceNFT, Table: family + " " + netlink.Text(a[unix.NFTA_CHAIN_TABLE]), Chain: netlink.Text(a[unix.NFTA_CHAIN_NAME]),
		Policy: Accept, Type: cmp.Or(netlink.Text(a[unix.NFTA_CHAIN_TYPE]), "filter"),
	}
	if a.has(unix.NFTA_CHAIN_POLICY) && a.number(unix.NFTA_CHAIN_POLICY) == 0 { // NF_DROP
		b.Policy = Drop
	}
	hooks, h := nfHooks, attributesOf(a[unix.NFTA_CHAIN_HOOK])
	if family == "netdev" {
		hooks = []Hook{Ingress, Egress}
	}
	if n := h.number(unix.NFTA_HOOK_HOOKNUM); h.has(unix.NFTA_HOOK_HOOKNUM) && n < uint64(len(hooks)) {
		b.Hook = hooks[n]
	}
	b.Priority = int(int32(h.number(unix.NFTA_HOOK_PRIORITY)))
	if h.has(unix.NFTA_HOOK_DEV) {
		b.Devices = append(b.Devices, netlink.Text(h[unix.NFTA_HOOK_DEV]))
	}
	for kind, name := range netlink.Attributes(h[hookDevices]) {
		device := netlink.Text(name)
		if kind == devicePrefix {
			device += "*"
		}
		b.Devices = append(b.Devices, device)
	}
	return b
}

// What x/sys/unix doesn't have of linux/netfilter/nf_tables.h.
const (
	tableIsDormant    = 1 // NFT_TABLE_F_DORMANT
	hookDevices       = 4 // NFTA_HOOK_DEVS
	devicePrefix      = 2 // NFTA_DEVICE_PREFIX
	elementIsEnd      = 1 // NFT_SET_ELEM_INTERVAL_END
	elementIsCatchall = 2 // NFT_SET_ELEM_CATCHALL
)

// nftSet is a set or a map. Its elements are read when a rule asks for them.
type nftSet struct {
	name              string
	flags             uint32
	keyType, dataType uint32
	keyLen            int
	fields            []int // lengths of the fields of a concatenation
	verdicts          bool

	elements []nftElement
	read     bool
	err      error
}

// nftElement is an element, from key to end.
type nftElement struct {
	key, end []byte
	all      bool // it is for whatever has no element of its own
	ends     bool // it only ends the range that began before
	data     []byte
	verdict  nftVerdict
}

func decodeSet(a attributes) *nftSet {
	s := &nftSet{
		name: netlink.Text(a[unix.NFTA_SET_NAME]), flags: uint32(a.number(unix.NFTA_SET_FLAGS)),
		keyType: uint32(a.number(unix.NFTA_SET_KEY_TYPE)), keyLen: int(a.number(unix.NFTA_SET_KEY_LEN)),
		dataType: uint32(a.number(unix.NFTA_SET_DATA_TYPE)),
	}
	s.verdicts = s.dataType == unix.NFT_DATA_VERDICT
	for _, field := range netlink.Attributes(attributesOf(a[unix.NFTA_SET_DESC])[netlink.SetDescConcat]) {
		s.fields = append(s.fields, int(attributesOf(field).number(netlink.SetFieldLen)))
	}
	if len(s.fields) == 0 {
		s.fields = []int{s.keyLen}
	}
	return s
}

func decodeElement(b []byte) nftElement {
	a := attributesOf(b)
	flags := a.number(unix.NFTA_SET_ELEM_FLAGS)
	e := nftElement{
		ends: flags&elementIsEnd != 0,
		key:  bytes.Clone(a.data(unix.NFTA_SET_ELEM_KEY)), end: bytes.Clone(a.data(netlink.SetElemKeyEnd)), all: flags&elementIsCatchall != 0,
		data: bytes.Clone(a.data(unix.NFTA_SET_ELEM_DATA)), verdict: a.verdict(unix.NFTA_SET_ELEM_DATA),
	}
	if e.end == nil {
		e.end = e.key
	}
	return e
}

// readElements reads all of a set.
func (t *nftTable) readElements(s *nftSet) {
	if s.read {
		return
	}
	s.read = true
	s.err = netlink.DumpNFTables(unix.NFT_MSG_GETSETELEM, t.family, t.listOf(s), func(_ uint8, b []byte) { s.add(b) })
	s.join()
}

// listOf returns what appends to a request which elements are meant.
func (t *nftTable) listOf(s *nftSet) func([]byte) []byte {
	return func(b []byte) []byte {
		b = netlink.AppendText(b, unix.NFTA_SET_ELEM_LIST_TABLE, t.name)
		return netlink.AppendText(b, unix.NFTA_SET_ELEM_LIST_SET, s.name)
	}
}

// add adds the elements of a message.
func (s *nftSet) add(message []byte) {
	for _, element := range netlink.Attributes(attributesOf(message)[unix.NFTA_SET_ELEM_LIST_ELEMENTS]) {
		s.elements = append(s.elements, decodeElement(element))
	}
}

// join joins the parts of ranges, once all elements are there.
func (s *nftSet) join() {
	if s.flags&unix.NFT_SET_INTERVAL != 0 && s.flags&netlink.SetConcat == 0 {
		s.elements = joinRanges(s.elements)
	}
}

// joinRanges gives elements of ranges their ends: of a set of single fields, what ends one is an
// element of its own (net/netfilter/nft_set_rbtree.c).
func joinRanges(all []nftElement) (out []nftElement) {
	slices.SortStableFunc(all, func(a, b nftElement) int { return bytes.Compare(a.key, b.key) })
	for i, e := range all {
		if e.ends {
			continue
		}
		if !e.all {
			e.end = ones(len(e.key))
			if next := slices.IndexFunc(all[i:], func(o nftElement) bool { return !bytes.Equal(o.key, e.key) }); next > 0 {
				e.end = before(all[i+next].key)
			}
		}
		out = append(out, e)
	}
	return out
}

// before is the number one less.
func before(n []byte) []byte {
	out := bytes.Clone(n)
	for i := len(out) - 1; i >= 0; i-- {
		if out[i]--; out[i] != 0xff {
			break
		}
	}
	return out
}

// get asks the kernel for one element of a set without ranges, which may have very many.
func (t *nftTable) get(s *nftSet, key []byte) (e nftElement, found bool, err error) {
	socket, err := netlink.Open(unix.NETLINK_NETFILTER, 64<<10)
	if err != nil {
		return e, false, err
	}
	defer socket.Close()
	err = socket.Do(1, func(b []byte, _ int) []byte {
		b = netlink.AppendNetfilter(netlink.AppendRequest(b, unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_GETSETELEM, 0), t.family)
		b = netlink.AppendText(b, unix.NFTA_SET_ELEM_LIST_TABLE, t.name)
		b = netlink.AppendText(b, unix.NFTA_SET_ELEM_LIST_SET, s.name)
		return netlink.AppendNested(b, unix.NFTA_SET_ELEM_LIST_ELEMENTS, func(b []byte) []byte {
			return netlink.AppendNested(b, unix.NFTA_LIST_ELEM, func(b []byte) []byte {
				return netlink.AppendNested(b, unix.NFTA_SET_ELEM_KEY, func(b []byte) []byte { return netlink.Append(b, unix.NFTA_DATA_VALUE, key...) })
			})
		})
	}, func(_ int, body []byte, failure error) {
		if err = failure; body == nil || len(body) < netlink.SizeofNetfilter {
			return
		}
		for _, element := range netlink.Attributes(attributesOf(body[netlink.SizeofNetfilter:])[unix.NFTA_SET_ELEM_LIST_ELEMENTS]) {
			e = decodeElement(element)
			found = true
		}
	})
	return e, found, err
}

// ownTable is the name of kproxy's tables. Of their sets, which may be large, single elements are asked for.
const ownTable = "kproxy"

// Own reports whether a rule of nftables is kproxy's.
func Own(s *Step) bool { return s.Source == sourceNFT && strings.HasSuffix(s.Table, " "+ownTable) }

// find looks a key up, of which known says which bits are known.
func (t *nftTable) find(s *nftSet, key, known []byte) (nftElement, Answer, error) {
	if t.name == ownTable && s.flags&unix.NFT_SET_INTERVAL == 0 && allKnown(known) {
		e, found, err := t.get(s, key)
		if err == nil || errors.Is(err, unix.ENOENT) {
			return e, answerTo(found), nil
		}
	}
	if t.readElements(s); s.err != nil {
		return nftElement{}, Maybe, s.err
	}
	var rest *nftElement
	may := false
	for i := range s.elements {
		e := &s.elements[i]
		if e.all {
			rest = e
			continue
		}
		switch s.covers(e, key, known) {
		case Yes:
			return *e, Yes, nil
		case Maybe:
			may = true
		}
	}
	switch {
	case may:
		return nftElement{}, Maybe, nil
	case rest != nil:
		return *rest, Yes, nil
	}
	return nftElement{}, No, nil
}

// covers compares each field of a key with an element's.
func (s *nftSet) covers(e *nftElement, key, known []byte) Answer {
	out, at := Yes, 0
	for _, n := range s.fields {
		end := at + n
		if end > len(key) || end > len(e.key) || end > len(e.end) {
			return Maybe
		}
		first, last := e.key[at:end], e.end[at:end]
		switch {
		case bytes.Equal(first, last):
			if a := equal(key[at:end], known[at:end], first); a != Yes {
				out = a
			}
		case !allKnown(known[at:end]):
			out = Maybe
		case bytes.Compare(first, key[at:end]) > 0 || bytes.Compare(key[at:end], last) > 0:
			return No
		}
		if out == No {
			return No
		}
		at += (n + 3) &^ 3
	}
	return out
}

// equal compares what is known of a value with another.
func equal(value, known, with []byte) Answer {
	if len(value) != len(with) {
		return Maybe
	}
	for i := range value {
		if (value[i]^with[i])&known[i] != 0 {
			return No
		}
	}
	if allKnown(known) {
		return Yes
	}
	return Maybe
}

func allKnown(known []byte) bool {
	return !slices.ContainsFunc(known, func(b byte) bool { return b != 0xff })
}

func hostNumber(b []byte) uint64 {
	switch len(b) {
	case 4:
		return uint64(binary.NativeEndian.Uint32(b))
	case 8:
		return binary.NativeEndian.Uint64(b)
	}
	var n uint64
	for _, x := range b[:min(len(b), 8)] {
		n = n<<8 | uint64(x)
	}
	return n
}

// WriteNFT writes the chains and rules of nftables that [Read] found and that iptables hasn't printed, one a line, table by table.
func (t *Tables) WriteNFT(w io.Writer) {
	for b := range t.nftTables() {
		fmt.Fprintf(w, "table %s\n", b.Table)
		for _, name := range slices.Sorted(maps.Keys(b.set.chains)) {
			c := b.set.chains[name]
			fmt.Fprintf(w, "  chain %s\n", c.name)
			for _, of := range t.Bases {
				if of.set == b.set && of.Chain == c.name {
					fmt.Fprintf(w, "    type %s hook %s priority %d policy %s\n", of.Type, strings.ToLower(string(of.Hook)), of.Priority, of.Policy)
				}
			}
			for _, r := range c.rules {
				fmt.Fprintf(w, "    %s\n", r.text)
			}
		}
	}
}

// WriteNFTSets writes the sets and maps of these tables, with so many elements of each at most. Where there are more, a range is where it
// begins and, before that, where the one below ends, as the kernel lists them.
func (t *Tables) WriteNFTSets(w io.Writer, atMost int) {
	for b := range t.nftTables() {
		for _, name := range slices.Sorted(maps.Keys(b.set.nft.sets)) {
			s := *b.set.nft.sets[name]
			s.elements = nil
			err := netlink.SampleNFTables(unix.NFT_MSG_GETSETELEM, b.set.nft.family, b.set.nft.listOf(&s), func(m []byte) bool {
				s.add(m)
				return len(s.elements) <= atMost
			})
			more := ""
			if len(s.elements) > atMost {
				s.elements, more = s.elements[:atMost], ", and more"
			} else {
				s.join()
			}
			fmt.Fprintf(w, "%s %s: %d elements%s\n", b.Table, name, len(s.elements), more)
			if err != nil {
				fmt.Fprintf(w, "  # %v\n", err)
			}
			for i := range s.elements {
				fmt.Fprintf(w, "  %s\n", s.text(&s.elements[i], func(key []byte) string { return typed(s.keyType, key) }))
			}
		}
	}
}

// nftTables yields a base chain of each table.
func (t *Tables) nftTables() iter.Seq[*Base] {
	return func(yield func(*Base) bool) {
		seen := map[*ruleset]bool{}
		for _, b := range t.Bases {
			if b.Source == sourceNFT && !seen[b.set] {
				seen[b.set] = true
				if !yield(b) {
					return
				}
			}
		}
	}
}
