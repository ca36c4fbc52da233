package cluster

import (
	"cmp"
	"fmt"
	"maps"
	"math/bits"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"time"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/web"
)

// Handler serves the dashboard of all nodes. All of it only reads.
func (b *Board) Handler() http.Handler {
	answers := map[string]func(*http.Request) (any, error){
		"/api/v1/summary": b.summary, "/api/v1/services": b.serviceList, "/api/v1/grid": b.grid,
		"/api/v1/service": b.service, "/api/v1/nodes": b.nodeList, "/api/v1/flows": b.flowList,
	}
	for path, answer := range answers {
		answers[path] = func(r *http.Request) (any, error) {
			b.mu.Lock()
			defer b.mu.Unlock()
			b.viewed = time.Now()
			return answer(r)
		}
	}
	return web.ClusterAPI(answers)
}

// What a request may ask for at once.
const (
	rowsOfPage                     = 50 // unless it says
	rowsOfPageAtMost               = 200
	gridRowsAtMost, gridColsAtMost = 256, 1024
)

// Summary is the JSON of /api/v1/summary.
type Summary struct {
	Time     time.Time `json:"time"`
	Failure  string    `json:"failure,omitempty"` // why nodes can't be listed; the rest is as of before
	Verdict  []Line    `json:"verdict"`           // what matters most first
	Nodes    int       `json:"nodes"`
	Services int       `json:"services"`
	Interval float64   `json:"intervalSeconds"`
	Oldest   time.Time `json:"oldest,omitzero"` // answer of a node that answers
}

// Line is a part of the verdict, and where more of it stands.
type Line struct {
	Text string `json:"text"`
	Tone string `json:"tone"` // bad, warn, good or note
	Page string `json:"page"` // services or nodes
	// Filter is of the page: class of the services, state of the nodes; empty for all.
	Filter string `json:"filter,omitempty"`
}

func (b *Board) summary(*http.Request) (any, error) {
	d := b.draw(b.viewed)
	s := &Summary{
		Time: time.Now(), Failure: b.failure, Verdict: b.verdict(d), Nodes: len(b.members), Services: len(d.order), Interval: b.interval(time.Now()).Seconds(),
	}
	for _, m := range b.members {
		if m.trouble == nil && m.known && (s.Oldest.IsZero() || m.answered.Before(s.Oldest)) {
			s.Oldest = m.answered
		}
	}
	return s, nil
}

// state says how a node stands, in the words of [State] or of its kproxy.
func (m *member) state() State {
	switch {
	case m.trouble != nil:
		return m.trouble.State
	case !m.known:
		return Unasked
	}
	return State(m.status.Health())
}

// verdictWords are what is said of one service port and of several in a class.
var verdictWords = map[Class]struct{ one, several, tone string }{
	plan.Unanswered: {"service port doesn't answer", "service ports don't answer", "bad"},
	plan.Failing:    {"service port fails connections", "service ports fail connections", "bad"},
	Missing:         {"service port is missing on a node that answers", "service ports are missing on nodes that answer", "bad"},
	plan.PartlyDown: {"service port has an endpoint down", "service ports have an endpoint down", "warn"},
	plan.Troubled:   {"service port has a problem", "service ports have a problem", "warn"},
}

// Filters of nodes besides their states.
const (
	silentNodes  = "silent"
	laggingNodes = "lagging"
	ailingNodes  = "problem"
)

func counted(n int, one, several string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, several)
}

func (b *Board) verdict(d *drawing) (out []Line) {
	if b.failure != "" {
		out = append(out, Line{Text: "The nodes can't be listed: " + b.failure, Tone: "bad", Page: "nodes"})
	}
	say := func(n int, text, tone, page, filter string) {
		if n > 0 {
			out = append(out, Line{Text: text, Tone: tone, Page: page, Filter: filter})
		}
	}
	say(d.silent, fmt.Sprintf("%d of %s", d.silent, counted(len(b.members), "node doesn't answer", "nodes don't answer")), "bad", "nodes", silentNodes)
	for i, class := range classes {
		if words, ok := verdictWords[class]; ok {
			say(int(d.tally[i]), counted(int(d.tally[i]), words.one, words.several), words.tone, "services", string(class))
		}
	}
	say(d.lagging, counted(d.lagging, "node lags: it differs from most others", "nodes lag: they differ from most others"), "warn", "nodes", laggingNodes)
	say(d.split, counted(d.split, "service port differs between nodes, without a majority", "service ports differ between nodes, without a majority"), "warn", "services", differs)
	say(d.ailing, counted(d.ailing, "node answers with a problem", "nodes answer with a problem"), "warn", "nodes", ailingNodes)
	say(d.unasked, counted(d.unasked, "node hasn't been asked yet", "nodes haven't been asked yet"), "note", "nodes", string(Unasked))
	if len(b.members) == 0 && b.failure == "" {
		text := "There are no nodes"
		if b.listed.IsZero() {
			text = "The nodes are being listed"
		}
		out = append(out, Line{Text: text, Tone: "note", Page: "nodes"})
	}
	if len(out) == 0 {
		text := fmt.Sprintf("All %d service ports are fine on all %d nodes", len(d.order), len(b.members))
		out = append(out, Line{Text: text, Tone: "good", Page: "services"})
	}
	return out
}

// ServiceRow is a service port on all nodes.
type ServiceRow struct {
	Key     string                   `json:"key"`   // NAMESPACE/NAME[:PORT]/PROTOCOL
	Title   string                   `json:"title"` // as commands take it
	Classes map[Class]int32          `json:"classes"`
	Worst   Class                    `json:"worst"`
	Planes  map[plan.DataPlane]int32 `json:"planes"` // nodes by data plane
	Errors  uint64                   `json:"errors"`
	Active  int64                    `json:"activeConnections"`
	Differ  int32                    `json:"differ"` // nodes that differ from most
	Split   bool                     `json:"split"`  // no view is most nodes'
}

func (b *Board) row(d *drawing, id int32) ServiceRow {
	s, p := &d.services[id], &b.services[id]
	r := ServiceRow{Key: p.key, Title: p.title, Classes: map[Class]int32{}, Worst: classes[s.worst], Planes: map[plan.DataPlane]int32{}, Errors: s.errors, Active: s.active, Differ: s.differ, Split: s.split}
	for i, n := range s.classes {
		if n > 0 && i > 0 {
			r.Classes[classes[i]] = n
		}
	}
	for i, n := range s.planes {
		if n > 0 && i > 0 {
			r.Planes[planes[i]] = n
		}
	}
	return r
}

// differs is the filter of service ports in which nodes differ.
const differs = "differs"

// chosen are the service ports that a request is about, broken ones first: those whose title has q, that are in class
// on some node, and in plane; with node, on that node.
func (b *Board) chosen(d *drawing, r *http.Request) ([]int32, error) {
	q := r.URL.Query()
	text, class, plane, on := strings.ToLower(q.Get("q")), q.Get("class"), q.Get("plane"), q.Get("node")
	c, p := slices.Index(classes, Class(class)), slices.Index(planes, plan.DataPlane(plane))
	if c < 0 && class != differs || p < 0 {
		return nil, web.Refusal(http.StatusBadRequest, "there is no class %q or data plane %q; classes are %v and %s, data planes %v", class, plane, classes[1:], differs, planes[1:])
	}
	var m *member
	if on != "" {
		if m = b.member(on); m == nil {
			return nil, noNode(on)
		}
	}
	var out []int32
	for _, id := range d.order {
		s := &d.services[id]
		fits := strings.Contains(strings.ToLower(b.services[id].key), text)
		if m == nil {
			fits = fits && (c < 1 || s.classes[c] > 0) && (class != differs || s.differ > 0 || s.split) && (p == 0 || s.planes[p] > 0)
		} else if fits {
			cell := m.at(id)
			fits = (c < 1 || int(cell.class) == c) && (class != differs || cell.since > 0) && (p == 0 || int(cell.plane) == p)
		}
		if fits {
			out = append(out, id)
		}
	}
	return out, nil
}

func (b *Board) member(name string) *member {
	for _, m := range b.members {
		if m.Name == name {
			return m
		}
	}
	return nil
}

// at is the cell of a service port as it is known now: what a node said that doesn't answer any more isn't.
func (m *member) at(id int32) (c cell) {
	switch {
	case m.trouble != nil || !m.known:
		c.class = classUnknown
	case int(id) < len(m.cells):
		c = m.cells[id]
	}
	return c
}

func noNode(name string) error {
	return web.Refusal(http.StatusNotFound, "%v %s among those that are asked", ErrNoNode, name)
}

// page is the part of a list that a request wants.
func page[T any](r *http.Request, all []T) ([]T, int, error) {
	limit, err := web.Parameter(r, "limit", rowsOfPage, 1, rowsOfPageAtMost)
	if err != nil {
		return nil, 0, err
	}
	offset, err := web.Parameter(r, "offset", 0, 0, 1<<30)
	if err != nil {
		return nil, 0, err
	}
	offset = min(offset, len(all))
	return all[offset:min(offset+limit, len(all))], offset, nil
}

// ServiceList is the JSON of /api/v1/services.
type ServiceList struct {
	All    int          `json:"all"`
	Total  int          `json:"total"` // that fit the filter
	Offset int          `json:"offset"`
	Rows   []ServiceRow `json:"rows"`
}

func (b *Board) serviceList(r *http.Request) (any, error) {
	d := b.draw(b.viewed)
	ids, err := b.chosen(d, r)
	if err != nil {
		return nil, err
	}
	list := &ServiceList{All: len(d.order), Total: len(ids), Rows: []ServiceRow{}}
	if ids, list.Offset, err = page(r, ids); err != nil {
		return nil, err
	}
	for _, id := range ids {
		list.Rows = append(list.Rows, b.row(d, id))
	}
	return list, nil
}

// Grid is the JSON of /api/v1/grid: service ports by nodes, several of either in one where there are more than were asked
// for. Row i has the service ports from i*Services/Rows on in the order of /api/v1/services, column j nodes by name alike.
type Grid struct {
	Rows     int      `json:"rows"`
	Columns  int      `json:"columns"`
	Services int      `json:"services"`
	Nodes    []string `json:"nodes"` // the first of each column
	All      int      `json:"all"`   // nodes
	Classes  []Class  `json:"classes"`
	// Planes are what the second byte of a cell is an index in, as Classes are of the first.
	Planes []plan.DataPlane `json:"planes"`
	// Cells have three bytes each, row by row: the worst class, the data plane, or 255 for several, and the number of bits
	// of the errors' number. Base64.
	Cells []byte `json:"cells"`
}

const severalPlanes = 255

func (b *Board) grid(r *http.Request) (any, error) {
	rows, err := web.Parameter(r, "rows", 64, 1, gridRowsAtMost)
	if err != nil {
		return nil, err
	}
	columns, err := web.Parameter(r, "columns", 128, 1, gridColsAtMost)
	if err != nil {
		return nil, err
	}
	ids, err := b.chosen(b.draw(b.viewed), r)
	if err != nil {
		return nil, err
	}
	g := &Grid{Rows: min(rows, len(ids)), Columns: min(columns, len(b.members)), Services: len(ids), All: len(b.members), Nodes: []string{}, Classes: classes, Planes: planes}
	g.Cells = make([]byte, 3*g.Rows*g.Columns)
	for j := range g.Columns {
		from, to := j*len(b.members)/g.Columns, (j+1)*len(b.members)/g.Columns
		g.Nodes = append(g.Nodes, b.members[from].Name)
		for i := range g.Rows {
			out := g.Cells[3*(i*g.Columns+j):]
			failed := uint64(0)
			for _, m := range b.members[from:to] {
				for _, id := range ids[i*len(ids)/g.Rows : (i+1)*len(ids)/g.Rows] {
					c := m.at(id)
					if c.class > 0 && (out[0] == 0 || c.class < out[0]) {
						out[0] = c.class
					}
					switch {
					case c.plane == 0 || c.class == classUnknown:
					case out[1] == 0:
						out[1] = c.plane
					case out[1] != c.plane:
						out[1] = severalPlanes
					}
					failed += uint64(c.errors)
				}
			}
			out[2] = byte(bits.Len64(failed))
		}
	}
	return g, nil
}

// ServiceOnNode is a service port on a node.
type ServiceOnNode struct {
	Node      string         `json:"node"`
	State     State          `json:"state"` // of the node
	Class     Class          `json:"class"`
	DataPlane plan.DataPlane `json:"dataplane"`
	Usable    uint16         `json:"usable"`
	Endpoints uint16         `json:"endpoints"`
	Here      int            `json:"here"` // endpoints that are on the node
	Active    uint32         `json:"activeConnections"`
	Errors    uint32         `json:"errors"`
	Differs   time.Time      `json:"differs,omitzero"` // from most nodes, since
	Answered  time.Time      `json:"answered,omitzero"`
}

// ServicePage is the JSON of /api/v1/service: a service port's way through the cluster.
type ServicePage struct {
	ServiceRow
	Addresses []netip.AddrPort `json:"addresses"`
	Endpoints int              `json:"endpoints"`
	On        []EndpointsOn    `json:"on"` // nodes with most endpoints
	OnAll     int              `json:"onAll"`
	All       int              `json:"all"` // nodes
	Offset    int              `json:"offset"`
	Nodes     []ServiceOnNode  `json:"nodes"` // worst first
}

// EndpointsOn are a service port's endpoints on a node.
type EndpointsOn struct {
	Node      string `json:"node"` // empty where it isn't known
	Endpoints int    `json:"endpoints"`
}

// nodesNamed bounds the nodes that a service port's way names.
const nodesNamed = 12

func (b *Board) service(r *http.Request) (any, error) {
	key := r.URL.Query().Get("key")
	id, ok := b.ids[key]
	if !ok {
		return nil, web.Refusal(http.StatusNotFound, "there is no service port %q on any node; a key is NAMESPACE/NAME[:PORT]/PROTOCOL", key)
	}
	d := b.draw(b.viewed)
	p := &b.services[id]
	out := &ServicePage{ServiceRow: b.row(d, id), Addresses: p.addresses, Endpoints: len(p.endpoints), On: []EndpointsOn{}, All: len(b.members), Nodes: []ServiceOnNode{}}
	on := map[string]int{}
	for i := range p.endpoints {
		on[p.endpoints[i].node]++
	}
	out.OnAll = len(on)
	for _, name := range slices.SortedFunc(maps.Keys(on), func(a, b string) int { return cmp.Or(cmp.Compare(on[b], on[a]), cmp.Compare(a, b)) }) {
		if len(out.On) < nodesNamed {
			out.On = append(out.On, EndpointsOn{name, on[name]})
		}
	}
	all := slices.Clone(b.members)
	slices.SortStableFunc(all, func(m, n *member) int {
		x, y := m.at(id), n.at(id)
		return cmp.Or(cmp.Compare(rankOf(x), rankOf(y)), cmp.Compare(y.errors, x.errors))
	})
	all, offset, err := page(r, all)
	if err != nil {
		return nil, err
	}
	out.Offset = offset
	for _, m := range all {
		c := m.at(id)
		row := ServiceOnNode{Node: m.Name, State: m.state(), Class: classes[c.class], DataPlane: planes[c.plane], Usable: c.usable, Endpoints: c.endpoints, Here: on[m.Name], Active: c.active, Errors: c.errors, Answered: m.answered}
		if c.since > 0 {
			row.Differs = time.Unix(int64(c.since), 0)
		}
		out.Nodes = append(out.Nodes, row)
	}
	return out, nil
}

// rankOf orders cells, broken ones first, and after those that don't fare well those that differ.
func rankOf(c cell) uint8 {
	switch {
	case c.class == 0:
		return classFine + 1
	case c.since > 0:
		return min(c.class, classUnknown)
	}
	return c.class
}

// NodeRow is a node and how far it is behind.
type NodeRow struct {
	Node       string          `json:"node"`
	Pod        string          `json:"pod"`
	State      State           `json:"state"`
	Error      string          `json:"error,omitempty"`
	Warnings   []string        `json:"warnings,omitempty"`
	Since      time.Time       `json:"since"`             // it answers, or doesn't
	Answering  bool            `json:"answering"`         // now; what it said before isn't shown as of now
	Answered   time.Time       `json:"answered,omitzero"` // last
	Version    string          `json:"version"`
	Mode       string          `json:"mode"`
	Generation uint64          `json:"generation"` // passes of its reconcile loop
	LastSync   time.Time       `json:"lastSuccess,omitzero"`
	Services   int32           `json:"services"`
	Active     int64           `json:"activeConnections"`
	Errors     uint64          `json:"errors"`
	Differ     int32           `json:"differ"` // service ports in which it differs from most nodes
	Differs    time.Time       `json:"differs,omitzero"`
	Classes    map[Class]int32 `json:"classes"`
	rank       int
}

// NodeList is the JSON of /api/v1/nodes.
type NodeList struct {
	All    int       `json:"all"`
	Total  int       `json:"total"`
	Offset int       `json:"offset"`
	Rows   []NodeRow `json:"rows"`
}

// nodeList lists nodes, those with trouble first: whose name has q or is that of node, in a state, or that are silent, lag or have a problem.
func (b *Board) nodeList(r *http.Request) (any, error) {
	d := b.draw(b.viewed)
	q := r.URL.Query()
	text, state, name := strings.ToLower(q.Get("q")), q.Get("state"), q.Get("node")
	if name != "" && b.member(name) == nil {
		return nil, noNode(name)
	}
	list := &NodeList{All: len(b.members)}
	rows := []NodeRow{}
	for i, m := range b.members {
		n := b.nodeRow(d, i)
		ails := n.rank == rankAiling || m.trouble == nil && (n.Error != "" || len(n.Warnings) > 0)
		fits := state == "" || state == string(n.State) || state == silentNodes && m.trouble != nil || state == laggingNodes && n.Differ > 0 || state == ailingNodes && ails
		if fits && strings.Contains(strings.ToLower(n.Node), text) && (name == "" || n.Node == name) {
			rows = append(rows, n)
		}
	}
	slices.SortStableFunc(rows, func(a, b NodeRow) int { return cmp.Compare(a.rank, b.rank) })
	var err error
	list.Total = len(rows)
	list.Rows, list.Offset, err = page(r, rows)
	return list, err
}

// Nodes in the order in which they are listed.
const (
	rankSilent = iota
	rankAiling
	rankLagging
	rankUnasked
	rankFine
)

func (b *Board) nodeRow(d *drawing, i int) NodeRow {
	m, of, st := b.members[i], &d.members[i], &b.members[i].status
	n := NodeRow{
		Node: m.Name, Pod: m.Pod, State: m.state(), Error: errorOf(st), Warnings: st.Warnings, Since: m.changed, Answered: m.answered, Version: st.Version, Mode: string(st.Mode),
		Generation: st.Sync.Generation, LastSync: st.Sync.LastSuccess, Services: of.services, Answering: m.trouble == nil && m.known, Errors: of.errors, Differ: of.differ, Classes: map[Class]int32{}, rank: rankFine,
	}
	for class, count := range of.classes {
		if count > 0 && class > 0 {
			n.Classes[classes[class]] = count
		}
	}
	if n.Answering {
		n.Active = m.active
	}
	if of.silentTo > 0 {
		n.Warnings = append([]string{silentTo(of.silentTo, d.answering)}, n.Warnings...)
	}
	if of.since > 0 {
		n.Differs = time.Unix(int64(of.since), 0)
	}
	switch {
	case m.trouble != nil:
		n.rank, n.Error = rankSilent, m.trouble.Text
	case !m.known:
		n.rank = rankUnasked
	case m.ails() || of.silentTo > 0:
		n.rank = rankAiling
	case of.differ > 0:
		n.rank = rankLagging
	}
	return n
}
