package cluster

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
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
	m.known, m.health, m.answered = true, State(a.Value.Health()), time.Now()
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
	if len(b.ids) != 0 || len(b.owners) != 0 {
		t.Errorf("%d service ports and %d endpoints are left", len(b.ids), len(b.owners))
	}
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
	if err := json.Unmarshal([]byte(text), &list); err != nil || list.Total != 1 || list.Rows[0].State != Silent || list.Rows[0].Error == "" {
		t.Errorf("%v, %s: want the node that doesn't answer, and why", err, text)
	}
}
