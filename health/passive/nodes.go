package passive

import (
	"context"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"time"

	"kproxy.dev/kproxy/health"
)

// Nodes die, not endpoints; and it may be this node that is cut off.
const (
	// together bounds the time between silences that count as one.
	together = 10 * time.Second
	// compared is of how many silent nodes, and of how many others, a host is asked to tell a node's silence from this node's.
	compared      = 4
	compareEvery  = 2 * time.Second
	isolatedEvery = time.Second
	// isolatedNodes is on how many other nodes a host must have been asked at least.
	isolatedNodes = 3
	// isolatedFrom is the share of them above which it is this node that is cut off, and isolatedUntil above which it stays so.
	isolatedFrom, isolatedUntil = 2. / 3, 1. / 2
)

// vote holds the last answer of a host on another node.
type vote struct {
	asking bool
	asked  time.Time // zero if it hasn't said anything yet
	silent bool
}

// remote reports whether an endpoint is on another node for all that is known.
func (d *Detector) remote(r *record) bool { return r.node != "" && r.node != d.cfg.Node }

// quiet reports whether an endpoint says nothing: so far, or when it was asked last.
func (r *record) quiet(now time.Time) bool {
	return r.asked != nil && r.asked.early && !(r.asked.done && r.asked.answer != Nothing) || r.silent && now.Sub(r.heard) < together
}

// widen asks more endpoints: all of a node two of which, with different addresses, say nothing; and some hosts on other nodes.
func (d *Detector) widen(ctx context.Context, asking *sync.WaitGroup, now time.Time) {
	quiet := map[string]map[netip.Addr]bool{}
	compare, every := d.isolated != nil, compareEvery
	if compare {
		every = isolatedEvery
	}
	for _, r := range d.records {
		if r.node == "" || !r.quiet(now) {
			continue
		}
		if quiet[r.node] == nil {
			quiet[r.node] = map[netip.Addr]bool{}
		}
		quiet[r.node][r.endpoint.Address.Addr()] = true
		compare = compare || d.remote(r) && r.asked != nil && r.asked.purpose != comeback // there is a verdict to come
	}
	for _, x := range d.departures { // and resets
		compare = compare || !x.silent.IsZero()
	}
	compare = compare && now.Sub(d.compared) >= every
	sweeps := map[string]bool{}
	for node, addresses := range quiet {
		if len(addresses) >= 2 && now.Sub(d.swept[node]) >= together {
			d.swept[node], sweeps[node] = now, true
		}
	}
	if !compare && len(sweeps) == 0 {
		return
	}
	byNode := map[string][]health.Endpoint{}
	for at, node := range d.cfg.Endpoints() {
		if sweeps[node] || compare && node != "" && node != d.cfg.Node {
			byNode[node] = append(byNode[node], at)
		}
	}
	for node := range sweeps {
		for _, at := range byNode[node] {
			d.askToo(at, node, now)
		}
	}
	if compare {
		d.compared = now
		delete(byNode, d.cfg.Node)
		d.compare(ctx, asking, byNode, func(node string) bool { return len(quiet[node]) > 0 }, now)
	}
}

// compare asks hosts on other nodes: programs may hang on all nodes at once, hosts don't.
func (d *Detector) compare(ctx context.Context, asking *sync.WaitGroup, byNode map[string][]health.Endpoint, quiet func(node string) bool, now time.Time) {
	nodes := slices.Collect(maps.Keys(byNode))
	rand.Shuffle(len(nodes), func(i, j int) { nodes[i], nodes[j] = nodes[j], nodes[i] })
	n := map[bool]int{}
	for _, node := range nodes {
		is, v := quiet(node), d.votes[node]
		if v == nil {
			v = &vote{}
		}
		if n[is] == compared || v.asking || !d.limiter.AllowN(now, fewProbes) {
			continue
		}
		n[is]++
		v.asking, d.votes[node] = true, v
		at := byNode[node][rand.IntN(len(byNode[node]))]
		asking.Go(func() {
			out := d.probe(ctx, at, fewProbes, compareFor, d.cfg.Prober.Host, func() {})
			out.node = node
			d.tell(out)
		})
	}
}

// askToo asks an endpoint that no client complains of, unless it is asked or ejected already.
func (d *Detector) askToo(at health.Endpoint, node string, now time.Time) {
	r := d.records[at]
	if r == nil {
		r = &record{endpoint: at, node: node}
		d.records[at] = r
	}
	if r.seen = now; r.asked == nil && r.ejected == nil {
		r.asked = &question{purpose: sweep}
	}
}

// nodeIsSilent reports whether nothing on a node has answered of late.
func (d *Detector) nodeIsSilent(node string, now time.Time) bool {
	for _, r := range d.records {
		if r.node == node && !r.silent && now.Sub(r.heard) < together {
			return false
		}
	}
	return true
}

// judgeIsolation finds out whether it is this node that is cut off: of at least three other nodes that were asked of late, more
// than two thirds are silent. Endpoints that were ejected for that get connections again.
func (d *Detector) judgeIsolation(now time.Time) {
	nodes, silent := 0, 0
	for node, v := range d.votes {
		switch {
		case now.Sub(v.asked) > compareEvery+askFor: // or never
			if !v.asking {
				delete(d.votes, node)
			}
			continue
		case v.silent:
			silent++
		}
		nodes++
	}
	most := isolatedFrom
	if d.isolated != nil {
		most = isolatedUntil
	}
	is := nodes >= isolatedNodes && float64(silent) > most*float64(nodes)
	switch {
	case is && d.isolated == nil:
		d.isolated = &health.Isolation{Since: now, Silent: silent, Nodes: nodes}
		d.cfg.Log.Error("passive health ejects nothing", "reason", d.isolated.Text())
		for _, r := range d.records {
			if d.remote(r) && r.ejected != nil && now.Sub(r.ejected.Since) < together {
				d.restore(r, now, "it is this node that is cut off")
			}
		}
	case !is && d.isolated != nil && (nodes > silent || nodes == 0): // a node has answered, or none is left
		d.cfg.Log.Warn("other nodes answer this node again", "after", now.Sub(d.isolated.Since).Round(time.Second))
		d.isolated = nil
	default:
		return
	}
	d.changed[health.Endpoint{}] = true
}

// silentNodes lists the nodes two endpoints of which, with different addresses, are ejected for silence.
func (d *Detector) silentNodes() []health.SilentNode {
	type node struct {
		health.SilentNode
		addresses map[netip.Addr]bool
	}
	nodes := map[string]*node{}
	for _, r := range d.records {
		if r.node == "" {
			continue
		}
		n := nodes[r.node]
		if n == nil {
			n = &node{SilentNode: health.SilentNode{Name: r.node}, addresses: map[netip.Addr]bool{}}
			nodes[r.node] = n
		}
		if !r.heard.IsZero() || r.ejected != nil {
			n.Asked++
		}
		if r.ejected == nil || r.ejected.Reason != health.Silent {
			continue
		}
		n.Silent++
		n.addresses[r.endpoint.Address.Addr()] = true
		if n.Since.IsZero() || r.ejected.Since.Before(n.Since) {
			n.Since = r.ejected.Since
		}
	}
	var out []health.SilentNode
	for _, name := range slices.Sorted(maps.Keys(nodes)) {
		if n := nodes[name]; len(n.addresses) > 1 {
			out = append(out, n.SilentNode)
		}
	}
	return out
}
