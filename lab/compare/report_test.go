package compare

import (
	"bytes"
	"encoding/xml"
	"flag"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kproxy.dev/kproxy/lab/compare/load"
	"kproxy.dev/kproxy/lab/compare/statistics"
)

var update = flag.Bool("update", false, "rewrite the goldens")

// example is a comparison with made-up figures: userspace is slow, iptables is
// like direct routing in one figure, and there is no IPVS.
func example() *Report {
	c := DefaultConfig()
	c.Repeat, c.Services = 3, []int{10, 1000}
	x := &comparison{config: c}
	x.report = Report{
		Version: "v1.0.0", Command: "kproxy lab compare --repeat 3 --services 10,1000", Time: time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC), Seconds: 123,
		Host:      Host{Kernel: "6.1.0", CPUs: 2, CPUModel: "Example <CPU>", MemoryGiB: 8, IPTables: "variant nft; iptables v1.8.9 (nf_tables)", Go: "go1.26", LoadBefore: "0.10 0.20 0.30", InterruptsKnown: true},
		LoadAfter: "1.10 0.40 0.30", Repeat: c.Repeat, Services: c.Services, Sizes: c.Sizes,
		Planes:      []PlaneReport{{Plane: Direct, Available: true}, {Plane: Userspace, Available: true}, {Plane: IPTables, Available: true}, {Plane: IPVS, Reason: "this host lacks IPVS (the kernel has none)"}},
		Programming: []Programming{{Userspace, 10, 0.05}, {IPTables, 10, 0.1}, {Userspace, 1000, 0.8}, {IPTables, 1000, 2.5}},
	}
	for round := range c.Repeat {
		for _, w := range c.workloads() {
			x.exampleSamples(w.load.Kind, 0, round)
		}
		for _, n := range c.Services {
			x.exampleSamples(load.Firsts, n, round)
		}
	}
	x.summarize()
	return &x.report
}

func (x *comparison) exampleSamples(k load.Kind, services, round int) {
	slow := 1 + 0.1*float64(round) // the machine is, from round to round
	cost := map[Plane]float64{Direct: 1, Userspace: 4, IPTables: 1.2}
	if k == load.Datagrams {
		cost[IPTables] = 1.1 - 0.1*float64(round)
	}
	for _, p := range []Plane{Direct, Userspace, IPTables} {
		f := slow * cost[p]
		o := load.Outcome{
			Seconds: 1.5, Count: int(30000 / f), Bytes: uint64(3e9 / f),
			Connect: &load.Percentiles{Count: 10, P50: 20 * f, P99: 90 * f}, Exchange: &load.Percentiles{Count: 10, P50: 60 * f, P99: 300 * f},
			CPU: load.CPU{Client: 0.8, Backend: 0.7, Softirqd: 0.1, Machine: 1.7, Steal: 0.01},
		}
		if p == Userspace {
			o.CPU.Proxy, o.CPU.Machine = 1, 2.7
		}
		x.samples = append(x.samples, sample{p, k, services, round, o})
	}
}

func TestReportGolden(t *testing.T) {
	r := example()
	for name, write := range map[string]func(io.Writer) error{"report.txt": r.WriteTable, "report.html": r.WriteHTML} {
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
			t.Errorf("%s (-want +got; rewrite it with -update and look):\n%s", name, diff)
		}
	}
}

// element is one of the page's.
type element struct {
	name  string
	attrs map[string]string
	text  string // in it, its children's included
}

// elements parses the page, which is well-formed XML too, so that what isn't
// closed, quoted or escaped is an error.
func elements(t *testing.T, page []byte) []element {
	t.Helper()
	d := xml.NewDecoder(bytes.NewReader(page))
	var all []element
	var open []int
	for {
		token, err := d.Token()
		if err == io.EOF {
			return all
		}
		if err != nil {
			t.Fatalf("the page isn't well-formed: %v", err)
		}
		switch token := token.(type) {
		case xml.StartElement:
			e := element{name: token.Name.Local, attrs: map[string]string{}}
			for _, a := range token.Attr {
				e.attrs[a.Name.Local] = a.Value
			}
			open, all = append(open, len(all)), append(all, e)
		case xml.EndElement:
			open = open[:len(open)-1]
		case xml.CharData:
			for _, i := range open {
				all[i].text += string(token)
			}
		}
	}
}

func renderPage(t *testing.T, r *Report) []byte {
	t.Helper()
	var b bytes.Buffer
	if err := r.WriteHTML(&b); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func TestPageNeedsNothingElse(t *testing.T) {
	page := renderPage(t, example())
	ids := map[string]bool{}
	all := elements(t, page)
	for _, e := range all {
		if id := e.attrs["id"]; id != "" {
			if ids[id] {
				t.Errorf("id %s is there twice", id)
			}
			ids[id] = true
		}
		if slices.Contains([]string{"script", "link", "img", "iframe", "object"}, e.name) {
			t.Errorf("the page has an element %s", e.name)
		}
	}
	for _, e := range all {
		for name, value := range e.attrs {
			if slices.Contains([]string{"src", "href", "action", "data"}, name) && !strings.HasPrefix(value, "#") || strings.HasPrefix(name, "on") {
				t.Errorf("%s has %s=%q", e.name, name, value)
			}
			if name == "aria-labelledby" {
				for id := range strings.FieldsSeq(value) {
					if !ids[id] {
						t.Errorf("%s is labelled by %s, which isn't there", e.name, id)
					}
				}
			}
		}
	}
	for _, m := range regexp.MustCompile(`url\(([^)]*)\)|@import|https?://`).FindAllSubmatch(page, -1) {
		if id, ok := bytes.CutPrefix(m[1], []byte("#")); !ok || !ids[string(id)] {
			t.Errorf("the page refers to %s", m[0])
		}
	}
}

// Every figure is in a chart and, for those who don't see it, in a table.
func TestPageShowsEveryFigure(t *testing.T) {
	r := example()
	var tables, charts string
	for _, e := range elements(t, renderPage(t, r)) {
		switch {
		case e.name == "table":
			tables += e.text
		case e.name == "svg" && e.attrs["class"] == "chart":
			charts += e.text
		}
	}
	for i := range r.Rows {
		row := &r.Rows[i]
		if len(row.Cells) != 3 {
			t.Errorf("%s, %d services: figures of %d data planes, want 3", row.Key, row.Services, len(row.Cells))
		}
		for _, c := range row.Cells {
			if !strings.Contains(charts, c.String()) {
				t.Errorf("%s of %s: no chart says %s", row.Key, c.Plane, c)
			}
			for _, v := range []float64{c.Median, c.Min, c.Max} {
				if !strings.Contains(tables, statistics.Figure(v)) {
					t.Errorf("%s of %s: no table says %s", row.Key, c.Plane, statistics.Figure(v))
				}
			}
		}
	}
	for _, m := range metrics {
		if len(r.rows(m.key)) == 0 {
			t.Errorf("there is no row %s", m.key)
		}
		shown := false
		for _, s := range sectionKeys {
			shown = shown || slices.Contains(s.keys, m.key)
		}
		if !shown {
			t.Errorf("no section shows %s", m.key)
		}
	}
}
