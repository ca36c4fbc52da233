package result

import (
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kproxy.dev/kproxy/lab/compare/statistics"
)

// example has a figure of which more is better and one of which less is.
func example() *Report {
	return &Report{
		KProxy: "v0", Command: "bench", Started: time.Unix(1_700_000_000, 0), Seconds: 90,
		Host: Host{Kernel: "6.18", CPUs: 2, Peers: []Peer{{"HAProxy", "2.6"}}},
		Cases: []Case{
			{
				Name: "tcp/rate", Group: "TCP", Work: "connections", Figure: "rate", Unit: "/s", Better: Higher,
				Subjects: []Subject{
					NewSubject("haproxy", []float64{100, 200, 100}), NewSubject("haproxy-splice", []float64{90, 180, 80}),
					NewSubject("kproxy", []float64{120, 240, 130}),
				},
				Targets: []Target{
					{Subject: "kproxy", Against: []string{"haproxy", "haproxy-splice"}, Bound: 1.1},
					{Subject: "kproxy", Bound: 200},
					{Subject: "engine", Against: []string{"haproxy"}, Bound: 1.1},
				},
			},
			{
				Name: "tcp/p50", Group: "TCP", Work: "connections", Figure: "median", Unit: "µs", Better: Lower,
				Subjects: []Subject{NewSubject("haproxy", []float64{50, 60, 50}), NewSubject("kproxy", []float64{60, 60, 60})},
				Targets:  []Target{{Subject: "kproxy", Against: []string{"haproxy"}, Bound: 0.95}},
			},
		},
	}
}

func judged() *Report {
	r := example()
	for i := range r.Cases {
		r.Cases[i].Judge()
	}
	return r
}

func TestJudge(t *testing.T) {
	r := judged()
	for _, tt := range []struct {
		name            string
		c, target       int
		best            string
		met, measured   bool
		wanted, reached string
	}{
		{"better of two, round by round", 0, 0, "haproxy", true, true, "≥ 1.10× the better of haproxy, haproxy-splice", "1.20× (1.20–1.30)"},
		{"absolute", 0, 1, "", false, true, "≥ 200 /s", "130 (120–240) /s"},
		{"no such subject", 0, 2, "", false, false, "≥ 1.10× haproxy", "not measured"},
		{"less is better", 1, 0, "haproxy", false, true, "≤ 0.950× haproxy", "1.20× (1.00–1.20)"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := &r.Cases[tt.c]
			got := &c.Targets[tt.target]
			if got.Best != tt.best || got.Met != tt.met || got.Measured != tt.measured {
				t.Errorf("best %q, met %v, measured %v; want %q, %v, %v", got.Best, got.Met, got.Measured, tt.best, tt.met, tt.measured)
			}
			if c.Wanted(got) != tt.wanted || c.Reached(got) != tt.reached {
				t.Errorf("%q, %q; want %q, %q", c.Wanted(got), c.Reached(got), tt.wanted, tt.reached)
			}
		})
	}
}

func TestFailuresMissTargetsAndAreShown(t *testing.T) {
	r := example()
	s := r.Cases[0].Subject("kproxy")
	s.Failures, s.Error = 3, "connection reset"
	r.Cases[0].Judge()
	if r.Cases[0].Targets[0].Met {
		t.Error("a subject with failures met its target")
	}
	var b strings.Builder
	if err := r.WriteMarkdown(&b); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(b.String(), "3: connection reset") {
		t.Errorf("the report doesn't say that connections failed:\n%s", &b)
	}
}

// A round in which somebody failed has no ratio, and the others keep theirs.
func TestRatiosAreOfTheSameRounds(t *testing.T) {
	fast, slow := NewSubject("fast", []float64{10, 20, 40}), NewSubject("slow", []float64{1, 2, 3, 4})
	c := Case{Better: Higher, Subjects: []Subject{fast, slow}, Targets: []Target{{Subject: "fast", Against: []string{"slow"}, Bound: 10}}}
	c.Subjects[0].Rounds = []int{0, 1, 3} // and slow's are all four
	c.Judge()
	if got, want := c.Targets[0].Got, (statistics.Spread{Median: 10, Min: 10, Max: 10}); got != want || !c.Targets[0].Met {
		t.Errorf("ratios %v, met: %t; want %v, true", got, c.Targets[0].Met, want)
	}
}

// A subject that failed in a report's last round, or has none in it, is still compared with
// others' values of the same rounds.
func TestMergeKeepsRoundsApart(t *testing.T) {
	a, b := judged(), judged() // of three rounds
	a.Cases[0].Subject("kproxy").Values, a.Cases[0].Subject("kproxy").Rounds = []float64{1, 2}, []int{0, 1}
	b.Cases[0].Subjects = append(b.Cases[0].Subjects, NewSubject("new", []float64{1, 2}))
	got, err := Merge(a, b)
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string][]int{"kproxy": {0, 1, 3, 4, 5}, "new": {3, 4}} {
		if diff := cmp.Diff(want, got.Cases[0].Subject(name).Rounds); diff != "" {
			t.Errorf("rounds of %s (-want +got):\n%s", name, diff)
		}
	}
}

func TestRegressionsAreBeyondNoise(t *testing.T) {
	for _, tt := range []struct {
		name string
		now  []float64 // kproxy's rate, where HAProxy has 100, 200, 100
		want int
	}{
		{"the same", []float64{120, 240, 130}, 0},
		{"better", []float64{150, 300, 150}, 0},
		{"a bit less, within its noise", []float64{118, 236, 125}, 0},
		{"much less, but once as before", []float64{100, 200, 121}, 0},
		{"less", []float64{110, 210, 105}, 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			old := judged().Baseline()
			r := example()
			*r.Cases[0].Subject("kproxy") = NewSubject("kproxy", tt.now)
			r.Cases[0].Judge()
			r.Cases[1].Judge()
			if got := r.Regressions(old); len(got) != tt.want {
				t.Errorf("regressions %q, want %d", got, tt.want)
			}
		})
	}
}

func TestBaselineOfAnotherKernelIsNamed(t *testing.T) {
	r := judged()
	old := r.Baseline()
	if got := r.Elsewhere(old); got != "" {
		t.Errorf("of the same kernel: %s", got)
	}
	old.Kernel = "5.10"
	if got := r.Elsewhere(old); !strings.Contains(got, "5.10") || !strings.Contains(got, r.Host.Kernel) {
		t.Errorf("of another one: %q", got)
	}
}

func TestMergeJoinsValues(t *testing.T) {
	a, b := judged(), judged()
	b.Cases = append(b.Cases, Case{Name: "new", Subjects: []Subject{NewSubject("kproxy", []float64{1})}})
	b.Cases[0].Subjects[2].Failures, b.Cases[0].Subjects[2].Error = 1, "lost"
	b.Host.Peers = append(b.Host.Peers, Peer{"nginx", "1.22"})
	got, err := Merge(a, b)
	if err != nil {
		t.Fatal(err)
	}
	want := Subject{
		Name: "kproxy", Values: []float64{120, 240, 130, 120, 240, 130}, Rounds: []int{0, 1, 2, 3, 4, 5},
		Spread: statistics.Spread{Median: 130, Min: 120, Max: 240}, Failures: 1, Error: "lost",
	}
	if diff := cmp.Diff(want, *got.Cases[0].Subject("kproxy")); diff != "" {
		t.Errorf("values (-want +got):\n%s", diff)
	}
	if len(got.Cases) != 3 || len(got.Host.Peers) != 2 || got.Seconds != 180 {
		t.Errorf("%d cases, %d peers, %g s; want 3, 2 and 180", len(got.Cases), len(got.Host.Peers), got.Seconds)
	}
	b.Host.Kernel = "5.10"
	if _, err := Merge(a, b); err == nil {
		t.Error("reports of two kernels were merged")
	}
}

func TestFilesAreReadAsWritten(t *testing.T) {
	r, dir := judged(), t.TempDir()
	name := filepath.Join(dir, "r.json")
	if err := r.Write(name); err != nil {
		t.Fatal(err)
	}
	got, err := Read(name)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(r.Cases, got.Cases); diff != "" {
		t.Errorf("report (-written +read):\n%s", diff)
	}
	if err := r.Baseline().Write(name); err != nil {
		t.Fatal(err)
	}
	b, err := ReadBaseline(name)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(r.Baseline(), b); diff != "" {
		t.Errorf("baseline (-written +read):\n%s", diff)
	}
}

// The page says every figure and every verdict, and needs nothing else.
func TestPageIsComplete(t *testing.T) {
	r := judged()
	r.Notes, r.Warnings = []string{"interleaved"}, []string{"somebody <else> was busy"}
	var b strings.Builder
	if err := r.WriteHTML(&b); err != nil {
		t.Fatal(err)
	}
	page := b.String()
	for i := range r.Cases {
		c := &r.Cases[i]
		for _, s := range c.Subjects {
			if !strings.Contains(page, ">"+statistics.Figure(s.Median)+"</td>") || !strings.Contains(page, ">"+s.String()+"</text>") {
				t.Errorf("%s: the table or the chart doesn't say the median of %s", c.Name, s.Name)
			}
		}
	}
	for _, want := range []string{"not met", "not measured", "interleaved", "somebody &lt;else&gt; was busy", "HAProxy: 2.6", `class="own"`, `class="peer"`} {
		if !strings.Contains(page, want) {
			t.Errorf("the page doesn't contain %q", want)
		}
	}
	for _, not := range []string{"<script", "http://", "https://", "ZgotmplZ"} {
		if strings.Contains(page, not) {
			t.Errorf("the page contains %q", not)
		}
	}
}
