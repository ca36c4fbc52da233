package cluster

import (
	"cmp"
	"context"
	"hash/fnv"
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
	Client(Node) *web.Client
}

// Board is what all nodes said last, in a few bytes for each service port of each node. Nodes are asked in turn rather
// than followed by streams: a stream would bring each second what each service port of each node has counted, and hold a connection
// through the API server for each node; what is asked for bounds both, and the answers aren't kept.
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
	free     []int32 // of services, to be used again
	owners   map[netip.Addr]int32
	drawn    *drawing
	stale    bool // members have changed since drawn
}

// member is a node, and what it said last.
type member struct {
	Node
	trouble         *Trouble // why it didn't answer when it was asked last; nil if it did
	health          State    // of what it answered last
	err             string
	version, mode   string
	warnings        []string
	asked, answered time.Time
	changed         time.Time // since when it answers, or doesn't
	generation      uint64
	lastSync        time.Time
	active          int64
	cells           []cell // by id of the service port
	flows           []flow
	unlisted        int    // connections that aren't in flows
	silent          string // why there are no flows
	flowsAt         time.Time
	pending, known  bool // a question is under way; it has answered at least once
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

// Class is how a service port fares on a node, or on some: a condition, or one of these.
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
	view                        uint32 // that endpoints are of
	addresses                   []netip.AddrPort
	endpoints                   []endpoint
}

type endpoint struct {
	address netip.AddrPort
	node    string
}

// NewBoard returns a board of the nodes of given names, or of all. Each is waited for so long.
func NewBoard(f Fleet, names []string, timeout time.Duration) *Board {
	return &Board{fleet: f, names: names, timeout: timeout, reading: make(chan struct{}, readAtOnce), ids: map[string]int32{}, owners: map[netip.Addr]int32{}, drawn: &drawing{}}
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

	answerTimeout = time.Minute // of all of an answer
)

// interval is how often each node is asked: the more nodes and service ports, the more seldom.
func (b *Board) interval() time.Duration {
	cells := len(b.members) * len(b.ids)
	return max(askEvery, time.Duration(len(b.members))*askNode, time.Duration(cells/cellsASecond)*time.Second)
}

// Run asks all nodes, again and again, until ctx ends.
func (b *Board) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
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

// list brings the list of nodes up to date. Where that fails, the former one stays.
func (b *Board) list(ctx context.Context) {
	b.mu.Lock()
	every := b.interval()
	if b.failure != "" {
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
	b.listed, b.stale, b.failure = time.Now(), true, ""
	if err != nil {
		b.failure = err.Error()
		return
	}
	former := map[string]*member{}
	for _, m := range b.members {
		former[m.Name] = m
	}
	b.members = b.members[:0]
	for _, n := range nodes {
		m := former[n.Name]
		if m == nil {
			m = &member{changed: time.Now()}
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
	every := b.interval()
	for _, m := range b.members {
		wait := every
		if m.trouble != nil {
			wait = min(wait, troubledEvery)
		}
		if !m.pending && m.Node.Trouble == nil && now.Sub(m.asked) >= wait {
			out = append(out, m)
		}
	}
	slices.SortStableFunc(out, func(a, b *member) int { return a.asked.Compare(b.asked) })
	for _, m := range out {
		m.pending = true
	}
	return out
}

// said is an answer on its way to the board.
type said struct {
	status   plan.Status // without service ports
	services []saidService
	flows    []flow
	unlisted int
	silent   string // why there are no flows
}

type saidService struct {
	servicePort
	cell
	failed uint64
}

// ask asks a node and takes in what it says. A question that isn't over with its time keeps the node from being asked again.
// A node has the board's time-out to begin its answer, and then for each part of it: it isn't its fault that others' are being read.
func (b *Board) ask(ctx context.Context, m *member) {
	b.mu.Lock()
	n, flows := m.Node, time.Since(m.flowsAt) >= max(flowsEvery, b.interval())
	b.mu.Unlock()
	waiting, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	idle := time.AfterFunc(b.timeout, func() { cancel(context.DeadlineExceeded) })
	defer idle.Stop()
	s, err := within(waiting, answerTimeout, func(ctx context.Context) (*said, error) {
		defer func() {
			b.mu.Lock()
			m.pending = false
			b.mu.Unlock()
		}()
		s, held := &said{}, false
		client := b.fleet.Client(n)
		var err error
		s.status, err = client.EachService(ctx, func(row *plan.ServiceStatus) {
			if !held {
				idle.Stop()
				select {
				case b.reading <- struct{}{}:
					held = true
				case <-ctx.Done():
				}
			}
			idle.Reset(b.timeout)
			s.services = append(s.services, newSaid(row))
		})
		if held {
			<-b.reading
		}
		if err != nil || !flows {
			return s, err
		}
		if err := b.readFlows(ctx, client, s); err != nil {
			s.silent = troubleOf(err, b.timeout).Error()
		}
		return s, nil
	})
	if err != nil && context.Cause(waiting) == context.DeadlineExceeded {
		err = context.DeadlineExceeded
	}
	if ctx.Err() != nil {
		return
	}
	now := time.Now()
	b.mu.Lock()
	defer b.mu.Unlock()
	b.stale = true
	if t := troubleOf(err, b.timeout); t != nil {
		m.fails(t, now)
		return
	}
	if m.trouble != nil || !m.known {
		m.changed = now
	}
	m.known, m.trouble, m.asked, m.answered = true, nil, now, now
	st := &s.status
	m.health, m.version, m.mode, m.warnings, m.generation, m.lastSync = State(st.Health()), st.Version, string(st.Mode), st.Warnings, st.Sync.Generation, st.Sync.LastSuccess
	m.err = errorOf(st)
	if flows {
		m.flows, m.unlisted, m.silent, m.flowsAt = s.flows, s.unlisted, s.silent, now
	}
	if slices.Contains(b.members, m) {
		b.fill(m, s.services)
	}
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
	}
	p := &b.services[id]
	if p.view != s.cell.view {
		b.disown(id)
		p.view, p.namespace, p.name, p.title, p.addresses, p.endpoints = s.cell.view, s.namespace, s.name, s.title, s.addresses, s.servicePort.endpoints
		for i := range p.endpoints {
			if a := p.endpoints[i].address.Addr(); b.owners[a] == 0 {
				b.owners[a] = id + 1
			}
		}
	}
	return id
}

// disown forgets whose a service port's endpoints are.
func (b *Board) disown(id int32) {
	for i := range b.services[id].endpoints {
		if a := b.services[id].endpoints[i].address.Addr(); b.owners[a] == id+1 {
			delete(b.owners, a)
		}
	}
}

func (b *Board) release(id int32) {
	b.disown(id)
	delete(b.ids, b.services[id].key)
	b.services[id] = servicePort{}
	b.free = append(b.free, id)
}
