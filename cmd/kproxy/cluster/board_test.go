package cluster

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"kproxy.dev/kproxy/plan"
)

// boardOf is a board of what nodes answered just now.
func boardOf(answers []Answer[plan.Status]) *Board {
	b := NewBoard(nil, nil, 10*time.Second)
	for i := range answers {
		m := &member{Node: answers[i].Node}
		b.members = append(b.members, m)
		b.hears(m, answers[i])
	}
	return b
}

// hears takes in an answer.
func (b *Board) hears(m *member, a Answer[plan.Status]) {
	b.stale = true
	if m.trouble = a.Trouble; m.trouble != nil {
		return
	}
	var rows []saidService
	for i := range a.Value.Services {
		rows = append(rows, newSaid(&a.Value.Services[i]))
	}
	m.known, m.status, m.answered = true, a.Value, time.Now()
	b.fill(m, rows)
}

// settle sums the board up twice, so far apart that what differs counts.
func (b *Board) settle() *drawing {
	b.drawn = &drawing{}
	b.draw(time.Now())
	b.stale = true
	return b.draw(time.Now().Add(time.Minute))
}

// find is a service port's sums.
func (b *Board) find(t *testing.T, key string, d *drawing) *drawnService {
	t.Helper()
	id, ok := b.ids[key]
	if !ok {
		t.Fatalf("the board has no %s", key)
	}
	return &d.services[id]
}

const server = "default/server/tcp"

// Each way in which nodes fare and differ counts where it is, and in the verdict.
func TestBoard(t *testing.T) {
	refuse := func(s *plan.ServiceStatus) { s.Connections.Failed += 3 }
	for name, tc := range map[string]struct {
		change  func(of func(node int) *plan.ServiceStatus)
		then    func(*plan.ServiceStatus) // changes the first node's next answer
		class   Class
		nodes   int32 // in that class
		differ  int32
		verdict string // a part of it
	}{
		"all well":                      {class: plan.Fine, nodes: 3, verdict: "1 of 4 nodes don't answer"},
		"a node lacks a service":        {change: func(of func(int) *plan.ServiceStatus) { of(1).Name = "other" }, class: Missing, nodes: 1, differ: 1, verdict: "1 service port is missing on a node that answers"},
		"a node has another endpoint":   {change: func(of func(int) *plan.ServiceStatus) { of(1).Endpoints = of(1).Endpoints[1:] }, class: plan.Fine, nodes: 3, differ: 1, verdict: "1 node lags"},
		"an endpoint is down on a node": {change: func(of func(int) *plan.ServiceStatus) { of(2).Endpoints[0].Health = "down" }, class: plan.PartlyDown, nodes: 1, verdict: "1 service port has an endpoint down"},
		"connections fail":              {then: refuse, class: plan.Failing, nodes: 1, verdict: "1 service port fails connections"},
		"connections had failed":        {change: func(of func(int) *plan.ServiceStatus) { of(0).Connections.Failed = 9 }, then: func(*plan.ServiceStatus) {}, class: plan.Fine, nodes: 3},
		"its kproxy began anew":         {change: func(of func(int) *plan.ServiceStatus) { of(0).Connections.Failed = 9 }, then: func(s *plan.ServiceStatus) { s.Connections.Failed = 0 }, class: plan.Fine, nodes: 3},
	} {
		t.Run(name, func(t *testing.T) {
			answers := recorded(t)
			of := func(node int) *plan.ServiceStatus {
				list := answers[node].Value.Services
				return &list[slices.IndexFunc(list, func(s plan.ServiceStatus) bool { return s.Name == "server" })]
			}
			if tc.change != nil {
				tc.change(of)
			}
			b := boardOf(answers)
			if tc.then != nil {
				tc.then(of(0))
				b.hears(b.members[0], answers[0])
			}
			d := b.settle()
			s := b.find(t, server, d)
			if got := s.classes[slices.Index(classes, tc.class)]; got != tc.nodes || s.differ != tc.differ || s.classes[classUnknown] != 1 {
				t.Errorf("%+v, want %d nodes in class %s, %d that differ, one unknown", s, tc.nodes, tc.class, tc.differ)
			}
			if text := fmt.Sprint(b.verdict(d)); !strings.Contains(text, tc.verdict) {
				t.Errorf("verdict %s, want %q", text, tc.verdict)
			}
			if worst := b.services[d.order[0]].key; tc.class != plan.Fine && worst != server {
				t.Errorf("first is %s", worst)
			}
		})
	}
}

// What differs only until a node is asked again is no lag, and the time since when is kept over answers.
func TestBoardSettles(t *testing.T) {
	answers := recorded(t)
	answers[1].Value.Services = answers[1].Value.Services[1:]
	b := boardOf(answers)
	if d := b.draw(time.Now()); d.lagging != 0 {
		t.Errorf("%d nodes lag at once", d.lagging)
	}
	b.hears(b.members[1], answers[1])
	d := b.draw(time.Now().Add(time.Minute))
	if d.lagging != 1 || d.members[1].differ != 1 || time.Since(time.Unix(int64(d.members[1].since), 0)) > 30*time.Second {
		t.Errorf("%d nodes lag, the second %+v; want it alone, since the first answer", d.lagging, d.members[1])
	}
}

// A service port that no node has any more leaves nothing behind, and its place is used again.
func TestBoardForgets(t *testing.T) {
	answers := recorded(t)
	b := boardOf(answers)
	places := len(b.services)
	for i := range 3 {
		for j := range answers[i].Value.Services {
			answers[i].Value.Services[j].Namespace = "renamed"
		}
		b.hears(b.members[i], answers[i])
	}
	for key := range b.ids {
		if !strings.HasPrefix(key, "renamed/") {
			t.Errorf("%s is still there", key)
		}
	}
	if len(b.services) > 2*places || len(b.free) != len(b.services)-places {
		t.Errorf("%d places, %d of them free, for %d service ports", len(b.services), len(b.free), places)
	}
	for _, m := range b.members[:3] {
		b.fill(m, nil)
	}
	b.draw(time.Now())
	if len(b.ids) != 0 || len(b.owners) != 0 {
		t.Errorf("%d service ports and %d endpoints are left", len(b.ids), len(b.owners))
	}
}

// read asks a board for an answer.
func read[T any](t *testing.T, b *Board, path string) (v T) {
	t.Helper()
	w := httptest.NewRecorder()
	b.Handler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, path, nil))
	if err := json.Unmarshal(w.Body.Bytes(), &v); err != nil || w.Code != http.StatusOK {
		t.Fatalf("%s: %d %s", path, w.Code, w.Body)
	}
	return v
}

// What two nodes have differently has no majority, and isn't fine once that lasts.
func TestBoardSplit(t *testing.T) {
	answers := recorded(t)[:2]
	answers[1].Value.Services = answers[1].Value.Services[1:]
	b := boardOf(answers)
	for _, when := range []struct {
		after time.Duration
		split int
	}{{0, 0}, {time.Minute, 1}} {
		b.stale = true
		d := b.draw(time.Now().Add(when.after))
		if text := fmt.Sprint(b.verdict(d)); d.split != when.split || strings.Contains(text, "1 service port differs between nodes") != (when.split > 0) {
			t.Errorf("after %s: %d split, verdict %s; want %d", when.after, d.split, text, when.split)
		}
	}
}

// A service port that only a silent node had is left out as long as some node answers.
func TestBoardGone(t *testing.T) {
	answers := recorded(t)
	b := boardOf(answers)
	b.members[2].fails(&Trouble{TimedOut, "x"}, time.Now())
	for i := range 2 {
		for j := range answers[i].Value.Services {
			answers[i].Value.Services[j].Namespace = "renamed"
		}
		b.hears(b.members[i], answers[i])
	}
	d := b.settle()
	for _, id := range d.order {
		if !strings.HasPrefix(b.services[id].key, "renamed/") {
			t.Errorf("%s is listed", b.services[id].key)
		}
	}
	if s := read[Summary](t, b, "/api/v1/summary"); s.Services != len(answers[0].Value.Services) {
		t.Errorf("%d service ports are counted, want %d", s.Services, len(answers[0].Value.Services))
	}
	b.members[0].fails(&Trouble{TimedOut, "x"}, time.Now())
	b.members[1].fails(&Trouble{TimedOut, "x"}, time.Now())
	b.settle()
	if rows := read[ServiceList](t, b, "/api/v1/services").Rows; len(rows) != 2*len(answers[0].Value.Services) || rows[0].Worst != Unknown {
		t.Errorf("%d service ports, the first %+v; want all that some node had, unknown", len(rows), rows)
	}
}

// A service port that came just now can be asked for at once.
func TestBoardAtOnce(t *testing.T) {
	answers := recorded(t)
	b := boardOf(answers)
	read[Summary](t, b, "/api/v1/summary")
	for j := range answers[0].Value.Services {
		answers[0].Value.Services[j].Namespace = "fresh"
	}
	b.hears(b.members[0], answers[0])
	if p := read[ServicePage](t, b, "/api/v1/service?key=fresh/server/tcp"); p.Key != "fresh/server/tcp" {
		t.Errorf("%+v", p)
	}
}

// A service port's addresses and endpoints are those that most nodes have, whichever answered last.
func TestBoardMajority(t *testing.T) {
	answers := recorded(t)
	b := boardOf(answers)
	b.settle()
	want := read[ServicePage](t, b, "/api/v1/service?key="+server)
	list := answers[1].Value.Services
	of := &list[slices.IndexFunc(list, func(s plan.ServiceStatus) bool { return s.Name == "server" })]
	of.Endpoints, of.Addresses = nil, nil
	b.hears(b.members[1], answers[1])
	b.settle()
	if got := read[ServicePage](t, b, "/api/v1/service?key="+server); got.Endpoints != want.Endpoints || !slices.Equal(got.Addresses, want.Addresses) || want.Endpoints == 0 {
		t.Errorf("%d endpoints at %v, want %d at %v", got.Endpoints, got.Addresses, want.Endpoints, want.Addresses)
	}
}

// An address of several services' endpoints is the other's once one has none there any more.
func TestBoardOwners(t *testing.T) {
	answers := recorded(t)[:1]
	twin := answers[0].Value.Services[slices.IndexFunc(answers[0].Value.Services, func(s plan.ServiceStatus) bool { return s.Name == "server" })]
	twin.Name = "twin"
	answers[0].Value.Services = append(answers[0].Value.Services, twin)
	b := boardOf(answers)
	b.draw(time.Now())
	a := twin.Endpoints[0].Address.Addr()
	first, other := b.owners[a], "default/twin"
	if first == other {
		other = "default/server"
	}
	answers[0].Value.Services = slices.DeleteFunc(answers[0].Value.Services, func(s plan.ServiceStatus) bool { return s.Namespace+"/"+s.Name == first })
	b.hears(b.members[0], answers[0])
	b.draw(time.Now())
	if b.owners[a] != other {
		t.Errorf("%s is of %q, want %s", a, b.owners[a], other)
	}
}

// An address that is a node's own is the node's, not that of one of the services with endpoints there, and its again once it has another one.
func TestBoardNodesAddresses(t *testing.T) {
	server := recorded(t)[0].Value.Services[0]
	a, b := server.Endpoints[0].Address.Addr(), netip.MustParseAddr("192.0.2.9")
	f := &one{pod: "p", addresses: []netip.Addr{a}}
	board := NewBoard(f, nil, time.Second)
	board.list(t.Context())
	board.fill(board.members[0], []saidService{newSaid(&server)})
	for i, want := range []string{"node n", server.Namespace + "/" + server.Name} {
		board.draw(time.Now().Add(time.Duration(i) * time.Minute))
		if got := board.nameOf(&plan.ConnectionStatus{Client: netip.AddrPortFrom(a, 40000)}); got != want {
			t.Errorf("a client with the address of node n %v is %q, want %q", f.addresses, got, want)
		}
		f.addresses, board.listed = []netip.Addr{b}, time.Time{}
		board.list(t.Context())
	}
}

// What a silent node said before isn't shown as of now.
func TestBoardSilent(t *testing.T) {
	answers := recorded(t)
	for i := range answers[0].Value.Services {
		answers[0].Value.Services[i].Connections.Active = 5
	}
	b := boardOf(answers)
	b.members[0].fails(&Trouble{TimedOut, "x"}, time.Now())
	b.settle()
	for _, n := range read[ServicePage](t, b, "/api/v1/service?key="+server).Nodes {
		if n.State == TimedOut && (n.Active != 0 || n.Endpoints != 0 || n.DataPlane != "") {
			t.Errorf("%+v", n)
		}
	}
	if rows := read[NodeList](t, b, "/api/v1/nodes?node="+b.members[0].Name).Rows; len(rows) != 1 || rows[0].Active != 0 || rows[0].Answering {
		t.Errorf("%+v", rows)
	}
}

// No nodes are no good news, and none before the first list no news.
func TestBoardWithoutNodes(t *testing.T) {
	b := NewBoard(nil, nil, time.Second)
	for _, want := range []string{"The nodes are being listed", "There are no nodes"} {
		if v := b.verdict(b.draw(time.Now())); len(v) != 1 || v[0].Text != want || v[0].Tone != "note" {
			t.Errorf("%+v, want %q", v, want)
		}
		b.listed = time.Now()
	}
}

// Nodes are asked seldom while no one looks, and at once when someone does.
func TestBoardUnviewed(t *testing.T) {
	b := boardOf(recorded(t))
	now := time.Now()
	for _, m := range b.members {
		m.asked = now.Add(-2 * askEvery)
	}
	b.viewed = now.Add(-2 * viewedFor)
	if due := b.due(now); len(due) > 1 { // the one in trouble is asked again soon
		t.Errorf("%d nodes are due", len(due))
	}
	read[Summary](t, b, "/api/v1/summary")
	if due := b.due(now); len(due) < 3 {
		t.Errorf("%d nodes are due", len(due))
	}
}

// one is a fleet of one node.
type one struct {
	pod       string
	addresses []netip.Addr
	dial      func(context.Context) (net.Conn, error)
}

func (f *one) Nodes(context.Context, []string) ([]Node, error) {
	return []Node{{Name: "n", Pod: f.pod, Addresses: f.addresses}}, nil
}
func (f *one) Dial(ctx context.Context, _ Node) (net.Conn, error) { return f.dial(ctx) }

// serving dials to a handler.
func serving(h http.HandlerFunc) func(context.Context) (net.Conn, error) {
	return func(context.Context) (net.Conn, error) {
		near, far := net.Pipe()
		go func() {
			defer far.Close()
			if r, err := http.ReadRequest(bufio.NewReader(far)); err == nil {
				w := httptest.NewRecorder()
				h(w, r)
				_, _ = fmt.Fprintf(far, "HTTP/1.1 %d x\r\nConnection: close\r\n\r\n%s", w.Code, w.Body) // fails when the client hangs up
			}
		}()
		return near, nil
	}
}

// A node that never lists its connections is alive; only its flows aren't known. So is one whose service ports are few enough.
func TestBoardListens(t *testing.T) {
	rows := 1
	done := t.Context().Done()
	b := NewBoard(&one{pod: "p", dial: serving(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/api/v1/connections" {
			<-done
			return
		}
		_, _ = io.WriteString(w, `{"version":"v1","alive":true,"services":[{"namespace":"a","name":"b"}`+strings.Repeat(`,{}`, rows-1)+"]}")
	})}, nil, 200*time.Millisecond)
	b.list(t.Context())
	m := b.members[0]
	for range 2 {
		b.due(time.Now().Add(time.Minute))
		b.ask(t.Context(), m)
		if m.trouble != nil || !m.known || m.flows.failure == "" || m.flowsAt.IsZero() {
			t.Errorf("%v, flows %+v as of %s; want it to answer without flows", m.trouble, m.flows, m.flowsAt)
		}
	}
	b.timeout = time.Minute // for the test of this machine's speed it is none
	rows = rowsAtMost + 1
	b.due(time.Now().Add(time.Minute))
	b.ask(t.Context(), m)
	if m.trouble == nil || m.trouble.State != Failed || !strings.Contains(m.trouble.Text, "more than 50000 service ports") {
		t.Errorf("%v, want its answer refused", m.trouble)
	}
}

// A node to which no connection can be opened has one attempt at a time, however often it is asked; another pod of it is asked at once.
func TestBoardDialsOnce(t *testing.T) { synctest.Test(t, testDialsOnce) }

func testDialsOnce(t *testing.T) {
	var dials atomic.Int32
	end := make(chan struct{})
	defer close(end)
	f := &one{pod: "p", dial: func(context.Context) (net.Conn, error) {
		dials.Add(1)
		<-end
		return nil, net.ErrClosed
	}}
	b := NewBoard(f, nil, 50*time.Millisecond)
	b.list(t.Context())
	for i := range 5 {
		for _, m := range b.due(time.Now().Add(time.Duration(i+1) * time.Minute)) {
			b.ask(t.Context(), m)
			if m.trouble == nil || m.trouble.State != TimedOut {
				t.Errorf("%v", m.trouble)
			}
		}
		synctest.Wait() // until what was left behind has ended
	}
	if n := dials.Load(); n != 1 {
		t.Errorf("%d connections are being opened, want 1", n)
	}
	f.pod, b.listed = "q", time.Time{}
	b.list(t.Context())
	for _, m := range b.due(time.Now()) {
		b.ask(t.Context(), m)
	}
	if n := dials.Load(); n != 2 {
		t.Errorf("%d connections to two pods, want 2", n)
	}
}

// A pod that has gone has nodes and pods listed again soon.
func TestBoardLists(t *testing.T) {
	f := &one{pod: "p", dial: func(context.Context) (net.Conn, error) { return nil, errors.New(`pods "p" not found`) }}
	b := NewBoard(f, nil, time.Second)
	b.list(t.Context())
	b.viewed = time.Now().Add(-time.Hour) // seldom otherwise
	b.due(time.Now())
	b.ask(t.Context(), b.members[0])
	f.pod, b.listed = "q", time.Now().Add(-2*askEvery)
	b.list(t.Context())
	if m := b.members[0]; m.Pod != "q" || len(b.due(time.Now())) != 1 {
		t.Errorf("its pod is %s, asked %s; want the new one, and it to be asked", m.Pod, m.asked)
	}
}

// While no request comes, the board is summed up all the same: since when nodes differ is known only so.
func TestBoardKeepsDrawn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		answers := recorded(t)
		answers[1].Value.Services = answers[1].Value.Services[1:]
		b := boardOf(answers)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		go b.keepDrawn(ctx)
		time.Sleep(time.Minute)
		b.mu.Lock()
		defer b.mu.Unlock()
		b.stale = true
		if d := b.draw(time.Now()); d.lagging != 1 {
			t.Errorf("%d nodes lag, want the one that has for a minute", d.lagging)
		}
	})
}

// Requests that make no sense are refused with the reason, and a failure to list nodes is said first.
func TestBoardAnswers(t *testing.T) {
	b := boardOf(recorded(t))
	ask := func(path string) (int, string) {
		w := httptest.NewRecorder()
		b.Handler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, path, nil))
		return w.Code, w.Body.String()
	}
	for path, want := range map[string]string{
		"/api/v1/services?limit=0":        "limit \\\"0\\\" is not a number from 1 to 200",
		"/api/v1/services?class=broken":   "there is no class \\\"broken\\\"",
		"/api/v1/grid?rows=1000000":       "is not a number from 1 to 256",
		"/api/v1/service?key=none":        "there is no service port \\\"none\\\"",
		"/api/v1/services?node=elsewhere": "there is no node elsewhere",
		"/api/v1/flows?limit=x":           "is not a number",
	} {
		if code, text := ask(path); code < 400 || code > 499 || !strings.Contains(text, want) {
			t.Errorf("%s: %d %s, want %q", path, code, text, want)
		}
	}
	b.failure = (&Cluster{}).inWords("list nodes", errors.New(`nodes is forbidden: User "u" cannot list resource "nodes"`)).Error()
	_, text := ask("/api/v1/summary")
	var s Summary
	if err := json.Unmarshal([]byte(text), &s); err != nil || !strings.Contains(s.Verdict[0].Text, `cannot list resource "nodes" (deploy/plugin has roles`) || s.Nodes != 4 {
		t.Errorf("%v, %s: want the missing right first, and the nodes as of before", err, text)
	}
	_, text = ask("/api/v1/nodes?state=silent")
	var list NodeList
	if err := json.Unmarshal([]byte(text), &list); err != nil || list.Total != 1 || list.Rows[0].State != TimedOut || list.Rows[0].Error == "" {
		t.Errorf("%v, %s: want the node that doesn't answer, and why", err, text)
	}
}
