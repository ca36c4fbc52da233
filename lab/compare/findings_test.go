package compare

import (
	"strings"
	"testing"

	"kproxy.dev/kproxy/lab/compare/statistics"
)

func row(key string, services int, direct, userspace, iptables []float64) Row {
	r := Row{Key: key, Services: services, Unit: "µs"}
	for p, runs := range map[Plane][]float64{Direct: direct, Userspace: userspace, IPTables: iptables} {
		r.Cells = append(r.Cells, Cell{Plane: p, Runs: runs, Spread: statistics.Of(runs)})
	}
	return r
}

func findingsOf(rows ...Row) string {
	r := Report{Rows: rows, Services: []int{10, 1000}}
	for _, p := range []Plane{Direct, Userspace, IPTables} {
		r.Planes = append(r.Planes, PlaneReport{Plane: p, Available: true})
	}
	return strings.Join(findings(&r), "\n")
}

func TestFindings(t *testing.T) {
	for _, tt := range []struct {
		name string
		rows []Row
		want string
	}{
		{
			"against the limit", []Row{row(keyThroughput, 0, []float64{10, 20, 20}, []float64{5, 8, 9}, []float64{9, 19, 19})},
			"Direct routing is 100%: userspace reached 45% (40–50%) of the throughput.",
		},
		{
			"as good as the limit", []Row{row(keyThroughput, 0, []float64{10, 20, 20}, []float64{5, 8, 9}, []float64{11, 19, 20})},
			"Direct routing is 100%: iptables: no difference that these rounds can tell in the throughput (95–110%).",
		},
		{
			"generations", []Row{row(keyThroughputCPU, 0, []float64{1, 1, 1}, []float64{3, 4, 5}, []float64{1, 2, 2})},
			"Userspace took 2.50 times (2.00–3.00) the processor time per gigabyte of iptables here.",
		},
		{
			"generations that are alike", []Row{row(keyThroughputCPU, 0, []float64{1, 1, 1}, []float64{1, 3, 2}, []float64{2, 2, 2})},
			"Userspace took 1.00 times (0.500–1.50) the processor time per gigabyte of iptables here: no difference that these rounds can tell.",
		},
		{
			"more services cost", []Row{row(keyConnectMedian, 10, []float64{1, 1}, []float64{2, 3}, []float64{5, 6}), row(keyConnectMedian, 1000, []float64{1, 1}, []float64{2, 4}, []float64{7, 8})},
			"Connecting through iptables took 5.50 µs among 10 services and 7.50 µs among 1,000 (medians).",
		},
		{
			"more services cost nothing", []Row{row(keyConnectMedian, 10, []float64{1, 1}, []float64{2, 3}, []float64{5, 6}), row(keyConnectMedian, 1000, []float64{1, 1}, []float64{2, 4}, []float64{7, 8})},
			"Connecting through userspace took 2.50 µs among 10 services and 3.00 µs among 1,000 (medians), no difference that these rounds can tell.",
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := findingsOf(tt.rows...); !strings.Contains(got+"\n", tt.want+"\n") {
				t.Errorf("findings:\n%s\nwant among them:\n%s", got, tt.want)
			}
		})
	}
	crowded := Report{Noise: Noise{Others: statistics.Spread{Median: 0.6, Min: 0.5, Max: 0.8}}}
	if got := findings(&crowded); len(got) != 1 || !strings.Contains(got[0], "Others used 60%") {
		t.Errorf("of a crowded machine: %q", got)
	}
	if got := findingsOf(); got != "" {
		t.Errorf("of no figures: %s", got)
	}
}

func TestWarnings(t *testing.T) {
	calm := Report{Repeat: 5, Host: Host{CPUs: 8}}
	if got := warnings(&calm); len(got) != 0 {
		t.Errorf("of a calm machine: %q", got)
	}
	bad := Report{Repeat: 1, Host: Host{CPUs: 2}, Noise: Noise{Others: statistics.Spread{Median: 0.3, Min: 0.1, Max: 0.5}, Steal: statistics.Spread{Median: 0, Min: 0, Max: 0.1}, Failed: 2, Error: "requests through IPVS: lost"}}
	got := strings.Join(warnings(&bad), "\n")
	for _, phrase := range []string{"30% of the processors", "up to 50%", "took up to 10%", "2 exchanges failed", "lost", "only 1 round:", "2 processors"} {
		if !strings.Contains(got, phrase) {
			t.Errorf("warnings don't say %q:\n%s", phrase, got)
		}
	}
}
