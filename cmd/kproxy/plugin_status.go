package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/urfave/cli/v2"

	"kproxy.dev/kproxy/cmd/kproxy/cluster"
	"kproxy.dev/kproxy/cmd/kproxy/screen"
	"kproxy.dev/kproxy/plan"
)

func clusterStatus(c *cli.Context) error {
	k, nodes, which, err := openCluster(c, 1, 0)
	if err != nil {
		return err
	}
	answers, err := matching(c, k, nodes, which)
	if err != nil {
		return err
	}
	report := cluster.Merge(answers)
	undated := report.Undated()
	events := map[string][]plan.Event{}
	for _, a := range cluster.Ask(c.Context, k, slices.DeleteFunc(slices.Clone(nodes), func(n cluster.Node) bool { return !undated[n.Name] }),
		func(ctx context.Context, n cluster.Node) ([]plan.Event, error) {
			return k.Client(n).Timeline(ctx, "", eventsAtMost)
		}) {
		events[a.Node.Name] = a.Value
	}
	report.Date(events)
	wide := c.String("output") == "wide"
	print := printer(c, func(w io.Writer, r *cluster.Report) error { return printReport(w, r, wide) })
	if c.String("output") == "name" {
		print = func(w io.Writer, r *cluster.Report) error {
			for i := range r.Services {
				fmt.Fprintln(w, r.Services[i].Title())
			}
			return nil
		}
	}
	return errors.Join(print(c.App.Writer, report), troubled(io.Discard, answers)) // the report says who, and why
}

// printReport prints a line a node and a line a service port; wide has a line for each difference instead of a summary.
func printReport(w io.Writer, r *cluster.Report, wide bool) error {
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	fmt.Fprintln(t, "NODE\tSTATE\tVERSION\tMODE\tSERVICES\tACTIVE\tNOTE")
	for _, n := range r.Nodes {
		note := strings.Join(append(slices.DeleteFunc([]string{n.Error}, func(s string) bool { return s == "" }), n.Warnings...), "; ")
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%d\t%d\t%s\n", n.Node, n.State, cmp.Or(n.Version, "-"), cmp.Or(n.Mode, "-"), n.Services, n.Active, note)
	}
	fmt.Fprintln(t)
	if err := t.Flush(); err != nil {
		return err
	}
	fmt.Fprintln(t, "SERVICE\tADDRESS\tDATA PLANE\tENDPOINTS\tACTIVE\tTOTAL\tFAILED\tNODES\tDIFFER")
	for i := range r.Services {
		s := &r.Services[i]
		differ := groups(s.Differences)
		summary := strings.Join(differ, "; ")
		if wide {
			summary = ""
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%d/%d\t%d\t%d\t%d\t%d\t%s\n", s.Title(), addressTitle(s), planesTitle(s), s.Up, s.Endpoints,
			s.Connections.Active, s.Connections.Total, s.Connections.Failed, s.Nodes, cmp.Or(summary, "-"))
		if wide {
			for _, line := range differ {
				fmt.Fprintf(t, "  %s\n", line)
			}
		}
	}
	return t.Flush()
}

func addressTitle(s *cluster.ServiceReport) string {
	return screen.Address(&plan.ServiceStatus{Addresses: s.Addresses, NodePort: s.NodePort}, "/"+strings.ToLower(s.Protocol))
}

// planesTitle names the data plane, with the numbers of nodes where these differ.
func planesTitle(s *cluster.ServiceReport) string {
	planes := slices.SortedFunc(maps.Keys(s.DataPlanes), func(a, b plan.DataPlane) int {
		return cmp.Or(cmp.Compare(s.DataPlanes[b], s.DataPlanes[a]), cmp.Compare(a, b))
	})
	if len(planes) == 1 {
		return string(planes[0])
	}
	var out []string
	for _, p := range planes {
		out = append(out, fmt.Sprintf("%s %d", p, s.DataPlanes[p]))
	}
	return strings.Join(out, ", ")
}

// namedAtMost is how many nodes are named that differ in the same.
const namedAtMost = 3

// groups are a sentence for each thing in which nodes differ from most others.
func groups(all []cluster.Difference) []string {
	var out []string
	for len(all) > 0 {
		first := all[0]
		var names []string
		var rest []cluster.Difference
		for _, d := range all {
			if d.What != first.What {
				rest = append(rest, d)
				continue
			}
			names = append(names, d.Node)
			if !d.Since.IsZero() && (first.Since.IsZero() || d.Since.Before(first.Since)) {
				first.Since = d.Since
			}
		}
		text := strings.Join(names[:min(len(names), namedAtMost)], ", ")
		if more := len(names) - namedAtMost; more > 0 {
			text += fmt.Sprintf(" and %d more", more)
		}
		text += " " + first.What
		if !first.Since.IsZero() {
			text += " since " + first.Since.Local().Format(time.DateTime)
		}
		if first.Why != "" {
			text += " (" + first.Why + ")"
		}
		out, all = append(out, text), rest
	}
	return out
}

// carried holds what a service port or a node carried per second, and how many connections it has now.
type carried struct {
	Name     string  `json:"name"`
	Active   int64   `json:"activeConnections"`
	New      float64 `json:"newPerSecond"`
	Failed   float64 `json:"failedPerSecond"`
	BytesIn  float64 `json:"bytesInPerSecond"`
	BytesOut float64 `json:"bytesOutPerSecond"`
}

// sample is a node's status at two moments.
type sample struct {
	before, after plan.Status
	seconds       float64
}

func clusterTop(c *cli.Context) error {
	by := cmp.Or(c.Args().First(), "services")
	interval := c.Duration("interval")
	if err := oneOf("top", by, "services", "nodes"); err != nil {
		return err
	}
	if interval <= 0 || interval >= c.Duration("timeout") || c.Int("limit") < 0 {
		return usageError("--interval %s is not between 0 and --timeout %s, or --limit %d is less than 0", interval, c.Duration("timeout"), c.Int("limit"))
	}
	k, nodes, _, err := openCluster(c, 1, 1)
	if err != nil {
		return err
	}
	answers := cluster.Ask(c.Context, k, nodes, func(ctx context.Context, n cluster.Node) (s sample, err error) {
		client := k.Client(n)
		if s.before, err = client.Status(ctx); err != nil {
			return s, err
		}
		began := time.Now()
		if !sleep(ctx, interval) {
			return s, ctx.Err()
		}
		s.after, err = client.Status(ctx)
		s.seconds = time.Since(began).Seconds()
		return s, err
	})
	rows := loads(answers, by == "nodes")
	if limit := c.Int("limit"); limit > 0 {
		rows = rows[:min(limit, len(rows))]
	}
	print := printer(c, func(w io.Writer, rows []carried) error {
		t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
		fmt.Fprintln(t, strings.ToUpper(strings.TrimSuffix(by, "s"))+"\tACTIVE\tNEW/S\tFAILED/S\tBYTES IN/S\tBYTES OUT/S")
		for _, l := range rows {
			fmt.Fprintf(t, "%s\t%d\t%.1f\t%.1f\t%.0f\t%.0f\n", l.Name, l.Active, l.New, l.Failed, l.BytesIn, l.BytesOut)
		}
		return t.Flush()
	})
	return errors.Join(print(c.App.Writer, rows), troubled(c.App.ErrWriter, answers))
}

// loads sums samples by service port or by node, the busiest first.
func loads(answers []cluster.Answer[sample], nodes bool) []carried {
	sums := map[string]*carried{}
	for i := range answers {
		a := &answers[i]
		if a.Trouble != nil {
			continue
		}
		before := map[string]plan.Connections{}
		key := func(s *plan.ServiceStatus) string { return s.Title() + "/" + strings.ToLower(s.Protocol) }
		for j := range a.Value.before.Services {
			s := &a.Value.before.Services[j]
			before[key(s)] = s.Connections
		}
		if nodes {
			sums[a.Node.Name] = &carried{Name: a.Node.Name}
		}
		for j := range a.Value.after.Services {
			s := &a.Value.after.Services[j]
			name := key(s)
			was, now := before[name], s.Connections
			if nodes {
				name = a.Node.Name
			}
			l := sums[name]
			if l == nil {
				l = &carried{Name: name}
				sums[name] = l
			}
			rate := func(was, now uint64) float64 {
				if now < was { // its kproxy has begun anew
					was = 0
				}
				return float64(now-was) / a.Value.seconds
			}
			l.Active += now.Active
			l.New += rate(was.Total, now.Total)
			l.Failed += rate(was.Failed, now.Failed)
			l.BytesIn += rate(was.BytesIn, now.BytesIn)
			l.BytesOut += rate(was.BytesOut, now.BytesOut)
		}
	}
	out := []carried{}
	for _, l := range sums {
		out = append(out, *l)
	}
	slices.SortFunc(out, func(a, b carried) int {
		return cmp.Or(cmp.Compare(b.BytesIn+b.BytesOut, a.BytesIn+a.BytesOut), cmp.Compare(b.New, a.New), cmp.Compare(b.Active, a.Active), cmp.Compare(a.Name, b.Name))
	})
	return out
}
