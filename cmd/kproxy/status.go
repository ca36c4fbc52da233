package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/urfave/cli/v2"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/view"
	"kproxy.dev/kproxy/web"
)

func statusCommand() *cli.Command {
	return &cli.Command{
		Name:      "status",
		Usage:     "show what every service does now, and why",
		ArgsUsage: "[NAMESPACE/NAME[:PORT]]",
		Flags: []cli.Flag{
			socketFlag(),
			outputFlag("table", "wide", "json"),
			&cli.BoolFlag{Name: "watch", Aliases: []string{"w"}, Usage: "follow it: on a terminal as a screen with keys (? says which), else printed every second"},
		},
		Action: showStatus,
	}
}

func showStatus(c *cli.Context) error {
	show, err := statusPrinter(c.String("output"))
	if err != nil {
		return err
	}
	if err := oneService(c); err != nil {
		return err
	}
	client := web.NewClient(c.String("socket"))
	status := func(ctx context.Context) (st plan.Status, err error) {
		if st, err = client.Status(ctx); err == nil {
			st.Services, err = selectServices(st.Services, c.Args().First())
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
	case c.String("output") == "json" || !canDraw(c.App.Writer):
		return watchPlainly(c.Context, c.App.Writer, status, show)
	}
	// Waiting for a kproxy that isn't there yet makes sense; for one that may not
	// be asked, or for a service that it doesn't have, it doesn't.
	st, err := status(c.Context)
	follow := func(ctx context.Context) (plan.Status, error) {
		st, err := client.Status(ctx)
		if err == nil {
			st.Services, _ = selectServices(st.Services, c.Args().First()) // it may be deleted, and come back
		}
		return st, err
	}
	s := screen{client: client, status: follow, model: view.New(view.Config{
		Theme: view.ThemeOf(os.Getenv), Endpoints: c.String("output") == "wide",
	})}
	switch {
	case err == nil:
		s.warm = &st
	case !errors.Is(err, web.ErrNotRunning):
		return err
	}
	return s.run(c.Context, os.Stdout)
}

// oneService checks that a command got at most one service to look at.
func oneService(c *cli.Context) error {
	if c.NArg() > 1 {
		return usageError("%s takes one service at most, got %q", c.Command.Name, c.Args().Slice())
	}
	if c.NArg() == 0 {
		return nil
	}
	_, _, _, err := parseServiceName(c.Args().First())
	return err
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

// selectServices keeps the service ports of NAMESPACE/NAME[:PORT]; all for "".
func selectServices(in []plan.ServiceStatus, name string) ([]plan.ServiceStatus, error) {
	if name == "" {
		return in, nil
	}
	ns, svc, port, err := parseServiceName(name)
	if err != nil {
		return nil, err
	}
	var out []plan.ServiceStatus
	for _, s := range in {
		if s.Namespace == ns && s.Name == svc && (port == "" || s.Port == port) {
			out = append(out, s)
		}
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("there is no service %s", name)
	}
	return out, nil
}

// parseServiceName reads NAMESPACE/NAME[:PORT].
func parseServiceName(s string) (namespace, name, port string, err error) {
	namespace, rest, ok := strings.Cut(s, "/")
	name, port, _ = strings.Cut(rest, ":")
	if !ok || namespace == "" || name == "" || strings.Contains(port, "/") {
		return "", "", "", usageError("service %q: want NAMESPACE/NAME or NAMESPACE/NAME:PORT", s)
	}
	return namespace, name, port, nil
}

func statusPrinter(format string) (func(io.Writer, plan.Status) error, error) {
	switch format {
	case "json":
		return func(w io.Writer, st plan.Status) error { return printJSON(w, st) }, nil
	case "table":
		return func(w io.Writer, st plan.Status) error { return printStatus(w, st, false) }, nil
	case "wide":
		return func(w io.Writer, st plan.Status) error { return printStatus(w, st, true) }, nil
	}
	return nil, usageError("output %q is not one of table, wide, json", format)
}

func printJSON(w io.Writer, v any) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(v)
}

// printStatus prints a line a service port, with its endpoints below when wide.
func printStatus(w io.Writer, st plan.Status, wide bool) error {
	fmt.Fprintf(w, "kproxy %s on %s, mode %s, %s, up %s\n", st.Version, st.Node, st.Mode, aliveWord(st.Alive), time.Duration(st.UptimeSeconds)*time.Second)
	if st.Sync.LastError != "" {
		fmt.Fprintf(w, "last sync failed: %s\n", st.Sync.LastError)
	}
	for _, s := range st.Sources {
		if s.Error != "" {
			fmt.Fprintf(w, "source %s: %s\n", s.Name, s.Error)
		}
	}
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	fmt.Fprintln(t, "SERVICE\tADDRESS\tDATA PLANE\tSTATE\tENDPOINTS\tACTIVE\tTOTAL\tFAILED\tREASON")
	for i := range st.Services {
		s := &st.Services[i]
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%d\t%d\t%d\t%s\n", view.Title(s), addressTitle(s), s.DataPlane, s.State,
			endpointsTitle(s), s.Connections.Active, s.Connections.Total, s.Connections.Failed, reasonTitle(s))
		if wide {
			printEndpoints(t, s)
		}
	}
	return t.Flush()
}

func aliveWord(alive bool) string {
	if alive {
		return "alive"
	}
	return "NOT SERVING (new connections go to the kernel rules beneath)"
}

func addressTitle(s *plan.ServiceStatus) string {
	if len(s.Addresses) == 0 {
		if s.NodePort != 0 {
			return fmt.Sprintf("*:%d/%s", s.NodePort, strings.ToLower(s.Protocol))
		}
		return "-"
	}
	title := fmt.Sprintf("%s/%s", s.Addresses[0], strings.ToLower(s.Protocol))
	if more := len(s.Addresses) - 1; more > 0 {
		title += fmt.Sprintf(" +%d", more)
	}
	return title
}

func endpointsTitle(s *plan.ServiceStatus) string {
	usable := 0
	for _, e := range s.Endpoints {
		if e.Usable {
			usable++
		}
	}
	return fmt.Sprintf("%d/%d", usable, len(s.Endpoints))
}

func reasonTitle(s *plan.ServiceStatus) string {
	reason := s.Reason
	if s.QualifiesInSeconds > 0 {
		reason += fmt.Sprintf(" (in %.0fs)", s.QualifiesInSeconds)
	}
	for _, p := range s.Problems {
		reason += "; " + p
	}
	return reason
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
	if beneath := beneathTitle(s); beneath != "" {
		fmt.Fprintf(t, "  beneath: %s\n", beneath)
	}
}

// beneathTitle says which kernel data plane's rules lie beneath a service, why
// those, and how they fall short; empty where there are none.
func beneathTitle(s *plan.ServiceStatus) string {
	if s.Beneath == plan.None || s.Beneath == "" {
		return ""
	}
	title := string(s.Beneath)
	if s.Scheduler != "" {
		title += ", scheduler " + s.Scheduler
	}
	if s.BeneathReason != "" {
		title += ": " + s.BeneathReason
	}
	if s.Degraded != "" {
		title += "; " + s.Degraded
	}
	return title
}
