package passive

import (
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"time"

	"kproxy.dev/kproxy/health"
)

// Nodes die, not endpoints; and it may be this node that is cut off.
const (
	// together is how close in time the silence of endpoints counts as one.
	together = 10 * time.Second
	// controls is how many endpoints on as many other nodes are asked to tell a node's silence from this node's.
	controls      = 4
	controlEvery  = 2 * time.Second
	isolatedEvery = time.Second
	// isolatedNodes is on how many other nodes endpoints must have been asked at least.
	isolatedNodes = 3
	// isolatedFrom is the share of them above which it is this node that is cut off, and isolatedUntil above which it stays so.
	isolatedFrom, isolatedUntil = 2. / 3, 1. / 2
)

// remote reports whether an endpoint is on another node for all that is known.
func (d *Detector) remote(r *record) bool { return r.node != "" && r.node != d.cfg.Node }

// quiet reports whether an endpoint says nothing: so far, or when it was asked last.
func (r *record) quiet(now time.Time) bool {
	return r.asked != nil && r.asked.early && !(r.asked.done && r.asked.answer != Nothing) || r.silent && now.Sub(r.heard) < together
}

// widen asks more endpoints: all of a node two of which, with different addresses, say nothing; and some on other nodes.
func (d *Detector) widen(now time.Time) {
	quiet := map[string]map[netip.Addr]bool{}
	control := d.isolated != nil
	for _, r := range d.records {
		if r.node == "" || !r.quiet(now) {
			continue
		}
		if quiet[r.node] == nil {
			quiet[r.node] = map[netip.Addr]bool{}
		}
		quiet[r.node][r.endpoint.Address.Addr()] = true
		control = control || d.remote(r)
	}
	every := controlEvery
	if d.isolated != nil {
		every = isolatedEvery
	}
	control = control && now.Sub(d.controlled) >= every
	sweeps := map[string]bool{}
	for node, addresses := range quiet {
		if len(addresses) >= 2 && now.Sub(d.swept[node]) >= together {
			d.swept[node], sweeps[node] = now, true
		}
	}
	if !control && len(sweeps) == 0 {
		return
	}
	byNode := map[string][]health.Endpoint{}
	for at, node := range d.cfg.Endpoints() {
		if sweeps[node] || control && node != "" && node != d.cfg.Node && (len(quiet[node]) == 0 || d.isolated != nil) {
			byNode[node] = append(byNode[node], at)
		}
	}
	for node := range sweeps {
		for _, at := range byNode[node] {
			d.askToo(at, node, sweep, now)
		}
		delete(byNode, node)
	}
	if !control {
		return
	}
	d.controlled = now
	nodes := slices.Collect(maps.Keys(byNode))
	rand.Shuffle(len(nodes), func(i, j int) { nodes[i], nodes[j] = nodes[j], nodes[i] })
	for _, node := range nodes[:min(len(nodes), controls)] {
		d.askToo(byNode[node][rand.IntN(len(byNode[node]))], node, compare, now)
	}
}

// askToo asks an endpoint that nobody complains of, unless it is asked or ejected already.
func (d *Detector) askToo(at health.Endpoint, node string, why purpose, now time.Time) {
	r := d.records[at]
	if r == nil {
		r = &record{endpoint: at, node: node}
		d.records[at] = r
	}
	if r.seen = now; r.asked == nil && r.ejected == nil {
		r.asked = &question{purpose: why}
	}
}

// nodeIsSilent reports whether nothing on a node has answered of late.
func (d *Detector) nodeIsSilent(node string) bool {
	now := time.Now()
	for _, r := range d.records {
		if r.node == node && !r.silent && now.Sub(r.heard) < together {
			return false
		}
	}
	return true
}

// judgeIsolation finds out whether it is this node that is cut off: of the endpoints asked of late on at least three
// other nodes, more than two thirds are silent, whereby each node counts as much as any, however many of its endpoints were
// asked. Those that were ejected for that get connections again.
func (d *Detector) judgeIsolation(now time.Time) {
	type counts struct{ asked, silent int }
	nodes := map[string]counts{}
	asked, silent, weight := 0, 0, 0.0
	for _, r := range d.records {
		if !d.remote(r) || now.Sub(r.heard) > together {
			continue
		}
		n := nodes[r.node]
		n.asked++
		asked++
		if r.silent {
			n.silent++
			silent++
		}
		nodes[r.node] = n
	}
	for _, n := range nodes {
		weight += float64(n.silent) / float64(n.asked)
	}
	most := isolatedFrom
	if d.isolated != nil {
		most = isolatedUntil
	}
	is := len(nodes) >= isolatedNodes && weight > most*float64(len(nodes))
	switch {
	case is && d.isolated == nil:
		d.isolated = &health.Isolation{Since: now, Silent: silent, Asked: asked, Nodes: len(nodes)}
		d.cfg.Log.Error("passive health ejects nothing", "reason", d.isolated.Text())
		for _, r := range d.records {
			if d.remote(r) && r.ejected != nil && now.Sub(r.ejected.Since) < together {
				d.restore(r, now, "it is this node that is cut off")
				r.silent = true
			}
		}
	case !is && d.isolated != nil && asked > silent: // somebody has answered
		d.cfg.Log.Warn("other nodes' endpoints answer this node again", "after", now.Sub(d.isolated.Since).Round(time.Second))
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
