package screen

import (
	"errors"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/charmbracelet/x/ansi"
	"github.com/google/go-cmp/cmp"

	"kproxy.dev/kproxy/plan"
)

var update = flag.Bool("update", false, "rewrite the screens in testdata")

// noon is when the scenes play.
var noon = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

func endpoint(n int, health string, usable bool) plan.EndpointStatus {
	return plan.EndpointStatus{
		Address: netip.MustParseAddrPort(fmt.Sprintf("10.2.0.%d:9000", n)), Node: "node", Health: health, Usable: usable,
		Ready: true, Serving: true, Weight: 1, Since: noon.Add(-90 * time.Second), TotalConnections: 40, ActiveConnections: 2,
	}
}

func address1(n int) []netip.AddrPort {
	return []netip.AddrPort{netip.MustParseAddrPort(fmt.Sprintf("10.96.0.%d:80", n))}
}

// statusAfter is a node with one service of each kind, n seconds after noon.
func statusAfter(n int) plan.Status {
	down := endpoint(3, "down", false)
	down.LastError = "connect: connection refused"
	down.Failures = 2
	seconds := uint64(n)
	return plan.Status{
		Version: "v0.5.0", Mode: plan.ModeAuto, Node: "node-a", UptimeSeconds: 183 + int64(n), Alive: true,
		Sync: plan.SyncStatus{Generation: 12, LastSuccess: noon.Add(-2 * time.Second), DurationSeconds: 0.0034},
		Services: []plan.ServiceStatus{
			{
				Namespace: "default", Name: "idle", Protocol: "TCP", Addresses: address1(5), DataPlane: plan.Userspace,
				State: plan.StateQualifying, Reason: "waiting for its first connection", Endpoints: []plan.EndpointStatus{endpoint(9, "up", true)},
			},
			{
				Namespace: "default", Name: "shop", Port: "http", Protocol: "TCP", Addresses: address1(6), DataPlane: plan.Userspace,
				State: plan.StateQualifying, Reason: "steady for 3s of 10s", QualifiesInSeconds: 7 - float64(n),
				Connections: plan.Connections{Active: 3, Total: 100 + 20*seconds, BytesIn: 1000 + 4096*seconds, BytesOut: 90 + 1<<20*seconds},
				Endpoints:   []plan.EndpointStatus{endpoint(2, "up", true), endpoint(4, "unknown", true)},
			},
			{
				Namespace: "default", Name: "web", Port: "line", Protocol: "TCP", Addresses: address1(10), DataPlane: plan.IPVS,
				State: plan.StateOffloaded, Reason: "steady for 10s, 31 connections",
				Connections: plan.Connections{Active: 12, Total: 5000 + 1234*seconds, BytesIn: 1 << 21 * seconds, BytesOut: 3 << 21 * seconds, Retried: 2},
				Endpoints: []plan.EndpointStatus{
					endpoint(2, "up", true), endpoint(5, "up", true), endpoint(6, "up", true), endpoint(7, "up", true), endpoint(8, "up", false),
				},
			},
			{
				Namespace: "kube-system", Name: "dns-with-a-long-name", Port: "dns-tcp", Protocol: "TCP", Addresses: address1(11), DataPlane: plan.IPTables,
				State: plan.StateOffloaded, Reason: "steady for 10s, 4 connections",
				Connections: plan.Connections{Active: 1, Total: 400, Failed: 1 + seconds},
				Endpoints:   []plan.EndpointStatus{endpoint(2, "up", true), down},
			},
			{
				Namespace: "shop", Name: "orphan", Protocol: "UDP", NodePort: 30053, DataPlane: plan.None,
				State: plan.StateRejecting, Reason: "no endpoint is usable", Endpoints: []plan.EndpointStatus{},
			},
		},
	}
}

// watched is a model that has seen n seconds of the node's life.
func watched(c Config, n int) *Model {
	m := New(c)
	for i := range n {
		m.Update(statusAfter(i), noon.Add(time.Duration(i)*time.Second))
	}
	m.Event(plan.Event{Time: noon.Add(-5 * time.Second), Kind: "dataplane", Service: "default/web:line", Message: "userspace to ipvs: steady for 10s, 31 connections"})
	m.Event(plan.Event{Time: noon, Kind: "health", Service: "kube-system/dns-with-a-long-name:dns-tcp", Message: "10.2.0.3:9000 is down: connect: connection refused"})
	return m
}

var guide = []Step{
	{Title: "First", Commands: []string{"kproxy connections"}, Look: "a line"},
	{
		Title: "Take it back, to see each connection", Commands: []string{"kproxy pin --socket /run/kproxy-lab/kproxy.sock default/web userspace", "kproxy connections"},
		Look: "data plane userspace, state pinned; connections that the kernel carries go on where they are, and new ones are listed with their age.",
	},
}

// pageScene is the page of a service whose endpoints get connections.
func pageScene(t Theme) *Model {
	m := watched(Config{Theme: t}, 4)
	press(m, "down", "down", "down", "enter") // default/web:line
	for n := range 4 {
		st := statusAfter(4 + n)
		for i := range 3 {
			st.Services[2].Endpoints[i].TotalConnections += uint64(n * (i + 1))
		}
		m.Update(st, noon.Add(time.Duration(n)*time.Second))
	}
	return m
}

// scenes are screens worth looking at.
var scenes = map[string]func(Theme) *Model{
	"services":  func(t Theme) *Model { return watched(Config{Theme: t}, 4) },
	"endpoints": func(t Theme) *Model { return watched(Config{Theme: t, Endpoints: true}, 4) },
	"guide": func(t Theme) *Model {
		m := watched(Config{Theme: t, Guide: guide}, 4)
		m.note = func() string { return "traffic: 20 exchanges in the last second, none failed" }
		m.Key("n", noon)
		return m
	},
	"gone": func(t Theme) *Model {
		m := watched(Config{Theme: t}, 4)
		m.Fail(errors.New("kproxy isn't running here: nothing listens on the control socket /run/kproxy/kproxy.sock"), noon)
		return m
	},
	// As the lab begins: more lines for endpoints than there is room, the busy service not
	// the first by name.
	"lab": func(t Theme) *Model {
		m := New(Config{Theme: t, Endpoints: true, Guide: guide})
		for second := range 4 {
			st := statusAfter(second)
			st.Services = nil
			for i, port := range []string{"datagram", "http", "line"} {
				s := plan.ServiceStatus{Namespace: "default", Name: "web", Port: port, Protocol: "TCP", Addresses: address1(10), DataPlane: plan.IPTables, State: plan.StateOffloaded, Reason: "qualified"}
				for e := range 6 {
					s.Endpoints = append(s.Endpoints, endpoint(2+e, "up", true))
				}
				s.Connections.Total = uint64(i / 2 * 20 * second)
				st.Services = append(st.Services, s)
			}
			m.Update(st, noon.Add(time.Duration(second)*time.Second))
		}
		for i := range 6 {
			m.Event(plan.Event{Time: noon, Kind: "health", Service: "default/web:line", Message: fmt.Sprintf("10.2.0.%d:9000 is up", 2+i)})
		}
		m.note = func() string { return "the client's last second: 20 exchanges (b1 7, b2 7, b3 6), 0 failed" }
		m.Key("n", noon)
		return m
	},
	"trouble": func(t Theme) *Model {
		m := New(Config{Theme: t})
		st := statusAfter(0)
		st.Alive = false
		st.Sync.LastError = "iptables: run iptables-restore: exit status 4"
		st.Sources = []plan.SourceStatus{{Name: "/etc/kproxy/services", Error: "web.yaml:7: unknown field \"prots\"\nweb.yaml:9: and another"}}
		m.Update(st, noon)
		return m
	},
	"never": func(t Theme) *Model {
		m := New(Config{Theme: t})
		m.Fail(errors.New("kproxy isn't running here: no control socket at /run/kproxy/kproxy.sock"), noon)
		return m
	},
	"page": pageScene,
	"page-connections": func(t Theme) *Model {
		m := pageScene(t)
		press(m, "tab")
		s, _, _ := m.Open()
		m.Fill(&s, Page{Connections: connectionRows()})
		return m
	},
	"page-trace": func(t Theme) *Model {
		m := pageScene(t)
		press(m, "3")
		s, _, _ := m.Open()
		m.Fill(&s, Page{Trace: []string{"10.1.0.2 to 10.96.0.10:80/tcp", "  table ip kproxy, chain nat-prerouting, rule 1: a long line that says what this rule does with packets of that kind and why"}})
		return m
	},
	"lesson": func(t Theme) *Model {
		m := New(Config{Theme: t, Guide: []Step{{Title: "Read", Text: []string{strings.Repeat("A paragraph to read. ", 40)}, Commands: []string{"kproxy status"}, Question: true}}, Lesson: "default/web:line/TCP"})
		for n := range 3 {
			m.Update(statusAfter(n), noon.Add(time.Duration(n)*time.Second))
		}
		m.Guide(0, StepState{Said: "10.2.0.9 isn't an endpoint"})
		return m
	},
	"help": func(t Theme) *Model {
		m := watched(Config{Theme: t, Guide: guide}, 2)
		m.Key("?", noon)
		return m
	},
	"filter": func(t Theme) *Model {
		m := watched(Config{Theme: t}, 4)
		for _, k := range []string{"/", "w", "e", "b"} {
			m.Key(k, noon)
		}
		return m
	},
}

func TestScenes(t *testing.T) {
	sizes := map[int]int{40: 24, 80: 24, 200: 40, 240: 40}
	for name, scene := range scenes {
		for width, height := range sizes {
			t.Run(fmt.Sprintf("%s-%d", name, width), func(t *testing.T) {
				m := scene(Theme{Unicode: true})
				got := strings.Join(m.Render(noon.Add(3*time.Second), width, height), "\n") + "\n"
				compare(t, fmt.Sprintf("%s-%d.txt", name, width), got)
			})
		}
	}
}

// The same screens without characters beyond ASCII, and with colours.
func TestThemes(t *testing.T) {
	for name, theme := range map[string]Theme{"ascii": {}, "colour": {Colour: true, Unicode: true}} {
		m := scenes["endpoints"](theme)
		got := strings.Join(m.Render(noon.Add(3*time.Second), 100, 30), "\n") + "\n"
		compare(t, name+"-100.txt", strings.ReplaceAll(got, "\x1b", "ESC"))
		if strings.ContainsFunc(got, func(r rune) bool { return r > 0x7e }) == !theme.Unicode {
			t.Errorf("%s: characters beyond ASCII, or none", name)
		}
	}
}

func compare(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("%s (-want +got; -update rewrites it):\n%s", path, diff)
	}
}

var sequence = regexp.MustCompile("\x1b\\[[0-9;]*m")

// TestFits: whatever the size, no line is wider and there are not more of them.
func TestFits(t *testing.T) {
	for name, scene := range scenes {
		for _, theme := range []Theme{{}, {Colour: true, Unicode: true}} {
			for _, width := range []int{0, 1, 2, 7, 15, 20, 27, 39, 40, 59, 60, 69, 79, 80, 99, 100, 119, 131, 150, 199, 200, 219, 220, 240} {
				for _, height := range []int{0, 1, 2, 3, 5, 8, 12, 24, 60} {
					lines := scene(theme).Render(noon, width, height)
					if len(lines) > height {
						t.Fatalf("%s at %dx%d: %d lines", name, width, height, len(lines))
					}
					for _, l := range lines {
						if shown := sequence.ReplaceAllString(l, ""); ansi.StringWidth(shown) > width {
							t.Fatalf("%s at %dx%d: %d columns: %q", name, width, height, ansi.StringWidth(shown), shown)
						}
					}
				}
			}
		}
	}
}

// TestGoneIsNotLive: what kproxy last said stays, but nothing says how fast it goes now.
func TestGoneIsNotLive(t *testing.T) {
	m := scenes["gone"](Theme{})
	screen := strings.Join(m.Render(noon.Add(time.Second), 240, 40), "\n")
	for _, live := range []string{"conn/s  ", "B/s  ", "B/s\n", "1.2k", "qualifying 4s"} {
		if strings.Contains(screen, live) {
			t.Errorf("while kproxy is gone the screen says %q:\n%s", live, screen)
		}
	}
	m.Update(statusAfter(5), noon.Add(5*time.Second))
	if screen := strings.Join(m.Render(noon.Add(5*time.Second), 240, 40), "\n"); !strings.Contains(screen, "1.2k conn/s") {
		t.Errorf("once it is back the screen doesn't say how fast it goes:\n%s", screen)
	}
}

// TestServicesBeforeEndpoints: where services fit without their endpoints' lines, each
// is to be seen, the busy ones first.
func TestServicesBeforeEndpoints(t *testing.T) {
	screen := strings.Join(scenes["lab"](Theme{}).Render(noon, 80, 24), "\n")
	line, datagram, http := strings.Index(screen, "default/web:line  "), strings.Index(screen, "default/web:datagram  "), strings.Index(screen, "default/web:http  ")
	if line < 0 || datagram < line || http < datagram || !strings.Contains(screen, "3 services") {
		t.Errorf("not all services are to be seen, or not the busy one first:\n%s", screen)
	}
}

// TestShapesWithoutColour: what colours tell, shapes and words tell too.
func TestShapesWithoutColour(t *testing.T) {
	for _, theme := range []Theme{{}, {Unicode: true}} {
		g := theme.glyphs()
		shapes := map[string]bool{}
		for _, s := range []string{g.up, g.down, g.unknown, g.unused} {
			shapes[s] = true
		}
		if len(shapes) != 4 || g.alive == g.dead || g.wrong == g.changing || g.changing == " " {
			t.Errorf("%+v: two things have the same shape", theme)
		}
	}
}

func BenchmarkUpdateAndRender(b *testing.B) {
	st := statusAfter(0)
	web := st.Services[2]
	st.Services = nil
	for i := range 5000 {
		web.Name = fmt.Sprintf("web-%04d", i)
		st.Services = append(st.Services, web)
	}
	m := New(Config{Theme: Theme{Colour: true, Unicode: true}})
	now := noon
	for b.Loop() {
		now = now.Add(time.Second)
		m.Update(st, now)
		m.Render(now, 200, 50)
	}
}

// TestScreenTellsWhatStatusTells: a screen has the lines that `kproxy status` prints of the node.
func TestScreenTellsWhatStatusTells(t *testing.T) {
	st := statusAfter(0)
	st.NotReady, st.Warnings = "the kernel's rules aren't written yet", []string{"kube-proxy's chains are there, too"}
	st.Drain = &plan.Drain{Since: noon, Left: 3}
	st.Sources = []plan.SourceStatus{{Name: "web.yaml", Error: "web.yaml:3: what\nweb.yaml:4: else"}}
	st.Sync.LastError = "iptables-restore: no"
	m := New(Config{})
	m.Update(st, noon)
	screen := strings.Join(m.Render(noon, 120, 30), "\n")
	remarks := Remarks(&st)
	if len(remarks) != 5 {
		t.Errorf("remarks are %q", remarks)
	}
	for _, r := range remarks {
		first, _, _ := strings.Cut(r.Label+r.Text, "\n")
		if !strings.Contains(screen, "\n"+first+"\n") {
			t.Errorf("the screen lacks %q:\n%s", first, screen)
		}
	}
}

// TestTraceFrom: the trace of a page begins at the client of the newest connection, whatever their order, but not at the node itself.
func TestTraceFrom(t *testing.T) {
	connection := func(client string, age float64) plan.ConnectionStatus {
		return plan.ConnectionStatus{Client: netip.MustParseAddrPort(client), AgeSeconds: age}
	}
	p := Page{Connections: []plan.ConnectionStatus{connection("127.0.0.1:1000", 1), connection("10.1.0.2:1000", 5), connection("[::ffff:10.1.0.3]:1000", 2), connection("10.1.0.4:1000", 9)}}
	if got := p.TraceFrom(); got != netip.MustParseAddr("10.1.0.3") {
		t.Errorf("it begins at %s", got)
	}
	if got := (&Page{}).TraceFrom(); got.IsValid() {
		t.Errorf("without connections it begins at %s", got)
	}
}

// TestUnserved: a screen promises no fallback rules where there are none.
func TestUnserved(t *testing.T) {
	for mode, want := range map[plan.Mode]string{plan.ModeUserspace: "are refused: mode userspace has no fallback rules", plan.ModeAuto: "go to the fallback rules"} {
		st := statusAfter(0)
		st.Alive, st.Mode = false, mode
		m := New(Config{})
		m.Update(st, noon)
		if screen := strings.Join(m.Render(noon, 120, 30), "\n"); !strings.Contains(screen, "NOT SERVING") || !strings.Contains(screen, "\nnew connections "+want+"\n") {
			t.Errorf("mode %s:\n%s", mode, screen)
		}
	}
}
