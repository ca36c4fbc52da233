package compare

import (
	"fmt"
	"slices"
	"strings"

	"kproxy.dev/kproxy/lab/compare/statistics"
)

// findings are what the figures say, in sentences made of them. What a run
// can't tell apart is said to be so.
func findings(r *Report) []string {
	var out []string
	for _, f := range []func(*Report) []string{findBusy, findLimit, findGenerations, findProxyTime, findFirstPackets, findUserspaceAccepts, findProgramming, findMissing} {
		out = append(out, f(r)...)
	}
	return out
}

// versus compares a figure of plane a with that of b, round by round.
func versus(row *Row, a, b Plane) (times statistics.Spread, tell, ok bool) {
	if row == nil {
		return times, false, false
	}
	ca, cb := row.Cell(a), row.Cell(b)
	if ca == nil || cb == nil {
		return times, false, false
	}
	q := statistics.Ratios(ca.Runs, cb.Runs)
	return statistics.Of(q), statistics.Distinct(q), len(q) > 0
}

// proxied are the planes with a proxy that were measured.
func (r *Report) proxied() []Plane {
	return slices.DeleteFunc(r.measured(), func(p Plane) bool { return p == Direct })
}

// times says a ratio: "2.1 times (2.0–2.3)".
func times(s statistics.Spread) string {
	text := s.String()
	if median, rest, ok := strings.Cut(text, " "); ok {
		return median + " times " + rest
	}
	return text + " times"
}

// percent says a ratio as a percentage: "79% (77–82%)".
func percent(s statistics.Spread) string {
	p := func(v float64) string { return fmt.Sprintf("%.0f", 100*v) }
	if p(s.Min) == p(s.Max) {
		return p(s.Median) + "%"
	}
	return fmt.Sprintf("%s%% (%s–%s%%)", p(s.Median), p(s.Min), p(s.Max))
}

func percentRange(s statistics.Spread) string {
	return fmt.Sprintf("%.0f–%.0f%%", 100*s.Min, 100*s.Max)
}

const cantTell = "no difference that these rounds can tell"

// busy is the share of the processors that others may use before the figures
// are about them.
const busy = 0.25

func findBusy(r *Report) []string {
	if r.Noise.Others.Median <= busy {
		return nil
	}
	return []string{fmt.Sprintf("Others used %.0f%% of the processors: on a machine so busy, what follows is as much about them as about data planes. Measure again on a calm one.", 100*r.Noise.Others.Median)}
}

// findLimit: each plane against no proxy at all.
func findLimit(r *Report) []string {
	var out []string
	for _, p := range r.proxied() {
		var told, untold []string
		for _, f := range []struct{ key, what string }{
			{keyThroughput, "the throughput"}, {keyConnections, "the new connections per second"}, {keySessions, "the new UDP sessions per second"},
		} {
			q, tell, ok := versus(r.Row(f.key, 0), p, Direct)
			switch {
			case ok && tell:
				told = append(told, percent(q)+" of "+f.what)
			case ok:
				untold = append(untold, fmt.Sprintf("%s (%s)", f.what, percentRange(q)))
			}
		}
		var said []string
		if len(told) > 0 {
			said = append(said, p.Name()+" reached "+list(told))
		}
		if len(untold) > 0 {
			said = append(said, fmt.Sprintf("%s: %s in %s", p.Name(), cantTell, list(untold)))
		}
		if len(said) > 0 {
			out = append(out, fmt.Sprintf("Direct routing is 100%%: %s.", strings.Join(said, "; ")))
		}
	}
	return out
}

// list joins as a sentence does.
func list(words []string) string {
	if len(words) < 2 {
		return strings.Join(words, "")
	}
	return strings.Join(words[:len(words)-1], ", ") + " and " + words[len(words)-1]
}

// findGenerations: userspace against what the kernel does.
func findGenerations(r *Report) []string {
	var out []string
	for _, p := range r.proxied() {
		if p == Userspace {
			continue
		}
		for _, f := range []struct{ key, what string }{
			{keyThroughputCPU, "the processor time per gigabyte"}, {keyConnectionsCPU, "the processor time per new connection"}, {keyRequestsMedian, "the time of a TCP request (median)"},
		} {
			out = append(out, sentence(r.Row(f.key, 0), Userspace, p, f.what)...)
		}
	}
	return append(out, sentence(r.Row(keyConnectionsCPU, 0), IPVS, IPTables, "the processor time per new connection")...)
}

// sentence compares a with b; nothing if one wasn't measured.
func sentence(row *Row, a, b Plane, what string) []string {
	q, tell, ok := versus(row, a, b)
	switch {
	case !ok:
		return nil
	case !tell:
		return []string{fmt.Sprintf("%s took %s %s of %s here: %s.", capital(a.Name()), times(q), what, b.Name(), cantTell)}
	}
	return []string{fmt.Sprintf("%s took %s %s of %s here.", capital(a.Name()), times(q), what, b.Name())}
}

func capital(s string) string { return strings.ToUpper(s[:1]) + s[1:] }

// findProxyTime: who did the work.
func findProxyTime(r *Report) []string {
	row := r.Row(keyThroughputCPU, 0)
	if row == nil {
		return nil
	}
	var out []string
	for _, p := range r.proxied() {
		c := row.Cell(p)
		if c == nil {
			continue
		}
		for _, part := range c.Parts {
			if part.Name == "kproxy" {
				out = append(out, fmt.Sprintf("kproxy's own process used %s of %s s per gigabyte through %s.", statistics.Figure(part.Value), statistics.Figure(c.Median), p.Name()))
			}
		}
	}
	return out
}

// findFirstPackets: does connecting get slower with more services?
func findFirstPackets(r *Report) []string {
	if len(r.Services) < 2 {
		return nil
	}
	few, many := r.Services[0], r.Services[len(r.Services)-1]
	a, b := r.Row(keyConnectMedian, few), r.Row(keyConnectMedian, many)
	if a == nil || b == nil {
		return nil
	}
	var out []string
	for _, p := range r.proxied() {
		at, then := a.Cell(p), b.Cell(p)
		if at == nil || then == nil {
			continue
		}
		text := fmt.Sprintf("Connecting through %s took %s µs among %s services and %s µs among %s (medians)", p.Name(), statistics.Figure(at.Median), statistics.Thousands(few), statistics.Figure(then.Median), statistics.Thousands(many))
		// The two were measured at different times: only what exceeds both spreads counts.
		if at.Min <= then.Max && then.Min <= at.Max {
			text += ", " + cantTell
		}
		out = append(out, text+".")
	}
	return out
}

// findUserspaceAccepts: a connect that succeeds is no answer.
func findUserspaceAccepts(r *Report) []string {
	if len(r.Services) == 0 {
		return nil
	}
	connects, answers := r.Row(keyConnectMedian, r.Services[0]), r.Row(keyAnswerMedian, r.Services[0])
	c, _, ok := versus(connects, Userspace, Direct)
	a, _, ok2 := versus(answers, Userspace, Direct)
	if !ok || !ok2 {
		return nil
	}
	return []string{fmt.Sprintf("Through userspace, connecting took %s as long as directly, and the first answer %s; a connection counts as made when kproxy has accepted it, before it has one to a backend.", times(c), times(a))}
}

func findProgramming(r *Report) []string {
	var out []string
	for _, p := range r.proxied() {
		var parts []string
		for _, g := range r.Programming {
			if g.Plane == p {
				parts = append(parts, fmt.Sprintf("%s s for %s", statistics.Figure(g.Seconds), statistics.Thousands(g.Services)))
			}
		}
		if len(parts) > 0 {
			out = append(out, fmt.Sprintf("Until all services were programmed, kproxy took with %s: %s.", p.Name(), strings.Join(parts, ", ")))
		}
	}
	return out
}

func findMissing(r *Report) []string {
	var out []string
	for _, p := range r.Planes {
		if !p.Available {
			out = append(out, fmt.Sprintf("%s was not measured: %s.", capital(p.Plane.Name()), strings.TrimSuffix(p.Reason, ".")))
		}
	}
	return out
}
