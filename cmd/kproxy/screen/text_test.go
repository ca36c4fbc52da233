package screen

import (
	"errors"
	"strings"
	"testing"
	"time"
	"unicode"

	"github.com/google/go-cmp/cmp"

	"kproxy.dev/kproxy/plan"
)

func TestClip(t *testing.T) {
	for _, c := range []struct {
		in    line
		width int
		want  string
	}{
		{text("whole"), 5, "whole"},
		{text("longer"), 5, "long…"},
		{text("one ") + styled(bold, "two"), 6, "one t…"},
		{text("日本語"), 5, "日本…"},
		{text("日本語"), 4, "日…"},
		{text("e\u0301te\u0301"), 3, "e\u0301te\u0301"},
		{text("x"), 0, ""},
		{text("a\x1b[31mb\rc\u202e"), 80, "a?[31mb?c?"},
	} {
		if got := (Theme{}).encode(c.in.clip(c.width, "…")); got != c.want {
			t.Errorf("%v in %d columns: %q, want %q", c.in, c.width, got, c.want)
		}
	}
}

func TestWrap(t *testing.T) {
	for _, c := range []struct {
		in          string
		width, most int
		want        []string
	}{
		{"", 10, 2, nil},
		{"some words here", 10, 3, []string{"some words", "here"}},
		{"some words here and there", 10, 2, []string{"some words", "here and there"}},
		{"unbreakable-word", 8, 3, []string{"unbreaka", "ble-word"}},
		{"kproxy pin --socket /run/kproxy.sock", 13, 4, []string{"kproxy pin", "--socket", "/run/kproxy.s", "ock"}},
		{"日本語 日本", 5, 9, []string{"日本", "語", "日本"}},
		{"a\x1b[2Jb\nc", 20, 2, []string{"a?[2Jb c"}},
	} {
		if diff := cmp.Diff(c.want, Wrap(c.in, c.width, c.most)); diff != "" {
			t.Errorf("%q (-want +got):\n%s", c.in, diff)
		}
	}
}

// TestUntrusted: whatever others name, a screen has no control characters but those of its own looks.
func TestUntrusted(t *testing.T) {
	const evil = "\x1b]0;pwned\a\x1b[2J\x1b[31m\r\n\u009b2J\u202eFORGED"
	st := statusAfter(0)
	st.Version, st.Node, st.NotReady, st.Warnings = evil, evil, evil, []string{evil}
	for i := range st.Services {
		s := &st.Services[i]
		s.Name, s.Reason, s.Problems, s.Degraded = evil+s.Name, evil, []string{evil}, evil
		for e := range s.Endpoints {
			s.Endpoints[e].Health, s.Endpoints[e].LastError = "down", evil
		}
	}
	m := New(Config{Theme: Theme{Colour: true, Unicode: true}, Endpoints: true, Note: func() string { return evil }, Guide: []Step{{Title: evil, Text: []string{evil}, Commands: []string{evil}, Look: evil}}})
	m.Update(st, noon)
	m.Event(plan.Event{Time: noon, Service: evil, Message: evil})
	screen := m.Render(noon, 200, 100)
	m.Guide(0, StepState{Said: evil})
	press(m, "enter")
	s, _, _ := m.Open()
	rows := connectionRows()
	rows[0].Service = evil
	m.Fill(&s, Page{Connections: rows, Trace: []string{evil, "  " + evil}})
	for _, tab := range []string{"1", "2", "3"} {
		press(m, tab)
		screen = append(screen, m.Render(noon, 200, 100)...)
	}
	press(m, "esc", "/")
	m.Key(evil, noon)
	m.Fail(errors.New(evil), noon)
	m.Say(evil)
	screen = append(append(screen, m.Render(noon, 200, 100)...), ConnectionTable(rows, true, 0, Theme{})...)
	shown := sequence.ReplaceAllString(strings.Join(screen, ""), "")
	if i := strings.IndexFunc(shown, func(r rune) bool { return unicode.IsControl(r) || unicode.Is(unicode.Cf, r) }); i >= 0 {
		t.Errorf("a control character: %q", shown[max(i-40, 0):min(i+40, len(shown))])
	}
	if n := strings.Count(shown, "?]0;pwned??[2J?[31m? ?2J?FORGED"); n < 20 {
		t.Errorf("%d of the names are to be seen:\n%s", n, strings.Join(screen, "\n"))
	}
	if strings.Contains(strings.Join(screen, ""), "\x1b[31m") {
		t.Error("a name has a colour of its own")
	}
}

func TestNumbers(t *testing.T) {
	for got, want := range map[string]string{
		Count(0): "0", Count(999): "999", Count(1000): "1.0k", Count(12345): "12.3k", Count(999999): "999k", Count(1e6): "1.0M",
		Bytes(1023): "1023", Bytes(1024): "1.0K", Bytes(5 << 30): "5.0G",
		Rate(0): "0", Rate(0.25): "0.2", Rate(20): "20", Rate(1234): "1.2k",
		Age(-time.Second): "0s", Age(850 * time.Millisecond): "850ms", Age(62 * time.Second): "1m2s", Age(25 * time.Hour): "1d1h", Age(5*time.Hour + time.Minute): "5h1m",
	} {
		if got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

func TestThemeOf(t *testing.T) {
	for _, c := range []struct {
		env  map[string]string
		want Theme
	}{
		{map[string]string{"LANG": "en_GB.UTF-8", "TERM": "xterm"}, Theme{Colour: true, Unicode: true}},
		{map[string]string{"LANG": "C.UTF-8", "LC_ALL": "C"}, Theme{Colour: true}},
		{map[string]string{"LC_CTYPE": "de_DE.utf8", "NO_COLOR": "1"}, Theme{Unicode: true}},
		{map[string]string{"LANG": "C.UTF-8", "TERM": "linux"}, Theme{Colour: true}},
		{nil, Theme{Colour: true}},
	} {
		if got := ThemeOf(func(k string) string { return c.env[k] }); got != c.want {
			t.Errorf("%v: %+v, want %+v", c.env, got, c.want)
		}
	}
}

func TestSparkline(t *testing.T) {
	g := Theme{Unicode: true}.glyphs()
	for _, c := range []struct {
		values []float64
		want   string
	}{
		{nil, "    "},
		{[]float64{0, 1, 4, 8}, " ▂▅█"},
		{[]float64{9, 9, 0, 0, 0, 0}, "    "},
		{[]float64{5}, "   █"},
	} {
		if got := g.sparkline(c.values, 4); got != c.want {
			t.Errorf("%v: %q, want %q", c.values, got, c.want)
		}
	}
}
