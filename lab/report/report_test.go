package report

import (
	"bytes"
	"encoding/json"
	"encoding/xml"
	"flag"
	"io"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "rewrite the goldens")

func subject(name string, class Class, values ...float64) Subject {
	return Subject{Name: name, Class: class, Values: values, Spread: SpreadOf(values)}
}

// example has a figure of which more is better and one of which less is, peers
// that are ahead of kproxy and behind it, a failure, and a subject that is missing.
func example() *Report {
	r := &Report{
		Title: "Example", Version: "v0", Command: "bench <it>", Started: time.Unix(1_700_000_000, 0), Seconds: 90,
		Host:   Host{Kernel: "6.18", CPUs: 2, CPUModel: "Example <CPU>", MemoryGiB: 8, Go: "go1.26", Programs: []Program{{"HAProxy", "2.6"}}, Others: Spread{0.3, 0.1, 0.5}, Steal: Spread{0, 0, 0.1}},
		Absent: []Absent{{"ipvs", "this host lacks it"}},
		Notes:  []Note{{"TCP", "Connections & bytes."}, {"Order", "Interleaved."}},
		Cases: []Case{
			{Name: "tcp/rate", Group: "TCP", Work: "connections", Figure: "rate", Unit: "/s", Better: Higher, Subjects: []Subject{
				subject("direct", Limit, 200, 400, 200), subject("haproxy", Peer, 100, 200, 100), subject("nginx", Peer, 130, 230, 140), subject("kproxy", KProxy, 120, 240, 130),
			}},
			{Name: "tcp/p50", Group: "TCP", Work: "connections", Figure: "median", Unit: "µs", Better: Lower, Subjects: []Subject{
				subject("haproxy", Peer, 50, 60, 50), subject("kproxy", KProxy, 60, 70, 60),
			}},
			{Name: "tcp/cpu", Group: "CPU", Work: "connections", Figure: "CPU", Unit: "s", Better: Lower, Subjects: []Subject{
				subject("haproxy", Peer, 5), subject("kproxy", KProxy, 4),
			}},
		},
	}
	r.Cases[2].Subjects[0].Fail(3, "connection reset")
	r.Cases[2].Subjects[1].Parts = []Part{{"client", 1}, {"kproxy", 3}}
	return r
}

func TestGoldens(t *testing.T) {
	r := example()
	r.Finish()
	for name, write := range map[string]func(io.Writer) error{"report.txt": r.WriteTable, "report.md": r.WriteMarkdown, "report.html": r.WriteHTML} {
		var b bytes.Buffer
		if err := write(&b); err != nil {
			t.Fatal(err)
		}
		golden := filepath.Join("testdata", name)
		if *update {
			if err := os.WriteFile(golden, b.Bytes(), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(golden)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(string(want), b.String()); diff != "" {
			t.Errorf("%s (-want +got; rewrite it with -update and read it):\n%s", name, diff)
		}
	}
}

func TestFindings(t *testing.T) {
	r := example()
	r.Find("tcp/rate", "kproxy", "haproxy")
	r.Find("tcp/rate", "kproxy", "nginx")
	r.Find("tcp/rate", "kproxy", "absent")
	r.Find("absent", "kproxy", "haproxy")
	r.Finish()
	want := []string{
		"Connections: rate: kproxy has 1.20 (1.20–1.30) times the figure of haproxy.",
		"Connections: rate: kproxy has 0.929 (0.923–1.04) times the figure of nginx; no difference that these rounds can tell.",
		"connections: rate: kproxy is behind nginx (×0.929 (0.923–1.04), within noise).",
		"connections: median: kproxy is behind haproxy (×1.20 (1.17–1.20)).",
		"ipvs was not measured: this host lacks it.",
	}
	if diff := cmp.Diff(want, r.Findings); diff != "" {
		t.Errorf("findings (-want +got):\n%s", diff)
	}
	said := strings.Join(r.Warnings, "\n")
	for _, phrase := range []string{"30% of the processors", "up to 50%", "took up to 10%", "2 processors", "haproxy: connection reset"} {
		if !strings.Contains(said, phrase) {
			t.Errorf("warnings don't say %q:\n%s", phrase, said)
		}
	}
	calm := Report{Host: Host{CPUs: 8}}
	if calm.Finish(); len(calm.Warnings)+len(calm.Findings) != 0 {
		t.Errorf("of a calm machine: %q %q", calm.Warnings, calm.Findings)
	}
}

// A subject with failures is behind every peer.
func TestFailuresAreBehind(t *testing.T) {
	c := example().Cases[0]
	c.Subjects[3].Failures = 1
	if got := c.Behind(); len(got) != 1 || !strings.Contains(got[0], "haproxy") || !strings.Contains(got[0], "nginx") {
		t.Errorf("%q, want haproxy and nginx ahead", got)
	}
	c.Subjects[2].Failures = 1
	if got := c.Behind(); strings.Contains(got[0], "nginx") {
		t.Errorf("%q, want no peer with failures ahead", got)
	}
}

func TestRatiosAreWithinARound(t *testing.T) {
	for _, tt := range []struct {
		name     string
		a, b     []float64
		rounds   []int // of a
		want     Spread
		distinct bool
	}{
		{"always more, however the machine was", []float64{2, 20, 8}, []float64{1, 10, 4}, nil, Spread{2, 2, 2}, true},
		{"always less", []float64{1, 10, 1}, []float64{2, 40, 2}, nil, Spread{0.5, 0.25, 0.5}, true},
		{"once more, once less", []float64{2, 1, 2}, []float64{1, 2, 1}, nil, Spread{2, 0.5, 2}, false},
		{"once the same", []float64{2, 1, 2}, []float64{1, 1, 1}, nil, Spread{2, 1, 2}, false},
		{"two rounds prove nothing", []float64{9, 9}, []float64{1, 1}, nil, Spread{9, 9, 9}, false},
		{"nothing to divide by", []float64{9, 4}, []float64{0, 2}, nil, Spread{2, 2, 2}, false},
		{"a round is missing", []float64{10, 20, 40}, []float64{1, 2, 3, 4}, []int{0, 1, 3}, Spread{10, 10, 10}, true},
		{"no round in common", []float64{9}, []float64{3}, []int{1}, Spread{}, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			a, b := subject("a", Peer, tt.a...), subject("b", Peer, tt.b...)
			a.Rounds = tt.rounds
			got, distinct, ok := Ratio(&a, &b)
			if diff := cmp.Diff(tt.want, got); diff != "" || distinct != tt.distinct || ok != (tt.want != Spread{}) {
				t.Errorf("distinct %v, ok %v; ratio (-want +got):\n%s", distinct, ok, diff)
			}
		})
	}
	if _, _, ok := Ratio(nil, &Subject{}); ok {
		t.Error("a missing subject was compared")
	}
}

func TestSpread(t *testing.T) {
	for _, tt := range []struct {
		values []float64
		want   Spread
		text   string
	}{
		{nil, Spread{}, "0"},
		{[]float64{3}, Spread{3, 3, 3}, "3.00"},
		{[]float64{9, 1, 2}, Spread{2, 1, 9}, "2.00 (1.00–9.00)"},
		{[]float64{4, 1, 2, 30}, Spread{3, 1, 30}, "3.00 (1.00–30.0)"},
		{[]float64{1.0001, 1.0002}, Spread{1.00015, 1.0001, 1.0002}, "1.00"},
	} {
		if got := SpreadOf(tt.values); math.Abs(got.Median-tt.want.Median) > 1e-9 || got.Min != tt.want.Min || got.Max != tt.want.Max || got.String() != tt.text {
			t.Errorf("%v: %+v, printed as %q; want %+v, %q", tt.values, got, got, tt.want, tt.text)
		}
	}
}

func TestFigure(t *testing.T) {
	for v, want := range map[float64]string{
		0: "0", 0.0123: "0.012", 1: "1.00", 9.876: "9.88", 12.34: "12.3", 123.4: "123", 1234.5: "1,235", 1234567: "1,234,567",
	} {
		if got := Figure(v); got != want {
			t.Errorf("Figure(%v) = %q, want %q", v, got, want)
		}
	}
	for n, want := range map[int]string{0: "0", 999: "999", 1000: "1,000", 1234567: "1,234,567", -1234: "-1,234", -123: "-123"} {
		if got := Thousands(n); got != want {
			t.Errorf("Thousands(%d) = %q, want %q", n, got, want)
		}
	}
}

func TestJSONIsReadAsWritten(t *testing.T) {
	r := example()
	var b bytes.Buffer
	if err := r.WriteJSON(&b); err != nil {
		t.Fatal(err)
	}
	var got Report
	if err := json.Unmarshal(b.Bytes(), &got); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(*r, got); diff != "" {
		t.Errorf("report (-written +read):\n%s", diff)
	}
}

// The page is well-formed, says every figure and sentence, refers only to what it
// has, and needs nothing else: no network and no script.
func TestPage(t *testing.T) {
	r := example()
	r.Finish()
	var b bytes.Buffer
	if err := r.WriteHTML(&b); err != nil {
		t.Fatal(err)
	}
	page := b.String()
	ids, refs := map[string]bool{}, []string{}
	var text strings.Builder
	d := xml.NewDecoder(&b)
	for {
		token, err := d.Token()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatalf("the page isn't well-formed: %v", err)
		}
		switch token := token.(type) {
		case xml.CharData:
			text.Write(token)
		case xml.StartElement:
			for _, a := range token.Attr {
				switch a.Name.Local {
				case "id":
					if ids[a.Value] {
						t.Errorf("id %s is there twice", a.Value)
					}
					ids[a.Value] = true
				case "aria-labelledby":
					refs = append(refs, strings.Fields(a.Value)...)
				case "href":
					refs = append(refs, strings.TrimPrefix(a.Value, "#")) // another page is no id
				case "style", "src":
					t.Errorf("<%s %s=%q>", token.Name.Local, a.Name.Local, a.Value)
				}
			}
		}
	}
	if chart, words := strings.Index(page, "<svg"), strings.Index(page, `id="tells"`); chart < 0 || words < chart {
		t.Errorf("the charts don't come first: at %d, sentences at %d", chart, words)
	}
	for _, id := range refs {
		if !ids[id] {
			t.Errorf("nothing has the id %s", id)
		}
	}
	for _, not := range []string{"<script", "http://", "https://", "ZgotmplZ"} {
		if strings.Contains(page, not) {
			t.Errorf("the page contains %q", not)
		}
	}
	want := append(append([]string{"Example <CPU>", "HAProxy: 2.6", "Connections & bytes.", "Interleaved.", "3: connection reset", "of it client"}, r.Findings...), r.Warnings...)
	for _, c := range r.Cases {
		for _, s := range c.Subjects {
			want = append(want, s.String(), Figure(s.Median))
		}
	}
	for _, w := range want {
		if !strings.Contains(text.String(), w) {
			t.Errorf("the page doesn't say %q", w)
		}
	}
	for _, class := range []Class{KProxy, Peer, Limit} {
		if !strings.Contains(page, `class="`+string(class)+`"`) || !strings.Contains(pageText, "."+string(class)+" {") {
			t.Errorf("class %s isn't drawn or has no style", class)
		}
	}
}

// luminance is WCAG's relative luminance of a colour such as #1b1f24.
func luminance(t *testing.T, colour string) float64 {
	t.Helper()
	n, err := strconv.ParseUint(strings.TrimPrefix(colour, "#"), 16, 32)
	if err != nil {
		t.Fatal(err)
	}
	linear := func(v uint64) float64 {
		c := float64(v&255) / 255
		if c <= 0.04045 {
			return c / 12.92
		}
		return math.Pow((c+0.055)/1.055, 2.4)
	}
	return 0.2126*linear(n>>16) + 0.7152*linear(n>>8) + 0.0722*linear(n)
}

// Texts have the contrast of WCAG AA (4.5), and drawings theirs (3), in light and
// dark.
func TestContrast(t *testing.T) {
	blocks := regexp.MustCompile(`(?s):root \{(.*?)\}`).FindAllStringSubmatch(pageText, -1)
	if len(blocks) != 2 {
		t.Fatalf("%d blocks of colours, want a light and a dark one", len(blocks))
	}
	for i, scheme := range []string{"light", "dark"} {
		colours := map[string]string{}
		for _, m := range regexp.MustCompile(`--([a-z0-9]+): (#[0-9a-f]{6})`).FindAllStringSubmatch(blocks[i][1], -1) {
			colours[m[1]] = m[2]
		}
		for name, colour := range colours {
			least := 3.0
			switch name {
			case "page", "box", "line":
				continue
			case "text", "quiet":
				least = 4.5
			}
			for _, ground := range []string{"page", "box"} {
				a, b := luminance(t, colour), luminance(t, colours[ground])
				if ratio := (max(a, b) + 0.05) / (min(a, b) + 0.05); ratio < least {
					t.Errorf("%s: %s on %s has a contrast of %.2f, want %.1f", scheme, name, ground, ratio, least)
				}
			}
		}
	}
}
