package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/urfave/cli/v2"

	"kproxy.dev/kproxy/cmd/kproxy/screen"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/web"
)

func statusCommand() *cli.Command {
	return &cli.Command{
		Name:      "status",
		Usage:     "show what every service does now, and why",
		ArgsUsage: "[" + targetUsage + "]",
		Flags: []cli.Flag{
			socketFlag(),
			outputFlag("table", "wide", "json", "yaml", "name"),
			&cli.BoolFlag{Name: "watch", Aliases: []string{"w"}, Usage: "follow it: on a terminal as a screen with keys (? says which), else printed every second"},
			&cli.BoolFlag{Name: "wait", Usage: "wait until new connections to every service are carried and the fallback rules are written; exit 1 if that takes longer than --timeout"},
			&cli.DurationFlag{Name: "timeout", Value: time.Minute, Usage: "how long --wait waits"},
		},
		Action: showStatus,
	}
}

func showStatus(c *cli.Context) error {
	which, err := oneTarget(c)
	if err != nil {
		return err
	}
	output := c.String("output")
	show := printer(c, func(w io.Writer, st plan.Status) error { return printStatus(w, st, output == "wide") })
	if output == "name" {
		show = printNames
	}
	client := clientOf(c)
	if c.Bool("wait") {
		if err := waitUntilReady(c.Context, c.Duration("timeout"), client.Status); err != nil {
			return err
		}
	}
	status := func(ctx context.Context) (st plan.Status, err error) {
		if st, err = client.Status(ctx); err == nil {
			st.Services, err = which.selectFrom(st.Services)
		}
		return st, err
	}
	switch {
	case !c.Bool("watch"):
		st, err := status(c.Context)
		if err != nil {
			return err
		}
		return show(c.App.Writer, st)
	case isForPrograms(output) || output == "name" || !canDraw(c.App.Writer):
		return watchPlainly(c.Context, c.App.Writer, status, show)
	}
	// Waiting for a kproxy that isn't there yet makes sense; for one that may not
	// be asked, or for a service that it doesn't have, it doesn't.
	st, err := status(c.Context)
	follow := func(ctx context.Context) (plan.Status, error) {
		st, err := client.Status(ctx)
		if err == nil {
			st.Services, _ = which.selectFrom(st.Services) // it may be deleted, and come back
		}
		return st, err
	}
	if err != nil && !errors.Is(err, web.ErrNotRunning) {
		return err
	}
	return watchStatus(c.Context, client, screen.Config{Theme: screen.ThemeOf(os.Getenv), Endpoints: output == "wide"}, st, follow, nil)
}

// sleep returns false when ctx ended first.
func sleep(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}

// printNames prints the service ports as commands take them.
func printNames(w io.Writer, st plan.Status) error {
	var b strings.Builder
	for i := range st.Services {
		b.WriteString(st.Services[i].Title() + "\n")
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// printNode prints how kproxy is, and what is wrong with it.
func printNode(w io.Writer, st plan.Status) error {
	_, err := fmt.Fprintf(w, "kproxy %s on %s, mode %s, %s, up %s\n", st.Version, st.Node, st.Mode, healthTitle(&st), time.Duration(st.UptimeSeconds)*time.Second)
	for _, r := range screen.Remarks(&st) {
		fmt.Fprintf(w, "%s%s\n", r.Label, r.Text)
	}
	return err
}

// printStatus prints a line a service port, with its endpoints below when wide.
func printStatus(w io.Writer, st plan.Status, wide bool) error {
	if err := printNode(w, st); err != nil {
		return err
	}
	fmt.Fprintln(w, st.Verdict())
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	fmt.Fprintln(t, "SERVICE\tADDRESS\tDATA PLANE\tSTATE\tENDPOINTS\tACTIVE\tTOTAL\tFAILED\tREASON")
	for i := range st.Services {
		s := &st.Services[i]
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%d\t%d\t%d\t%s\n", s.Title(), screen.Address(s, "/"+strings.ToLower(s.Protocol)), s.DataPlane, s.State,
			endpointsTitle(s), s.Connections.Active, s.Connections.Total, s.Connections.Failed, strings.Join(slices.Concat([]string{reasonTitle(s)}, s.Problems, firstEjected(s)), "; "))
		if wide {
			printEndpoints(t, s)
		}
	}
	return t.Flush()
}

func healthTitle(st *plan.Status) string {
	switch {
	case !st.Alive:
		return fmt.Sprintf("%s (%s)", st.Health(), screen.Unserved(st))
	case len(st.Exhausted) > 0:
		return st.Health() + " (clients wait, or others end for them: see kproxy_userspace_shed_total)"
	}
	return st.Health()
}

// firstEjected says of one endpoint why it is ejected, if one is; wide output tells of all.
func firstEjected(s *plan.ServiceStatus) []string {
	for i := range s.Endpoints {
		if e := &s.Endpoints[i]; e.Ejected != nil {
			return []string{e.Address.String() + " is " + e.LastError}
		}
	}
	return nil
}

func endpointsTitle(s *plan.ServiceStatus) string {
	return fmt.Sprintf("%d/%d", s.UsableEndpoints(), len(s.Endpoints))
}

// reasonTitle says why s is in its data plane, and when that may change.
func reasonTitle(s *plan.ServiceStatus) string {
	if s.QualifiesInSeconds > 0 {
		return fmt.Sprintf("%s (in %.0fs)", s.Reason, s.QualifiesInSeconds)
	}
	return s.Reason
}

func printEndpoints(t io.Writer, s *plan.ServiceStatus) {
	for _, e := range s.Endpoints {
		use := "in use"
		if !e.Usable {
			use = "not used"
		}
		note := e.LastError
		if e.Terminating {
			note = "terminating " + note
		}
		fmt.Fprintf(t, "  %s\t%s\t\t%s\tweight %d\t%d\t%d\t%d\t%s\n", e.Address, e.Node, e.Health, e.Weight, e.ActiveConnections, e.TotalConnections, e.Failures, strings.TrimSpace(use+" "+note))
	}
	if fallback := fallbackTitle(s); fallback != "" {
		fmt.Fprintf(t, "  fallback: %s\n", fallback)
	}
}

// fallbackTitle says which kernel data plane's rules a service falls back to, why
// those, and how they fall short; empty where there are none.
func fallbackTitle(s *plan.ServiceStatus) string {
	if s.Kernel == plan.None || s.Kernel == "" {
		return ""
	}
	title := string(s.Kernel)
	if s.Scheduler != "" {
		title += ", scheduler " + s.Scheduler
	}
	if s.KernelReason != "" {
		title += ": " + s.KernelReason
	}
	if s.Degraded != "" {
		title += "; " + s.Degraded
	}
	return title
}
