package compare

import (
	"fmt"
	"slices"

	"kproxy.dev/kproxy/lab/compare/load"
	"kproxy.dev/kproxy/lab/compare/statistics"
)

// summarize makes the report's rows, and all that is said about them, of the
// samples.
func (x *comparison) summarize() {
	r := &x.report
	numbers := append([]int{0}, x.config.Services...)
	for _, n := range numbers {
		for _, m := range metrics {
			if row := x.row(m, n); len(row.Cells) > 0 {
				r.Rows = append(r.Rows, row)
			}
		}
	}
	r.Noise = noise(x.samples, r.Host.CPUs)
	r.Warnings = warnings(r)
	r.Findings = findings(r)
}

// row gathers one figure of all planes.
func (x *comparison) row(m metric, services int) Row {
	row := Row{Key: m.key, Title: m.title, Unit: m.unit, More: m.more, Services: services}
	for _, p := range x.report.measured() {
		c := Cell{Plane: p}
		parts := map[string][]float64{}
		for i := range x.samples {
			s := &x.samples[i]
			if s.plane != p || s.kind != m.kind || s.services != services {
				continue
			}
			c.Runs = append(c.Runs, m.value(&s.outcome))
			if m.parts == nil {
				continue
			}
			for _, part := range m.parts(&s.outcome) {
				if parts[part.Name] == nil {
					c.Parts = append(c.Parts, Part{Name: part.Name})
				}
				parts[part.Name] = append(parts[part.Name], part.Value)
			}
		}
		if len(c.Runs) == 0 {
			continue
		}
		for i := range c.Parts {
			c.Parts[i].Value = statistics.Of(parts[c.Parts[i].Name]).Median
		}
		c.Spread = statistics.Of(c.Runs)
		if direct := row.Cell(Direct); direct != nil {
			ratio := statistics.Of(statistics.Ratios(c.Runs, direct.Runs))
			c.Ratio = &ratio
		}
		row.Cells = append(row.Cells, c)
	}
	return row
}

// noise looks at the loads that keep the processors busy: in the short ones the
// clock ticks of /proc are too coarse.
func noise(samples []sample, cpus int) Noise {
	var n Noise
	var others, steal []float64
	for i := range samples {
		o := &samples[i].outcome
		n.Failed += o.Failed
		if n.Error == "" && o.Error != "" {
			n.Error = fmt.Sprintf("%s through %s: %s", samples[i].kind, samples[i].plane, o.Error)
		}
		if slices.Contains([]load.Kind{load.Throughput, load.Connections}, samples[i].kind) {
			capacity := o.Seconds * float64(cpus)
			others = append(others, o.CPU.Others()/capacity)
			steal = append(steal, o.CPU.Steal/capacity)
		}
	}
	n.Others, n.Steal = statistics.Of(others), statistics.Of(steal)
	return n
}

// warnings are what a reader must know before believing the figures.
func warnings(r *Report) []string {
	var out []string
	add := func(format string, args ...any) { out = append(out, fmt.Sprintf(format, args...)) }
	if r.Noise.Others.Median > 0.05 || r.Noise.Others.Max > 0.2 {
		add("Others used %.0f%% of the processors while loads ran (up to %.0f%% of a run): trust the ratios more than the figures, and neither beyond their spread. Measure again on a calm machine.", 100*r.Noise.Others.Median, 100*r.Noise.Others.Max)
	}
	if r.Noise.Steal.Max > 0.03 {
		add("The hypervisor took up to %.0f%% of the processors away during a run.", 100*r.Noise.Steal.Max)
	}
	if r.Noise.Failed > 0 {
		add("%d exchanges failed and aren't in the figures; the first: %s.", r.Noise.Failed, r.Noise.Error)
	}
	if r.Repeat < 3 {
		add("There were only %s: the spread says little.", count(r.Repeat, "round"))
	}
	if r.Host.CPUs <= 2 {
		add("Client, proxy and backend shared %s, so what the proxy uses the others lack; with processors to spare, differences in throughput are smaller.", count(r.Host.CPUs, "processor"))
	}
	return out
}

func count(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%s %ss", statistics.Thousands(n), what)
}
