package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"text/tabwriter"
	"time"

	"kproxy.dev/kproxy/lab/compare"
	"kproxy.dev/kproxy/lab/compare/statistics"
	"kproxy.dev/kproxy/test/bench/result"
)

// report measures, prints a table, and writes the report where it was asked to.
func report(ctx context.Context, o options, f flags, args []string) error {
	host, err := compare.ReadHost()
	if err != nil {
		return err
	}
	start := time.Now()
	b := &bench{options: o, cpus: host.CPUs}
	err = b.run(ctx)
	r := &result.Report{
		KProxy: version(o.rig.KProxy), Command: strings.TrimSpace("run " + strings.Join(args, " ")),
		Started: start.UTC().Truncate(time.Second), Seconds: time.Since(start).Seconds(), Quick: o.quick,
		Host: result.Host{
			Kernel: host.Kernel, CPUs: host.CPUs, CPUModel: host.CPUModel, MemoryGiB: host.MemoryGiB, Go: host.Go,
			Peers: peerVersions(), Steal: statistics.Of(b.steal), Others: statistics.Of(b.others),
		},
		Cases: b.cases, Absent: b.absent, Notes: notes(o),
	}
	table(r)
	if f.json != "" { // also where a proxy couldn't be stopped: what was measured was
		err = errors.Join(err, r.Write(f.json))
	}
	if len(b.failed) > 0 && o.quick {
		err = errors.Join(err, fmt.Errorf("these carried no load without failure:\n%s", strings.Join(b.failed, "\n")))
	}
	return err
}

// notes say how it was measured.
func notes(o options) []string {
	return []string{
		"Data plane: client, node and backend are network namespaces on one machine, joined by veth, a set of them for each subject; all of them share its processors, and nothing is pinned.",
		fmt.Sprintf("Data plane: rounds are interleaved, every subject has a run before any has another; %d of them; figures are medians, and ratios are made within a round.", o.repeat),
		"Data plane: the proxy's CPU is that of all its processes and threads. What the kernel does in softirqs counts as the time of whoever raised them.",
	}
}

// version is what kproxy says of itself.
func version(kproxy string) string {
	out, err := exec.Command(kproxy, "version").Output()
	if err != nil {
		return "unknown"
	}
	first, _, _ := strings.Cut(strings.TrimSpace(string(out)), "\n")
	return strings.TrimPrefix(first, "kproxy ")
}

// peerVersions are those of the peers' programs, in their own words.
func peerVersions() []result.Peer {
	var out []result.Peer
	for _, p := range [][]string{{"HAProxy", "haproxy", "-v"}, {"nginx", "nginx", "-v"}} {
		text, err := exec.Command(p[1], p[2:]...).CombinedOutput()
		if err == nil {
			first, _, _ := strings.Cut(strings.TrimSpace(string(text)), "\n")
			first, _, _ = strings.Cut(first, " - ") // HAProxy's ends with its page
			_, first, _ = strings.Cut(first, "version")
			out = append(out, result.Peer{Name: p[0], Version: strings.Trim(first, ": ")})
		}
	}
	return out
}

// table prints the report for a terminal.
func table(r *result.Report) {
	t := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	for i := range r.Cases {
		c := &r.Cases[i]
		fmt.Fprintf(t, "\n%s: %s (%s, %s is better)\n", c.Name, c.Figure, c.Unit, c.Better)
		for k := range c.Subjects {
			s := &c.Subjects[k]
			failed := ""
			if s.Failures > 0 {
				failed = fmt.Sprintf("%d FAILED: %s", s.Failures, s.Error)
			}
			fmt.Fprintf(t, "  %s\t%s\t%s\n", s.Name, s.Spread, failed)
		}
		for k := range c.Targets {
			if g := &c.Targets[k]; g.Measured {
				fmt.Fprintf(t, "  → %s\t%s\twanted %s: %s\n", g.Subject, c.Reached(g), c.Wanted(g), map[bool]string{true: "met", false: "NOT MET"}[g.Met])
			}
		}
	}
	t.Flush()
}
