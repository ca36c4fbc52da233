package iptables

import (
	"net/netip"
	"slices"

	"kproxy.dev/kproxy/kernel"
)

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
		f.ports, _ = patchRepeated(f.ports, gonePorts, comePorts, byLeaf)
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
	f.leaves, _ = patchRepeated(f.leaves, gone, come, byLeaf)
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
