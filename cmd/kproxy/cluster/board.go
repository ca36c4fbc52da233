package cluster

import (
	"cmp"
	"context"
	"fmt"
	"hash/fnv"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/web"
)

// Fleet is the nodes and how each is asked; [Cluster] is one.
type Fleet interface {
	// Nodes returns those of the given names, or all.
	Nodes(ctx context.Context, names []string) ([]Node, error)
	// Dial connects to the kproxy of a node. It may go on after ctx has ended.
	Dial(ctx context.Context, n Node) (net.Conn, error)
}

// Board holds what all nodes said last, in a few bytes for each service port of each node. It asks nodes in turn and follows
// no streams: these would bring each second what each service port of each node has counted, and hold a connection through the
// API server for each node. Asking in turn bounds both, and the service ports of answers aren't kept.
type Board struct {
	fleet   Fleet
	timeout time.Duration
	reading chan struct{} // one element for each answer that is being read

	mu       sync.Mutex // answers come while the board is read
	names    []string   // of nodes; empty for all
	members  []*member  // by name
	failure  string     // why nodes can't be listed; empty if they can
	listed   time.Time
	ids      map[string]int32 // of service ports, by key
	services []servicePort
	free     []int32               // of services, to be used again
	owners   map[netip.Addr]string // whose an address is, as flows name it; made by draw
	drawn    *drawing
	stale    bool            // members have said something since drawn
	rehoused bool            // endpoints have changed since drawn
	remade   bool            // which members and service ports there are has changed since drawn
	relist   bool            // a node's pod has gone
	dialing  map[string]bool // pods to which a connection is being opened
	viewed   time.Time       // when the board was read last; when it began to run, if it wasn't yet
}

// member is a node, and what it said last.
type member struct {
	Node
	trouble         *Trouble    // why it didn't answer when it was asked last; nil if it did
	status          plan.Status // that it answered last, without service ports
	asked, answered time.Time
	changed         time.Time // since when it answers, or doesn't
	active          int64
	cells           []cell // by id of the service port
	flows           flows
	flowsAt         time.Time
	pending         int  // questions under way
	known           bool // it has answered at least once
}

// ails reports whether its answer says that something is wrong with it.
func (m *member) ails() bool {
	return errorOf(&m.status) != "" || m.status.Health() != "alive" || len(m.status.Warnings) > 0
}

// cell is a service port on a node.
type cell struct {
	view              uint32 // of addresses and endpoints, to compare; 0 where the node doesn't have it
	active            uint32
	failed            uint32 // the counter's lower half
	errors            uint32 // connections that failed between the last two answers
	since             uint32 // Unix seconds since when it was seen to differ from most nodes; 0 if it doesn't
	usable, endpoints uint16
	plane             uint8 // index in planes
	class             uint8 // index in classes
}

// Class says how a service port fares on one node or on several: a condition, or one of these.
type Class = plan.Condition

// The classes that are no conditions.
const (
	Missing Class = "missing" // most nodes have it, and this one, which answers, doesn't
	Unknown Class = "unknown" // the node doesn't answer
)

// classes are all of them, worst first. 0 is nothing.
var classes = []Class{"", plan.Unanswered, plan.Failing, Missing, plan.PartlyDown, plan.Troubled, Unknown, plan.Vacant, plan.Fine}

var (
	classMissing = uint8(slices.Index(classes, Missing))
	classUnknown = uint8(slices.Index(classes, Unknown))
	classFine    = uint8(slices.Index(classes, plan.Fine))
)

// planes are the data planes; 0 is nothing.
var planes = append([]plan.DataPlane{""}, plan.DataPlanes...)

// servicePort is one that some node has.
type servicePort struct {
	key, namespace, name, title string // key is namespace/name[:port]/protocol; empty for one that is free
	holders                     int    // nodes that have it
	view                        uint32 // that addresses and endpoints are of: most nodes'
	split                       uint32 // Unix seconds since when no view is most nodes'; 0 if one is
	addresses                   []netip.AddrPort
	endpoints                   []endpoint
}

type endpoint struct {
	address netip.AddrPort
	node    string
}

// NewBoard returns a board of the nodes of given names, or of all. Each is waited for so long.
func NewBoard(f Fleet, names []string, timeout time.Duration) *Board {
	return &Board{fleet: f, names: names, timeout: timeout, reading: make(chan struct{}, readAtOnce), ids: map[string]int32{}, dialing: map[string]bool{}, drawn: &drawing{}}
}

const (
	askEvery     = 5 * time.Second        // at the most often
	askNode      = 100 * time.Millisecond // for each node, at least
	cellsASecond = 10_000                 // at most; reading these takes a fifth of a processor
	flowsEvery   = 30 * time.Second
	// troubledEvery is how often a node is asked again that didn't answer, at the least often.
	troubledEvery = 30 * time.Second
	boardAtOnce   = 32 // nodes that are asked
	readAtOnce    = 4  // of these, those whose answers are read

	answerTimeout = time.Minute // of all of an answer, from when it is read
	rowsAtMost    = 50_000      // service ports of an answer

	viewedFor  = 5 * time.Minute // after a request nodes are asked as often as while there are some
	unviewed   = time.Minute     // how often at most otherwise
	unviewedBy = 4               // how many times more seldom at least
)

// interval returns the time after which a node is asked again: the more nodes and service ports, the longer, and longer still
// while nothing is requested.
func (b *Board) interval(now time.Time) time.Duration {
	cells := len(b.members) * len(b.ids)
	every := max(askEvery, time.Duration(len(b.members))*askNode, time.Duration(cells/cellsASecond)*time.Second)
	if !b.viewed.IsZero() && now.Sub(b.viewed) > viewedFor {
		every = max(unviewed, unviewedBy*every)
	}
	return every
}

// Run asks all nodes, again and again, until ctx ends.
func (b *Board) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	b.mu.Lock()
	b.viewed = time.Now()
	b.mu.Unlock()
	wg.Go(func() { b.keepDrawn(ctx) })
	slots := make(chan struct{}, boardAtOnce)
	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	for ctx.Err() == nil {
		b.list(ctx)
		for _, m := range b.due(time.Now()) {
			select {
			case slots <- struct{}{}:
			case <-ctx.Done():
				return nil
			}
			wg.Go(func() {
				defer func() { <-slots }()
				b.ask(ctx, m)
			})
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
		}
	}
	return nil
}

// keepDrawn sums the board up where no request does, since it is by drawings that it is known since when nodes differ.
func (b *Board) keepDrawn(ctx context.Context) {
	tick := time.NewTicker(drawEvery)
	defer tick.Stop()
	for {
		select {
		case now := <-tick.C:
			b.mu.Lock()
			if b.stale && now.Sub(b.drawn.at) >= b.interval(now)/20 {
				b.draw(now)
			}
			b.mu.Unlock()
		case <-ctx.Done():
			return
		}
	}
}

// list brings the list of nodes up to date. Where that fails, the former one stays.
func (b *Board) list(ctx context.Context) {
	b.mu.Lock()
	every := b.interval(time.Now())
	if b.failure != "" || b.relist {
		every = askEvery
	}
	wait := time.Since(b.listed) < every
	b.mu.Unlock()
	if wait {
		return
	}
	nodes, err := b.fleet.Nodes(ctx, b.names)
	b.mu.Lock()
	defer b.mu.Unlock()
	b.listed, b.stale, b.failure, b.relist = time.Now(), true, "", false
	if err != nil {
		b.failure = err.Error()
		return
	}
	former := map[string]*member{}
	for _, m := range b.members {
		former[m.Name] = m
	}
	b.rehoused = true // nodes may have other addresses
	b.members = b.members[:0]
	for _, n := range nodes {
		m := former[n.Name]
		if m == nil {
			m, b.remade = &member{changed: time.Now()}, true
		}
		if m.Pod != n.Pod {
			m.asked = time.Time{}
		}
		delete(former, n.Name)
		m.Node = n
		if n.Trouble != nil {
			m.fails(n.Trouble, time.Now())
		}
		b.members = append(b.members, m)
	}
	for _, m := range former {
		b.fill(m, nil)
		b.remade = true
	}
}

// fails takes in why a node doesn't answer.
func (m *member) fails(t *Trouble, now time.Time) {
	if m.trouble == nil || m.trouble.State != t.State {
		m.changed = now
	}
	m.trouble, m.asked = t, now
}

// due are the nodes whose turn it is, those that wait longest first.
func (b *Board) due(now time.Time) (out []*member) {
	b.mu.Lock()
	defer b.mu.Unlock()
	every := b.interval(now)
	for _, m := range b.members {
		wait := every
		if m.trouble != nil {
			wait = min(wait, troubledEvery)
		}
		if m.pending == 0 && m.Node.Trouble == nil && now.Sub(m.asked) >= wait {
			out = append(out, m)
		}
	}
	slices.SortStableFunc(out, func(a, b *member) int { return a.asked.Compare(b.asked) })
	for _, m := range out {
		m.pending++
	}
	return out
}

// said is an answer on its way to the board.
type said struct {
	status   plan.Status // without service ports
	services []saidService
}

type saidService struct {
	servicePort
	cell
	failed uint64
}

// ask asks a node and takes in what it says. That its connections can't be read costs it nothing but its flows.
func (b *Board) ask(ctx context.Context, m *member) {
	defer b.over(m)
	b.mu.Lock()
	n, wantFlows := m.Node, time.Since(m.flowsAt) >= max(flowsEvery, b.interval(time.Now()))
	b.mu.Unlock()
	s, err := listen(ctx, b, m, func(ctx context.Context, p *patience) (*said, error) {
		s, held := &said{}, false
		defer func() {
			if held {
				<-b.reading
			}
		}()
		var err error
		s.status, err = b.client(ctx, n).EachService(ctx, func(row *plan.ServiceStatus) {
			if !held {
				p.rest()
				select {
				case b.reading <- struct{}{}:
					held = true
				case <-ctx.Done():
				}
			}
			p.hears()
			if len(s.services) >= rowsAtMost {
				p.end(errTooManyRows)
				return
			}
			s.services = append(s.services, newSaid(row))
		})
		return s, err
	})
	var f flows
	if wantFlows = wantFlows && err == nil; wantFlows {
		var failure error
		if f, failure = listen(ctx, b, m, func(ctx context.Context, p *patience) (flows, error) { return b.readFlows(ctx, b.client(ctx, n), p) }); failure != nil {
			f = flows{failure: troubleOf(failure, b.timeout).Error()}
		}
	}
	if ctx.Err() != nil {
		return
	}
	now := time.Now()
	b.mu.Lock()
	defer b.mu.Unlock()
	b.stale = true
	if t := troubleOf(err, b.timeout); t != nil {
		b.relist = b.relist || isGone(err)
		m.fails(t, now)
		return
	}
	if m.trouble != nil || !m.known {
		m.changed = now
	}
	m.known, m.trouble, m.asked, m.answered, m.status = true, nil, now, now, s.status
	if wantFlows {
		m.flows, m.flowsAt = f, now
	}
	if slices.Contains(b.members, m) {
		b.fill(m, s.services)
	}
}

var errTooManyRows = fmt.Errorf("its answer has more than %d service ports", rowsAtMost)

// over takes note that a question to a node isn't under way any more.
func (b *Board) over(m *member) {
	b.mu.Lock()
	defer b.mu.Unlock()
	m.pending--
}

// client is for one question. Its connection is given up with the question: net/http would go on with it for later ones.
func (b *Board) client(ctx context.Context, n Node) *web.Client {
	return web.NewRemoteClient(func(context.Context) (net.Conn, error) { return b.dial(ctx, n) })
}

// dial connects to a node's kproxy. It refuses to while an earlier connection to the pod is still being opened: client-go can't
// be told to give up, so that a node which hangs would have one more with each question.
func (b *Board) dial(ctx context.Context, n Node) (net.Conn, error) {
	b.mu.Lock()
	busy := b.dialing[n.Pod]
	b.dialing[n.Pod] = true
	b.mu.Unlock()
	if busy {
		return nil, fmt.Errorf("an earlier connection is still being opened: %w", context.DeadlineExceeded)
	}
	defer func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		delete(b.dialing, n.Pod)
	}()
	return b.fleet.Dial(ctx, n)
}

// patience limits how long an answer is waited for: for the board's time-out until it begins, and as long for each part of it.
// The time in which others' answers are being read doesn't count: that isn't the node's fault. All of the answer has
// answerTimeout from its first part on.
type patience struct {
	timeout   time.Duration
	idle, all *time.Timer
	end       context.CancelCauseFunc
}

// rest stops the time until the answer's next part.
func (p *patience) rest() { p.idle.Stop() }

// hears is called for each part.
func (p *patience) hears() {
	p.idle.Reset(p.timeout)
	if p.all == nil {
		p.all = time.AfterFunc(answerTimeout, func() { p.end(context.DeadlineExceeded) })
	}
}

// listen has f read an answer of a node as long as there is patience. It leaves f behind where that doesn't end with its context;
// as long as f goes on, the node isn't asked again.
func listen[T any](ctx context.Context, b *Board, m *member, f func(context.Context, *patience) (T, error)) (T, error) {
	ctx, end := context.WithCancelCause(ctx)
	defer end(nil)
	b.mu.Lock()
	m.pending++
	b.mu.Unlock()
	v, err := until(ctx, func(ctx context.Context) (T, error) {
		defer b.over(m)
		p := &patience{timeout: b.timeout, idle: time.AfterFunc(b.timeout, func() { end(context.DeadlineExceeded) }), end: end}
		defer func() {
			p.idle.Stop()
			if p.all != nil {
				p.all.Stop()
			}
		}()
		return f(ctx, p)
	})
	if cause := context.Cause(ctx); cause != nil {
		err = cause
	}
	return v, err
}

// errorOf says what keeps an answering kproxy from what it should do.
func errorOf(st *plan.Status) string {
	text := cmp.Or(st.Sync.LastError, st.NotReady)
	for _, s := range st.Sources {
		text = cmp.Or(text, s.Error)
	}
	return text
}

func newSaid(row *plan.ServiceStatus) saidService {
	s := saidService{failed: row.Connections.Failed}
	s.title, s.namespace, s.name, s.addresses = row.Title(), row.Namespace, row.Name, row.Addresses
	s.key = s.title + "/" + strings.ToLower(row.Protocol)
	h := fnv.New32a()
	add := func(a netip.AddrPort) {
		text, _ := a.MarshalBinary()
		h.Write(append(text, byte(len(text))))
	}
	for _, a := range row.Addresses {
		add(a)
	}
	h.Write([]byte{byte(row.NodePort), byte(row.NodePort >> 8)})
	slices.SortFunc(row.Endpoints, func(a, b plan.EndpointStatus) int { return a.Address.Compare(b.Address) })
	for i := range row.Endpoints {
		e := &row.Endpoints[i]
		add(e.Address)
		s.servicePort.endpoints = append(s.servicePort.endpoints, endpoint{e.Address, e.Node})
	}
	s.cell.view = max(h.Sum32(), 1)
	s.active = uint32(row.Connections.Active)
	s.usable, s.cell.endpoints = uint16(row.UsableEndpoints()), uint16(len(row.Endpoints))
	s.plane = uint8(max(slices.Index(planes, row.DataPlane), 0))
	s.class = uint8(slices.Index(classes, row.Condition(false)))
	s.errors = uint32(slices.Index(classes, row.Condition(true))) // until fill knows whether some failed
	return s
}

// fill takes in what a node has of service ports. The caller holds the lock.
func (b *Board) fill(m *member, rows []saidService) {
	was := m.cells
	m.cells, m.active = make([]cell, len(b.services), len(b.services)+64), 0
	for i := range rows {
		s := &rows[i]
		id := b.intern(s)
		for int(id) >= len(m.cells) {
			m.cells = append(m.cells, cell{})
		}
		if m.cells[id].view != 0 {
			continue // twice in one answer
		}
		c, failing := s.cell, uint8(s.errors)
		c.failed, c.errors = uint32(s.failed), 0
		if int(id) < len(was) && was[id].view != 0 {
			if c.errors = c.failed - was[id].failed; c.errors > 1<<31 { // its kproxy has begun anew
				c.errors = c.failed
			}
		} else {
			b.services[id].holders++
		}
		if c.errors > 0 {
			c.class = failing
		}
		m.active += int64(c.active)
		m.cells[id] = c
	}
	for id := range was {
		if id < len(m.cells) {
			m.cells[id].since = was[id].since
		}
		if was[id].view != 0 && (id >= len(m.cells) || m.cells[id].view == 0) {
			if b.services[id].holders--; b.services[id].holders == 0 {
				b.release(int32(id))
			}
		}
	}
}

// intern returns the id of a service port, and keeps where its endpoints are.
func (b *Board) intern(s *saidService) int32 {
	id, known := b.ids[s.key]
	if !known {
		if n := len(b.free); n > 0 {
			id, b.free = b.free[n-1], b.free[:n-1]
		} else {
			id = int32(len(b.services))
			b.services = append(b.services, servicePort{})
		}
		b.services[id] = servicePort{key: strings.Clone(s.key)}
		b.ids[b.services[id].key] = id
		b.remade = true
	}
	p := &b.services[id]
	if p.view != s.cell.view && (!known || b.follows(id, s.cell.view)) {
		p.view, p.namespace, p.name, p.title, p.addresses, p.endpoints = s.cell.view, s.namespace, s.name, s.title, s.addresses, s.servicePort.endpoints
		b.rehoused = true
	}
	return id
}

// follows reports whether a view is to be shown in place of another: it is most nodes', or none is.
func (b *Board) follows(id int32, view uint32) bool {
	return int(id) >= len(b.drawn.views) || b.drawn.views[id] == 0 || b.drawn.views[id] == view
}

func (b *Board) release(id int32) {
	delete(b.ids, b.services[id].key)
	b.services[id] = servicePort{}
	b.free = append(b.free, id)
	b.remade, b.rehoused = true, true
}
