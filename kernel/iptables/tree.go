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

// tree collects the chains that lead a packet to its service by destination
// address, then by protocol and port. It is path-compressed: levels at which
// nothing branches have no chain. A chain's name says which addresses it is for,
// and what is in it depends only on the leaves there.
type tree struct{ chains []kernel.Chain }

// byLeaf orders leaves by address, protocol and port.
func byLeaf(a, b leaf) int {
	return cmp.Or(a.addr.Compare(b.addr), cmp.Compare(a.proto, b.proto), cmp.Compare(a.port, b.port), strings.Compare(a.rule, b.rule))
}

// addressTree returns the tree over sorted leaves with addresses.
func addressTree(leaves []leaf) []kernel.Chain {
	t, rules := &tree{}, ruleTexts(leaves)
	if len(leaves) > fanout {
		// The rule at the top turns away what is no service's at once, unless services
		// have nothing in common.
		if p := common(leaves); p.Bits() == 0 {
			rules = t.byAddress(leaves, p)
		} else {
			rules = []string{t.subtree(leaves)}
		}
	}
	t.add(chainDispatch, rules)
	return t.chains
}

// nodePortTree returns the tree over sorted leaves without addresses.
func nodePortTree(leaves []leaf) []kernel.Chain {
	t := &tree{}
	t.add(chainNodePorts, t.byPort(kernel.Prefix+"NP", leaves))
	return t.chains
}

func (t *tree) add(name string, rules []string) {
	t.chains = append(t.chains, kernel.Chain{Table: "nat", Name: name, Rules: rules})
}

func ruleTexts(leaves []leaf) []string {
	out := make([]string, len(leaves))
	for i, l := range leaves {
		out[i] = l.rule
	}
	return out
}

// subtree adds the chain for leaves, and returns the rule that leads there.
func (t *tree) subtree(leaves []leaf) string {
	p := common(leaves)
	name := chainName(strings.ReplaceAll(p.String(), ":", "."))
	t.add(name, t.byAddress(leaves, p))
	return "-d " + p.String() + " -j " + name
}

// byAddress returns the rules of the chain for leaves, all of which lie in p.
func (t *tree) byAddress(leaves []leaf, p netip.Prefix) []string {
	if len(leaves) <= fanout {
		return ruleTexts(leaves)
	}
	if p.IsSingleIP() {
		return t.byPort(kernel.Prefix+strings.ReplaceAll(p.Addr().String(), ":", "."), leaves)
	}
	return branch(groupBy(leaves, func(l leaf) int { return slot(l.addr, p.Bits()) }), t.subtree)
}

// byPort returns the rules of the chain for leaves of one address: by protocol,
// then by port.
func (t *tree) byPort(prefix string, leaves []leaf) []string {
	if len(leaves) <= fanout {
		return ruleTexts(leaves)
	}
	return branch(groupBy(leaves, func(l leaf) int { return int(l.proto) }), func(g []leaf) string {
		proto := g[0].proto.String()
		name := prefix + "-" + strings.ToUpper(proto)
		chain := chainName(strings.TrimPrefix(name, kernel.Prefix))
		t.add(chain, t.byRange(name, g))
		return "-p " + proto + " -j " + chain
	})
}

// byRange returns the rules of the chain for leaves of one address and protocol.
func (t *tree) byRange(prefix string, leaves []leaf) []string {
	if len(leaves) <= fanout {
		return ruleTexts(leaves)
	}
	first, last := leaves[0].port, leaves[len(leaves)-1].port
	if first == last {
		return ruleTexts(leaves) // one port many times: the first wins
	}
	free := (bits.Len16(first^last) - 1) / strideBits * strideBits // bits that the ports of a branch differ in
	return branch(groupBy(leaves, func(l leaf) int { return int(l.port >> free) }), func(g []leaf) string {
		lo := g[0].port >> free << free
		hi := lo | (1<<free - 1)
		proto := g[0].proto.String()
		chain := chainName(strings.TrimPrefix(fmt.Sprintf("%s-%d-%d", prefix, lo, hi), kernel.Prefix))
		t.add(chain, t.byRange(prefix, g))
		return fmt.Sprintf("-p %s -m %s --dport %d:%d -j %s", proto, proto, lo, hi, chain)
	})
}

// branch turns groups into the rules of a chain: a small group's leaves stay in the
// chain as long as there is room, subtree makes a chain of the others and returns the
// rule that leads there.
func branch(groups [][]leaf, subtree func([]leaf) string) []string {
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
	var out []string
	for i, g := range groups {
		if inline[i] {
			out = append(out, ruleTexts(g)...)
		} else {
			out = append(out, subtree(g))
		}
	}
	return out
}

// groupBy cuts a sorted list where key changes.
func groupBy[T any, K comparable](list []T, key func(T) K) [][]T {
	var out [][]T
	start := 0
	for i := 1; i <= len(list); i++ {
		if i == len(list) || key(list[i]) != key(list[start]) {
			out = append(out, list[start:i])
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

// trees are a family's two trees, over addresses and over node ports.
type trees struct {
	leaves, ports        []leaf // sorted
	addresses, nodePorts []kernel.Chain
}

// change takes leaves away and adds others, and returns which chains are gone and
// which are new or have changed. At first there are the two roots to come.
func (t *trees) change(gone, come, gonePorts, comePorts []leaf) (less, more []kernel.Chain) {
	for _, x := range []struct {
		gone, come []leaf
		leaves     *[]leaf
		chains     *[]kernel.Chain
		make       func([]leaf) []kernel.Chain
	}{{gone, come, &t.leaves, &t.addresses, addressTree}, {gonePorts, comePorts, &t.ports, &t.nodePorts, nodePortTree}} {
		slices.SortFunc(x.gone, byLeaf)
		slices.SortFunc(x.come, byLeaf)
		if *x.chains != nil && slices.Equal(x.gone, x.come) {
			continue
		}
		old := make(map[string][]string, len(*x.chains))
		for _, c := range *x.chains {
			old[c.Name] = c.Rules
		}
		*x.leaves = kernel.Patch(*x.leaves, x.gone, x.come, byLeaf)
		*x.chains = x.make(*x.leaves)
		for _, c := range *x.chains {
			if rules, known := old[c.Name]; !known || !slices.Equal(rules, c.Rules) {
				more = append(more, c)
			}
			delete(old, c.Name)
		}
		for name := range old {
			less = append(less, kernel.Chain{Table: "nat", Name: name})
		}
	}
	return less, more
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
