package cluster

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"
	"time"
)

// drawing is a board summed up.
type drawing struct {
	at        time.Time
	services  []drawnService // by id
	order     []int32        // ids of those that a node which answers has, or if none does, of all; broken ones first
	views     []uint32       // most nodes', by id; 0 where there is none
	members   []drawnMember
	tally     tally // service ports by their worst class; nodes that don't answer aren't counted
	silent    int   // nodes that don't answer
	lagging   int   // nodes that differ
	split     int   // service ports of which no view is most nodes'
	ailing    int   // nodes that answer with a problem of their own, or that others find silent
	unasked   int
	answering int
}

type tally [9]int32 // by index in classes

// drawnService is a service port on all nodes.
type drawnService struct {
	classes tally
	planes  [6]int32 // by index in planes
	errors  uint64   // that failed between the last two answers
	active  int64
	differ  int32 // nodes that differ from most
	split   bool  // no view is most nodes', and none has been for two rounds
	worst   uint8 // class, of nodes that answer; index in classes
	rank    uint8
}

// drawnMember is a node with all service ports.
type drawnMember struct {
	classes  tally
	errors   uint64
	services int32
	differ   int32  // service ports in which it differs from most nodes
	silentTo int    // kproxys that find its endpoints silent
	since    uint32 // of those, the earliest; Unix seconds
}

// drawEvery bounds how often a board is summed up: 2.5 million cells take some 50 ms.
const drawEvery = time.Second

// draw sums the board up, unless that was done lately or nothing has changed. The caller holds the lock. It is done anew at
// once where service ports or members have come or gone: a drawing is by their places.
//
// Nodes are asked at different times, so that after each change some have another view until they are asked again:
// only who differs for longer than two rounds counts as differing.
func (b *Board) draw(now time.Time) *drawing {
	if !b.remade && (!b.stale || now.Sub(b.drawn.at) < drawEvery) && !b.drawn.at.IsZero() {
		return b.drawn
	}
	if b.rehoused {
		b.house()
	}
	d := &drawing{at: now, services: make([]drawnService, len(b.services)), members: make([]drawnMember, len(b.members))}
	b.drawn, b.stale, b.remade, b.rehoused = d, false, false, false
	answering := d.census(b.members, len(b.services))
	views, most := majority(answering, len(b.services))
	settled := uint32(now.Add(-2 * b.interval(now)).Unix())
	for i, m := range b.members {
		if m.answers() {
			d.add(&d.members[i], m, b.services, views, most, uint32(now.Unix()), settled)
		}
	}
	for id := range d.services {
		if p := &b.services[id]; p.key != "" {
			switch {
			case most[id] || len(answering) < 2:
				p.split = 0
			case p.split == 0:
				p.split = uint32(now.Unix())
			}
			d.rank(int32(id), p.split > 0 && p.split <= settled)
		}
		if !most[id] {
			views[id] = 0
		}
	}
	d.views = views
	for i, m := range b.members {
		if m.trouble != nil {
			d.members[i].classes[classUnknown] = int32(len(d.order))
		}
	}
	slices.SortFunc(d.order, func(x, y int32) int {
		s, t := &d.services[x], &d.services[y]
		return cmp.Or(cmp.Compare(s.rank, t.rank), cmp.Compare(t.errors, s.errors), cmp.Compare(t.differ, s.differ), strings.Compare(b.services[x].key, b.services[y].key))
	})
	return d
}

// answers reports whether a node's last answer is known, and is none of trouble.
func (m *member) answers() bool { return m.trouble == nil && m.known }

// census counts the nodes by whether they answer and ail, and returns those that answer, with a cell for each service port.
func (d *drawing) census(members []*member, services int) (answering []*member) {
	silentTo := map[string]int{}
	for _, m := range members {
		switch {
		case m.trouble != nil:
			d.silent++
		case !m.known:
			d.unasked++
		default:
			answering = append(answering, m)
			m.cells = append(m.cells, make([]cell, max(0, services-len(m.cells)))...)
			for _, n := range m.status.PassiveHealth.Nodes {
				silentTo[n.Name]++
			}
		}
	}
	d.answering = len(answering)
	for i, m := range members {
		d.members[i].silentTo = silentTo[m.Name]
		if m.answers() && (m.ails() || silentTo[m.Name] > 0) {
			d.ailing++
		}
	}
	return answering
}

// add adds a node's cells to it and to their service ports. A cell that differs from most nodes' counts as different once it has
// done so since settled; times are Unix seconds.
func (d *drawing) add(of *drawnMember, m *member, ports []servicePort, views []uint32, most []bool, now, settled uint32) {
	for id := range m.cells {
		if ports[id].key == "" {
			continue
		}
		c, s := &m.cells[id], &d.services[id]
		differs := most[id] && c.view != views[id]
		switch {
		case !differs:
			c.since = 0
		case c.since == 0:
			c.since = now
		}
		if differs = differs && c.since <= settled; differs {
			s.differ++
			of.differ++
			if of.since == 0 || c.since < of.since {
				of.since = c.since
			}
		}
		if c.view != 0 {
			of.services++
		} else if c.class = 0; differs {
			c.class = classMissing
		}
		s.classes[c.class]++
		of.classes[c.class]++
		s.planes[c.plane]++
		s.errors += uint64(c.errors)
		of.errors += uint64(c.errors)
		s.active += int64(c.active)
	}
	if of.differ > 0 {
		d.lagging++
	}
}

// rank finds a service port's worst class and puts it in the order, unless it has gone, as far as is known.
func (d *drawing) rank(id int32, split bool) {
	s := &d.services[id]
	s.classes[classUnknown] = int32(d.silent)
	if s.split = split; split {
		d.split++
	}
	for class := uint8(1); class <= classFine; class++ { // from the worst
		if s.classes[class] > 0 && class != classUnknown {
			s.worst = class
			break
		}
	}
	if s.worst == 0 {
		s.worst = classUnknown
		if d.answering > 0 {
			return
		}
	}
	if s.rank = s.worst; (s.differ > 0 || split) && s.rank > classUnknown {
		s.rank = classUnknown
	}
	d.tally[s.worst]++
	d.order = append(d.order, id)
}

// house notes whose addresses are whose. A node's own are the node's: of the pods that share them, which may be of several
// services, nothing tells them apart. Where several services have an endpoint at another address, it is one of theirs.
func (b *Board) house() {
	b.owners = map[netip.Addr]string{}
	for _, m := range b.members {
		for _, a := range m.Addresses {
			b.owners[a] = "node " + m.Name // which no NAMESPACE/NAME can be
		}
	}
	for i := range b.services {
		p := &b.services[i]
		name := p.namespace + "/" + p.name
		for j := range p.endpoints {
			if a := p.endpoints[j].address.Addr(); b.owners[a] == "" {
				b.owners[a] = name
			}
		}
	}
}

// majority finds for each service port the view that more than half of the nodes have, if there is one (Boyer and Moore,
// MJRTY, 1981: two passes in the order of memory).
func majority(nodes []*member, services int) (views []uint32, most []bool) {
	views, most = make([]uint32, services), make([]bool, services)
	count := make([]int32, services)
	for _, m := range nodes {
		for id := range m.cells {
			switch v := m.cells[id].view; {
			case count[id] == 0:
				views[id], count[id] = v, 1
			case views[id] == v:
				count[id]++
			default:
				count[id]--
			}
		}
	}
	clear(count)
	for _, m := range nodes {
		for id := range m.cells {
			if m.cells[id].view == views[id] {
				count[id]++
			}
		}
	}
	for id := range most {
		most[id] = 2*int(count[id]) > len(nodes)
	}
	return views, most
}
