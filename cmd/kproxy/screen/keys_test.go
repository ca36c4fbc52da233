package screen

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kproxy.dev/kproxy/plan"
)

// names lists the services on the screen, in order.
func (m *Model) names() []string {
	var out []string
	for _, s := range m.shown {
		out = append(out, s.status.Name)
	}
	return out
}

func press(m *Model, keys ...string) (quit bool) {
	for _, k := range keys {
		quit = m.Key(k, noon.Add(4*time.Second)) || quit
	}
	return quit
}

func TestOrders(t *testing.T) {
	m := watched(Config{}, 4)
	for _, want := range [][]string{
		{"dns-with-a-long-name", "orphan", "shop", "web", "idle"}, // wrong, wrong, counting down, at rest
		{"idle", "shop", "web", "dns-with-a-long-name", "orphan"},
		{"web", "shop", "dns-with-a-long-name", "idle", "orphan"},
		{"dns-with-a-long-name", "web", "idle", "shop", "orphan"},
		{"dns-with-a-long-name", "orphan", "shop", "web", "idle"},
	} {
		if diff := cmp.Diff(want, m.names()); diff != "" {
			t.Errorf("sorted by %s (-want +got):\n%s", orderNames[m.keys.order], diff)
		}
		press(m, "s")
	}
}

func TestFilter(t *testing.T) {
	for filter, want := range map[string][]string{
		"":               {"dns-with-a-long-name", "orphan", "shop", "web", "idle"},
		"WEB":            {"web"},
		"10.96.0.6":      {"shop"},
		"iptables":       {"dns-with-a-long-name"},
		"default tcp":    {"shop", "web", "idle"},
		"default reject": nil,
	} {
		m := watched(Config{}, 4)
		press(m, "/")
		for _, r := range filter {
			press(m, string(r))
		}
		press(m, "enter")
		if diff := cmp.Diff(want, m.names()); diff != "" {
			t.Errorf("filter %q (-want +got):\n%s", filter, diff)
		}
		if press(m, "esc"); len(m.names()) != 5 {
			t.Errorf("filter %q: Escape doesn't clear it", filter)
		}
	}
}

// TestTyping: while the filter is typed, keys are letters.
func TestTyping(t *testing.T) {
	m := watched(Config{}, 2)
	if press(m, "/", "q", "s", "é", "backspace", "backspace") || m.keys.filter != "q" {
		t.Errorf("the filter is %q, want q", m.keys.filter)
	}
	if press(m, "ctrl+u"); m.keys.filter != "" {
		t.Errorf("Ctrl-U leaves %q", m.keys.filter)
	}
	if !press(m, "ctrl+c") {
		t.Error("Ctrl-C doesn't quit while the filter is typed")
	}
}

func TestQuit(t *testing.T) {
	m := watched(Config{}, 2)
	if press(m, "?", "q") {
		t.Error("q leaves the program, not the help")
	}
	if !press(m, "q") {
		t.Error("q doesn't quit")
	}
}

func TestScrolling(t *testing.T) {
	m := watched(Config{}, 2)
	for _, step := range []struct {
		key  string
		want int
	}{{"down", 1}, {"up", 0}, {"up", 0}, {"end", 4}, {"down", 4}, {"home", 0}, {"pgdown", 2}, {"pgup", 0}} {
		m.Render(noon, 40, 14) // settles the page
		press(m, step.key)
		if m.at != step.want {
			t.Errorf("%s: the cursor is at %d, want %d", step.key, m.at, step.want)
		}
		screen := strings.Join(m.Render(noon, 40, 14), "\n")
		if want := ">"; strings.Count("\n"+screen, "\n"+want) != 1 {
			t.Errorf("%s: the cursor isn't on the screen once:\n%s", step.key, screen)
		}
	}
}

// TestPause: a paused screen stays as it is, and then catches up.
func TestPause(t *testing.T) {
	m := watched(Config{Theme: Theme{Unicode: true}}, 3)
	press(m, "p")
	before := m.Render(noon.Add(5*time.Second), 100, 30)
	m.Update(statusAfter(60), noon.Add(60*time.Second))
	m.Event(plan.Event{Time: noon, Kind: "sync", Message: "while it was paused"})
	if diff := cmp.Diff(before, m.Render(noon.Add(60*time.Second), 100, 30)); diff != "" {
		t.Errorf("the paused screen has changed:\n%s", diff)
	}
	press(m, "p")
	after := strings.Join(m.Render(noon.Add(60*time.Second), 100, 30), "\n")
	if !strings.Contains(after, "while it was paused") || !strings.Contains(after, "up 4m3s") {
		t.Errorf("after the pause:\n%s", after)
	}
}

// TestRates: per second, whatever the time between statuses, and never across a restart.
func TestRates(t *testing.T) {
	m := New(Config{})
	m.Update(statusAfter(0), noon)
	m.Update(statusAfter(10), noon.Add(5*time.Second)) // 12340 connections in 5 s
	web := m.services["default/web:line/TCP"]
	if web.rates.connections != 2468 {
		t.Errorf("%v connections per second, want 2468", web.rates.connections)
	}
	for i, want := range []float64{0, 0, 10} { // what it counted before says nothing about it
		restarted := statusAfter(0)
		restarted.UptimeSeconds = int64(i)
		restarted.Services[2].Connections = plan.Connections{Total: 1_000_000 + uint64(10*i)}
		m.Update(restarted, noon.Add(time.Duration(8+i)*time.Second))
		if web.rates.connections != want {
			t.Errorf("%d s after a restart %v connections per second, want %v", i, web.rates.connections, want)
		}
	}
	again := statusAfter(0)
	again.Services[2].Connections = plan.Connections{Total: 3}
	m.Update(again, noon.Add(11*time.Second))
	if web.rates.connections != 0 {
		t.Errorf("of a service that came back %v connections per second, want 0", web.rates.connections)
	}
}

func TestCountdown(t *testing.T) {
	m := watched(Config{}, 1)
	for after, want := range map[time.Duration]string{0: "qualifying 7s", 2500 * time.Millisecond: "qualifying 5s", time.Minute: "qualifying 0s"} {
		if got := m.state(m.services["default/shop:http/TCP"], noon.Add(after)); got != want {
			t.Errorf("after %s: %q, want %q", after, got, want)
		}
	}
}

// TestPage: Enter opens the service under the cursor, wherever sorting moves it, Esc goes back, and
// a command pins what the cursor or the page is at.
func TestPage(t *testing.T) {
	var pinned []string
	m := watched(Config{Pin: func(s plan.ServiceStatus, where string) { pinned = append(pinned, s.Title()+" "+where) }}, 4)
	press(m, "down", "s") // orphan; sorted by name it is the last
	command := func(words string) {
		press(m, ":")
		for _, r := range words {
			press(m, string(r))
		}
		press(m, "enter")
	}
	command("pin kernel")
	if press(m, "enter"); m.page == nil || m.page.last.Name != "orphan" {
		t.Fatalf("the page is %+v", m.page)
	}
	command("pin auto")
	command("pin nowhere")
	if want := []string{"shop/orphan kernel", "shop/orphan auto"}; !cmp.Equal(pinned, want) || !strings.Contains(m.said, "no command pin nowhere") {
		t.Errorf("pinned %q, want %q; said %q", pinned, want, m.said)
	}
	if _, trace, open := m.Open(); trace || !open {
		t.Error("the page asks for a trace that it doesn't show")
	}
	press(m, "3")
	s, trace, _ := m.Open()
	if !trace {
		t.Error("the page doesn't ask for the trace that it shows")
	}
	m.Fill(&s, Page{Trace: []string{"here"}})
	if _, trace, _ = m.Open(); trace {
		t.Error("the page asks for the trace again")
	}
	if press(m, "esc"); m.page != nil {
		t.Error("Esc doesn't leave the page")
	}
	m.Fill(&s, Page{Trace: []string{"late"}})
	if press(m, "q"); m.page != nil {
		t.Error("an answer that comes late opens a page")
	}
}

// TestGuide: a question takes an answer, and the guide says how it went.
func TestGuide(t *testing.T) {
	var answers []string
	m := watched(Config{Guide: []Step{{Title: "One"}, {Title: "Two", Question: true}}, Answer: func(step int, a string) { answers = append(answers, a) }}, 1)
	press(m, "a", "x", "enter") // no question here; x and Enter do what they do elsewhere
	m.page = nil
	press(m, "n", "n", "a", "q", "4", "enter")
	if want := []string{"q4"}; !cmp.Equal(answers, want) {
		t.Errorf("answers %q, want %q", answers, want)
	}
	m.Guide(1, StepState{Done: true, Said: "q4 it is"})
	if screen := strings.Join(m.Render(noon, 80, 40), "\n"); !strings.Contains(screen, "ok confirmed: q4 it is") || !strings.Contains(screen, "2 of 2 (a answers, n next") {
		t.Errorf("the step isn't confirmed:\n%s", screen)
	}
}
