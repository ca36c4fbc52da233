package main

import (
	"cmp"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/urfave/cli/v2"

	"kproxy.dev/kproxy/cmd/kproxy/screen"
	"kproxy.dev/kproxy/plan"
)

// eventsDescribed is how many events of a service port are printed with it.
const eventsDescribed = 10

func describeCommand() *cli.Command {
	return &cli.Command{
		Name:      "describe",
		Usage:     "show everything that is known of a service",
		ArgsUsage: targetUsage,
		Flags:     []cli.Flag{socketFlag()},
		Action:    describeService,
	}
}

func describeService(c *cli.Context) error {
	which, err := oneTarget(c)
	switch {
	case err != nil:
		return err
	case which == nil:
		return usageError("describe takes a service, as %s; kproxy status lists what there is", targetUsage)
	}
	client := clientOf(c)
	st, err := client.Status(c.Context)
	if err != nil {
		return err
	}
	if st.Services, err = which.selectFrom(st.Services); err != nil {
		return err
	}
	if err := printNode(c.App.Writer, st); err != nil {
		return err
	}
	for i := range st.Services {
		s := &st.Services[i]
		events, err := pastEvents(c.Context, client, []string{s.Title()}, eventsDescribed)
		if err != nil {
			return err
		}
		open := ""
		if rows, err := client.Connections(c.Context, s.Title()); err != nil {
			open = "unknown: " + err.Error()
		} else {
			open = screen.ConnectionSummary(rows)
		}
		if err := printDescription(c.App.Writer, s, open, events); err != nil {
			return err
		}
	}
	return nil
}

// printDescription prints a service port; open says which of its connections live.
func printDescription(w io.Writer, s *plan.ServiceStatus, open string, events []plan.Event) error {
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	line := func(name, format string, args ...any) {
		fmt.Fprintf(t, "%s:\t%s\n", name, fmt.Sprintf(format, args...))
	}
	fmt.Fprintln(t)
	line("Service", "%s", s.Title())
	line("Protocol", "%s", s.Protocol)
	addresses := make([]string, len(s.Addresses))
	for i, a := range s.Addresses {
		addresses[i] = a.String()
	}
	line("Addresses", "%s", cmp.Or(strings.Join(addresses, ", "), "none"))
	if s.NodePort != 0 {
		line("Node port", "%d", s.NodePort)
	}
	line("Algorithm", "%s", s.Algorithm)
	if s.AffinitySeconds > 0 {
		line("Affinity", "ClientIP, %s", time.Duration(s.AffinitySeconds*float64(time.Second)))
	}
	if s.InternalPolicy+s.ExternalPolicy != "" {
		line("Policies", "internal %s, external %s", cmp.Or(s.InternalPolicy, "Cluster"), cmp.Or(s.ExternalPolicy, "Cluster"))
	}
	if len(s.SourceRanges) > 0 {
		line("Source IPs", "%s", strings.Trim(fmt.Sprint(s.SourceRanges), "[]"))
	}
	line("Data plane", "%s", s.DataPlane)
	line("State", "%s: %s", s.State, reasonTitle(s))
	line("Fallback", "%s", cmp.Or(fallbackTitle(s), "none"))
	line("Moves", "%d offloads, %d recalls", s.Offloads, s.Recalls)
	for _, p := range s.Problems {
		line("Problem", "%s", p)
	}
	n := &s.Connections
	line("Connections", "%d active, %d in all, %d failed, %d retried; %sB in, %sB out", n.Active, n.Total, n.Failed, n.Retried, screen.Bytes(float64(n.BytesIn)), screen.Bytes(float64(n.BytesOut)))
	line("Open now", "%s", open)
	line("Endpoints", "%s in use", endpointsTitle(s))
	if err := t.Flush(); err != nil {
		return err
	}
	if len(s.Endpoints) > 0 {
		describeEndpoints(t, s.Endpoints)
	}
	fmt.Fprintf(t, "Events:\n")
	for _, e := range events {
		fmt.Fprintf(t, "  %s\t%s\t%s\n", e.Time.Local().Format(time.DateTime), e.Kind, e.Message)
	}
	if len(events) == 0 {
		fmt.Fprintln(t, "  none")
	}
	return t.Flush()
}

func describeEndpoints(t *tabwriter.Writer, endpoints []plan.EndpointStatus) {
	fmt.Fprintln(t, "  ADDRESS\tNODE\tHEALTH\tSINCE\tWEIGHT\tACTIVE\tTOTAL\tFAILED\tIN\tOUT\tSTATE")
	for i := range endpoints {
		e := &endpoints[i]
		since := "-"
		if !e.Since.IsZero() {
			since = e.Since.Local().Format(time.DateTime)
		}
		state := "in use"
		if !e.Usable {
			state = "not used"
		}
		if e.Local {
			state += ", local"
		}
		switch {
		case e.Terminating && e.Serving:
			state += ", terminating, still serving"
		case e.Terminating:
			state += ", terminating"
		case !e.Ready:
			state += ", not ready"
		}
		switch {
		case e.Ejected != nil:
			state += "; " + e.LastError
		case e.LastError != "":
			state += "; last error: " + e.LastError
		}
		fmt.Fprintf(t, "  %s\t%s\t%s\t%s\t%d\t%d\t%d\t%d\t%s\t%s\t%s\n", e.Address, cmp.Or(e.Node, "-"), e.Health, since, e.Weight,
			e.ActiveConnections, e.TotalConnections, e.Failures, screen.Bytes(float64(e.BytesIn)), screen.Bytes(float64(e.BytesOut)), state)
	}
}
