package iptables

import (
	"cmp"
	"crypto/sha256"
	"encoding/base32"
	"fmt"
	"math/bits"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/service"
)

// fanout is how many rules a chain of the dispatch tree has at most: one for
// each value of strideBits bits.
const (
	strideBits = 3
	fanout     = 1 << strideBits
)

// node is a chain of the tree, with those of its own that it leads to.
type node struct {
	chain kernel.Chain
	kids  []*node
}

// branches are the rules of a chain, and the chains of the tree they lead to.
type branches struct {
	rules []string
	kids  []*node
}

// tree grows the chains that lead a packet to its service by destination
// address, then by protocol and port. It is path-compressed: levels at which
// nothing branches have no chain. A chain's name says which addresses it is for,
// and what is in it depends only on the leaves there: so chains of an earlier
// tree are used again where no leaf has changed.
type tree struct {
	known  map[string]*node // of the earlier tree, by name; may be nil
	dirty  []netip.Addr     // where leaves have changed, sorted
	fresh  []*node          // chains that were not used again
	reused map[*node]bool   // and those of known that were, with what is below
}

// byLeaf orders leaves by place.
func byLeaf(a, b leaf) int {
	return cmp.Or(a.addr.Compare(b.addr), cmp.Compare(a.proto, b.proto), cmp.Compare(a.port, b.port), strings.Compare(a.rule, b.rule))
}

// addresses grows the tree over sorted leaves with addresses.
func (t *tree) addresses(leaves []leaf) *node {
	root := branches{rules: ruleTexts(leaves)}
	if len(leaves) > fanout {
		root = t.root(leaves)
	}
	return t.node(chainDispatch, root)
}

// nodePorts grows the tree over sorted leaves without addresses.
func (t *tree) nodePorts(leaves []leaf) *node {
	return t.node(chainNodePorts, t.byPort(kernel.Prefix+"NP", leaves))
}

// root returns the rules at the top: one that turns away, at once, whatever is
// no service's, unless services have nothing in common.
func (t *tree) root(leaves []leaf) branches {
	if p := common(leaves); p.Bits() == 0 {
		return t.byAddress(leaves, p)
	}
	rule, kid := t.subtree(leaves)
	return branches{[]string{rule}, []*node{kid}}
}

func (t *tree) node(name string, b branches) *node {
	n := &node{kernel.Chain{Table: "nat", Name: name, Rules: b.rules}, b.kids}
	t.fresh = append(t.fresh, n)
	return n
}

// touches reports whether a leaf in p has changed.
func (t *tree) touches(p netip.Prefix) bool {
	at, _ := slices.BinarySearchFunc(t.dirty, p.Addr(), netip.Addr.Compare)
	return at < len(t.dirty) && p.Contains(t.dirty[at])
}

func ruleTexts(leaves []leaf) []string {
	out := make([]string, len(leaves))
	for i, l := range leaves {
		out[i] = l.rule
	}
	return out
}

// subtree returns the chain for leaves and the rule that leads there.
func (t *tree) subtree(leaves []leaf) (string, *node) {
	p := common(leaves)
	name := chainName(strings.ReplaceAll(p.String(), ":", "."))
	n, known := t.known[name]
	if known && !t.touches(p) {
		t.reused[n] = true
	} else {
		n = t.node(name, t.byAddress(leaves, p))
	}
	return "-d " + p.String() + " -j " + name, n
}

// byAddress returns what is in the chain for leaves, all of which lie in p.
func (t *tree) byAddress(leaves []leaf, p netip.Prefix) branches {
	if len(leaves) <= fanout {
		return branches{rules: ruleTexts(leaves)}
	}
	if p.IsSingleIP() {
		return t.byPort(kernel.Prefix+strings.ReplaceAll(p.Addr().String(), ":", "."), leaves)
	}
	groups := groupBy(leaves, func(l leaf) int { return slot(l.addr, p.Bits()) })
	return branch(groups, t.subtree)
}

// byPort returns what is in the chain for leaves of one address: by protocol,
// then by port.
func (t *tree) byPort(prefix string, leaves []leaf) branches {
	if len(leaves) <= fanout {
		return branches{rules: ruleTexts(leaves)}
	}
	groups := groupBy(leaves, func(l leaf) int { return int(l.proto) })
	return branch(groups, func(g []leaf) (string, *node) {
		proto := g[0].proto.String()
		name := prefix + "-" + strings.ToUpper(proto)
		chain := chainName(strings.TrimPrefix(name, kernel.Prefix))
		return "-p " + proto + " -j " + chain, t.node(chain, t.byRange(name, g))
	})
}

// byRange returns what is in the chain for leaves of one address and protocol.
func (t *tree) byRange(prefix string, leaves []leaf) branches {
	if len(leaves) <= fanout {
		return branches{rules: ruleTexts(leaves)}
	}
	first, last := leaves[0].port, leaves[len(leaves)-1].port
	free := 0 // bits that the ports of a branch differ in
	if first != last {
		free = (bits.Len16(first^last) - 1) / strideBits * strideBits
	}
	groups := groupBy(leaves, func(l leaf) int { return int(l.port >> free) })
	if len(groups) == 1 {
		return branches{rules: ruleTexts(leaves)} // one port many times: contested, the first wins
	}
	return branch(groups, func(g []leaf) (string, *node) {
		lo := g[0].port >> free << free
		hi := lo | (1<<free - 1)
		proto := g[0].proto.String()
		name := fmt.Sprintf("%s-%d-%d", prefix, lo, hi)
		chain := chainName(strings.TrimPrefix(name, kernel.Prefix))
		return fmt.Sprintf("-p %s -m %s --dport %d:%d -j %s", proto, proto, lo, hi, chain), t.node(chain, t.byRange(prefix, g))
	})
}

// branch turns groups into what is in a chain: a small group's leaves stay in the
// chain as long as there is room, the others go to a chain of their own.
func branch(groups [][]leaf, subtree func([]leaf) (string, *node)) branches {
	order := make([]int, len(groups))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(len(groups[a]), len(groups[b])) })
	room := fanout - len(groups)
	inline := make([]bool, len(groups))
	for _, i := range order {
		if extra := len(groups[i]) - 1; extra <= room {
			inline[i] = true
			room -= extra
		}
	}
	var out branches
	for i, g := range groups {
		if inline[i] {
			out.rules = append(out.rules, ruleTexts(g)...)
			continue
		}
		rule, kid := subtree(g)
		out.rules, out.kids = append(out.rules, rule), append(out.kids, kid)
	}
	return out
}

// groupBy cuts sorted leaves where key changes.
func groupBy(leaves []leaf, key func(leaf) int) [][]leaf {
	var out [][]leaf
	start := 0
	for i := 1; i <= len(leaves); i++ {
		if i == len(leaves) || key(leaves[i]) != key(leaves[start]) {
			out = append(out, leaves[start:i])
			start = i
		}
	}
	return out
}

// common returns the smallest network that holds all leaves, whose length is
// that of the addresses less a multiple of strideBits: so a network has the
// same branches whatever else is in the tree.
func common(leaves []leaf) netip.Prefix {
	first, last := leaves[0].addr, leaves[len(leaves)-1].addr
	n := first.BitLen() - (first.BitLen()-sharedBits(first, last)+strideBits-1)/strideBits*strideBits
	p, _ := first.Prefix(max(n, 0))
	return p
}

// sharedBits counts the leading bits that two addresses have in common.
func sharedBits(a, b netip.Addr) int {
	x, y := a.AsSlice(), b.AsSlice()
	for i := range x {
		if d := x[i] ^ y[i]; d != 0 {
			return i*8 + bits.LeadingZeros8(d)
		}
	}
	return a.BitLen()
}

// slot is the value of the bits after the first n, up to the next stride from
// the end of the address.
func slot(a netip.Addr, n int) int {
	width := strideBits
	if rest := (a.BitLen() - n) % strideBits; rest > 0 {
		width = rest
	}
	b := a.AsSlice()
	v := 0
	for i := n; i < n+width; i++ {
		v = v<<1 | int(b[i/8]>>(7-i%8)&1)
	}
	return v
}

// chainName makes a chain's name of what it is for, or of its hash where that
// is too long.
func chainName(what string) string {
	if name := kernel.Prefix + what; len(name) <= kernel.MaxChainName {
		return name
	}
	h := sha256.Sum256([]byte(what))
	return kernel.Prefix + "NET-" + base32.StdEncoding.EncodeToString(h[:10])
}

// forest is a family's two trees, over addresses and over node ports, as they
// stand after a number of changes. A change of few services makes few chains anew.
type forest struct {
	leaves, ports    []leaf // sorted, and never written to
	addresses, nodes *node
	known            map[string]*node // of the tree over addresses
}

// change takes leaves away and adds others, and returns which chains are gone and
// which are new or may have changed. At first there are the two roots to come.
func (f *forest) change(gone, come, gonePorts, comePorts []leaf) (less, more []kernel.Chain) {
	if changes(gone, come) || f.addresses == nil {
		less, more = f.changeAddresses(gone, come)
	}
	if changes(gonePorts, comePorts) || f.nodes == nil {
		f.ports = kernel.Patch(f.ports, gonePorts, comePorts, byLeaf)
		t := &tree{}
		old := f.nodes
		f.nodes = t.nodePorts(f.ports)
		less = append(less, all(old)...)
		more = append(more, all(f.nodes)...)
	}
	return less, more
}

func (f *forest) changeAddresses(gone, come []leaf) (less, more []kernel.Chain) {
	t := &tree{known: f.known, reused: map[*node]bool{}}
	for _, leaves := range [][]leaf{gone, come} {
		for _, l := range leaves {
			t.dirty = append(t.dirty, l.addr)
		}
	}
	slices.SortFunc(t.dirty, netip.Addr.Compare)
	f.leaves = kernel.Patch(f.leaves, gone, come, byLeaf)
	old := f.addresses
	f.addresses = t.addresses(f.leaves)
	if f.known == nil {
		f.known = map[string]*node{}
	}
	if old != nil {
		f.prune(old, t.reused, &less)
	}
	for _, n := range t.fresh {
		f.known[n.chain.Name] = n
		more = append(more, n.chain)
	}
	return less, more
}

// prune forgets what isn't used any more of n and below.
func (f *forest) prune(n *node, reused map[*node]bool, less *[]kernel.Chain) {
	if reused[n] {
		return
	}
	delete(f.known, n.chain.Name)
	*less = append(*less, n.chain)
	for _, k := range n.kids {
		f.prune(k, reused, less)
	}
}

// changes reports whether it makes a difference to take gone away and to add
// come. It sorts both.
func changes(gone, come []leaf) bool {
	slices.SortFunc(gone, byLeaf)
	slices.SortFunc(come, byLeaf)
	return !slices.Equal(gone, come)
}

// all are the chains of n and below; none for nil.
func all(n *node) []kernel.Chain {
	if n == nil {
		return nil
	}
	out := []kernel.Chain{n.chain}
	for _, k := range n.kids {
		out = append(out, all(k)...)
	}
	return out
}

// toPort matches one port, with the address before it unless that is the zero Addr.
func toPort(a netip.Addr, p service.Protocol, port uint16, text string) string {
	to := ""
	if a.IsValid() {
		to = "-d " + kernel.HostPrefix(a) + " "
	}
	proto := p.String()
	return to + "-p " + proto + " -m " + proto + " --dport " + strconv.Itoa(int(port)) + " " + kernel.Comment(text)
}
