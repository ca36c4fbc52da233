package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/urfave/cli/v2"

	"kproxy.dev/kproxy/cmd/kproxy/cluster"
	"kproxy.dev/kproxy/cmd/kproxy/screen"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/trace"
	"kproxy.dev/kproxy/web"
)

// pluginName is this program's as a plugin of kubectl, which finds it by that.
const pluginName = "kubectl-kproxy"

// newPlugin is `kubectl kproxy`: the commands of a node, asked of all.
func newPlugin() *cli.App {
	commands := []*cli.Command{
		{
			Name: "status", Usage: "show what every service does on all nodes, and where nodes differ", ArgsUsage: "[" + pluginTarget + "]",
			Flags: clusterFlags(outputFlag("table", "wide", "json", "yaml", "name")), Action: clusterStatus,
		},
		{
			Name: "top", Usage: "show which services, or nodes, carry most", ArgsUsage: "[services|nodes]",
			Flags: clusterFlags(outputFlag("table", "json", "yaml"),
				&cli.DurationFlag{Name: "interval", Value: 2 * time.Second, Usage: "how long rates are measured"},
				&cli.IntFlag{Name: "limit", Value: 20, Usage: "print at most `N`; 0 for all"}),
			Action: clusterTop,
		},
		{
			Name: "connections", Usage: "list live connections of all nodes", ArgsUsage: "[" + pluginTarget + "]",
			Flags: clusterFlags(outputFlag("table", "wide", "json", "yaml"),
				choiceFlag(&cli.StringFlag{Name: "sort", Value: screen.ConnectionOrders[0], Usage: "`ORDER` on each node: " + strings.Join(screen.ConnectionOrders, ", ")}, screen.ConnectionOrders...),
				&cli.IntFlag{Name: "limit", Value: rowsAtMost, Usage: "print at most `N` connections of each node; 0 for all. JSON and YAML have all unless this is given"}),
			Action: clusterConnections,
		},
		{
			Name: "events", Usage: "list what happened on all nodes", ArgsUsage: "[" + pluginTarget + "]",
			Flags:  clusterFlags(outputFlag("table", "json", "yaml"), &cli.IntFlag{Name: "limit", Value: 100, Usage: fmt.Sprintf("list the last `N` events, at most %d", eventsAtMost)}),
			Action: clusterEvents,
		},
		{
			Name: "trace", Usage: "say where a pod's connection would go, on its node", ArgsUsage: "pod/NAME|node/NAME " + pluginTarget,
			Flags: clusterFlags(outputFlag("text", "json", "yaml"), &cli.StringFlag{Name: "proto", Usage: "tcp or udp", Value: "tcp"},
				&cli.BoolFlag{Name: "in-pod", Usage: "begin in the pod, with its own rules and routes: an ephemeral container with NET_ADMIN is added to it, which stays in its record"}), Action: clusterTrace,
		},
		{
			Name: "pin", Usage: "keep a service in a data plane until `auto`, on all nodes or those of --node", ArgsUsage: pluginTarget + " userspace|kernel|auto",
			Flags: clusterFlags(), Action: clusterPin,
		},
		{
			Name: "drift", Usage: "say what differs between API server, kproxy and kernel on each node; fails with status 1 where something does",
			Flags: clusterFlags(outputFlag("text", "json", "yaml")), Action: clusterDrift,
		},
		{
			Name: "bugreport", Usage: "put what helps to find out what is wrong on all nodes, or those of --node, into one archive",
			Flags:  clusterFlags(maskFlag(), &cli.StringFlag{Name: "output", Aliases: []string{"o"}, Usage: "`FILE` to write", DefaultText: "kproxy-bugreport-TIME.tar.gz"}),
			Action: clusterReport,
		},
		{
			Name: "ui", Usage: "serve a dashboard of all nodes on this host's loopback interface, until it is ended",
			Flags: clusterFlags(&cli.StringFlag{Name: "address", Value: "127.0.0.1:8249", Usage: "`ADDRESS:PORT` to serve on, a loopback one; port 0 for any that is free"}), Action: clusterUI,
		},
	}
	return appOf(pluginName, "kproxy on all nodes of a cluster, with your rights there", map[string][]*cli.Command{
		"Cluster": commands,
		"Program": {helpCommand(), versionCommand()},
	})
}

// pluginTarget is how the help spells a target of the plugin.
const pluginTarget = "svc/NAME[:PORT] | " + targetUsage

// clusterFlags are a command's flags and those that say which cluster, as kubectl has them.
func clusterFlags(flags ...cli.Flag) []cli.Flag {
	return append(flags,
		&cli.StringFlag{Name: "kubeconfig", Usage: "kubectl's configuration, a `FILE`"},
		&cli.StringFlag{Name: "context", Usage: "the `NAME` of the kubeconfig's context"},
		&cli.StringFlag{Name: "namespace", Aliases: []string{"n"}, Usage: "`NAMESPACE` of svc/NAME and pod/NAME; that of the context if not given"},
		&cli.StringFlag{Name: "kproxy-namespace", Value: "kube-system", Usage: "`NAMESPACE` of kproxy's pods"},
		&cli.StringSliceFlag{Name: "node", Usage: "ask this node only, a `NAME`; repeatable"},
		&cli.DurationFlag{Name: "timeout", Value: 10 * time.Second, Usage: "how long each node is waited for"},
	)
}

// openCluster reads the flags of a command that takes so many arguments at most, finds the nodes that they are about, and
// reads the service that the argument at names, from 0; nil where there is no such argument.
func openCluster(c *cli.Context, most, at int) (k *cluster.Cluster, nodes []cluster.Node, which *target, err error) {
	if c.NArg() > most {
		return nil, nil, nil, usageError("%s takes %d arguments at most, got %q", c.Command.Name, most, c.Args().Slice())
	}
	if k, err = theCluster(c); err != nil {
		return nil, nil, nil, err
	}
	if at < c.NArg() {
		if which, err = clusterTarget(c.Args().Get(at), k.Namespace); err != nil {
			return nil, nil, nil, err
		}
	}
	nodes, err = k.Nodes(c.Context, c.StringSlice("node"))
	if errors.Is(err, cluster.ErrNoNode) {
		err = &exitError{exitUsage, err}
	}
	return k, nodes, which, err
}

// theCluster is the one that a command's flags are about.
func theCluster(c *cli.Context) (*cluster.Cluster, error) {
	if c.Duration("timeout") <= 0 {
		return nil, usageError("--timeout: %s is not more than 0", c.Duration("timeout"))
	}
	k, err := cluster.Open(cluster.Config{
		Kubeconfig: c.String("kubeconfig"), Context: c.String("context"), Namespace: c.String("namespace"),
		PodNamespace: c.String("kproxy-namespace"), Timeout: c.Duration("timeout"),
	})
	if err != nil {
		return nil, &exitError{exitUsage, err}
	}
	return k, nil
}

// clusterTarget reads a target, kubectl's way of naming a Service included.
func clusterTarget(text, namespace string) (*target, error) {
	for _, prefix := range []string{"svc/", "service/", "services/"} {
		if name, ok := strings.CutPrefix(text, prefix); ok {
			text = namespace + "/" + name
			break
		}
	}
	t, err := parseTarget(text)
	return &t, err
}

// troubled prints why nodes didn't answer, and is the error that says how many.
func troubled[T any](w io.Writer, answers []cluster.Answer[T]) error {
	n := 0
	for _, a := range answers {
		if a.Trouble != nil {
			n++
			fmt.Fprintf(w, "kproxy: node %s: %s\n", a.Node.Name, a.Trouble)
		}
	}
	if n == 0 {
		return nil
	}
	return fmt.Errorf("%d of %d nodes didn't answer", n, len(answers))
}

// ofNode holds what one node answered, as programs get it.
type ofNode[T any] struct {
	Node  string `json:"node"`
	Error string `json:"error,omitempty"`
	Items T      `json:"items"`
}

func byNode[T any](answers []cluster.Answer[T]) []ofNode[T] {
	out := []ofNode[T]{}
	for _, a := range answers {
		n := ofNode[T]{Node: a.Node.Name, Items: a.Value}
		if a.Trouble != nil {
			n.Error = a.Trouble.Error()
		}
		out = append(out, n)
	}
	return out
}

// isKnown is an error if t names a service that none of the nodes has, which then have nothing of it.
func isKnown(c *cli.Context, k *cluster.Cluster, nodes []cluster.Node, t *target) error {
	if t == nil {
		return nil
	}
	_, err := matching(c, k, nodes, t)
	return err
}

// matching asks nodes for their status, leaves in it what t names, and fails if they have nothing of it.
func matching(c *cli.Context, k *cluster.Cluster, nodes []cluster.Node, t *target) ([]cluster.Answer[plan.Status], error) {
	answers := statuses(c, k, nodes)
	return answers, keepMatching(c.App.ErrWriter, answers, t)
}

func statuses(c *cli.Context, k *cluster.Cluster, nodes []cluster.Node) []cluster.Answer[plan.Status] {
	return cluster.Ask(c.Context, k, nodes, func(ctx context.Context, n cluster.Node) (plan.Status, error) { return k.Client(n).Status(ctx) })
}

// keepMatching leaves in answers what t names. If none has anything of it, that is an error, and nodes that didn't answer, which
// may have it, are printed.
func keepMatching(w io.Writer, answers []cluster.Answer[plan.Status], t *target) error {
	var all []plan.ServiceStatus
	answered, found := false, false
	for i := range answers {
		st := &answers[i].Value
		answered = answered || answers[i].Trouble == nil
		all = append(all, st.Services...)
		services, err := t.selectFrom(st.Services)
		st.Services, found = services, found || err == nil
	}
	if answered && !found {
		_, err := t.selectFrom(all) // which knows all names
		return errors.Join(err, troubled(w, answers))
	}
	return nil
}

func clusterConnections(c *cli.Context) error {
	f := connectionsShown{format: c.String("output"), sort: c.String("sort"), limit: c.Int("limit"), width: terminalWidth(c.App.Writer)}
	if f.limit < 0 {
		return usageError("limit %d is less than 0", f.limit)
	}
	k, nodes, which, err := openCluster(c, 1, 0)
	if err != nil {
		return err
	}
	answers := cluster.Ask(c.Context, k, nodes, func(ctx context.Context, n cluster.Node) ([]plan.ConnectionStatus, error) {
		rows, err := which.connections(ctx, k.Client(n))
		screen.SortConnections(rows, f.sort)
		if isForPrograms(f.format) && c.IsSet("limit") && f.limit > 0 {
			rows = rows[:min(f.limit, len(rows))]
		}
		return rows, err
	})
	if !slices.ContainsFunc(answers, func(a cluster.Answer[[]plan.ConnectionStatus]) bool { return len(a.Value) > 0 }) {
		if err := isKnown(c, k, nodes, which); err != nil {
			return err
		}
	}
	if isForPrograms(f.format) {
		return errors.Join(printValue(c.App.Writer, f.format, byNode(answers)), troubled(c.App.ErrWriter, answers))
	}
	for _, a := range answers {
		if a.Trouble == nil {
			fmt.Fprintf(c.App.Writer, "node %s\n", a.Node.Name)
			if err := f.print(c.App.Writer, a.Value); err != nil {
				return err
			}
			fmt.Fprintln(c.App.Writer)
		}
	}
	return troubled(c.App.ErrWriter, answers)
}

// nodeEvent is an event and where it happened.
type nodeEvent struct {
	Node string `json:"node"`
	plan.Event
}

func clusterEvents(c *cli.Context) error {
	limit := c.Int("limit")
	if limit < 1 || limit > eventsAtMost {
		return usageError("--limit: %d is not from 1 to %d", limit, eventsAtMost)
	}
	k, nodes, which, err := openCluster(c, 1, 0)
	if err != nil {
		return err
	}
	answers := cluster.Ask(c.Context, k, nodes, func(ctx context.Context, n cluster.Node) ([]plan.Event, error) {
		client := k.Client(n)
		of, err := which.eventsOf(ctx, client)
		if err != nil {
			return nil, err
		}
		return pastEvents(ctx, client, of, limit)
	})
	all := []nodeEvent{}
	for _, a := range answers {
		for _, e := range a.Value {
			all = append(all, nodeEvent{a.Node.Name, e})
		}
	}
	if len(all) == 0 {
		if err := isKnown(c, k, nodes, which); err != nil {
			return err
		}
	}
	slices.SortStableFunc(all, func(a, b nodeEvent) int { return a.Time.Compare(b.Time) })
	all = all[max(0, len(all)-limit):]
	print := printer(c, func(w io.Writer, all []nodeEvent) error {
		t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
		fmt.Fprintln(t, "TIME\tNODE\tKIND\tSERVICE\tMESSAGE")
		for _, e := range all {
			fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\n", e.Time.Local().Format(time.DateTime), e.Node, e.Kind, cmp.Or(e.Service, "-"), e.Message)
		}
		return t.Flush()
	})
	return errors.Join(print(c.App.Writer, all), troubled(c.App.ErrWriter, answers))
}

func clusterTrace(c *cli.Context) error {
	if c.NArg() != 2 {
		return usageError("trace takes a client, pod/NAME or node/NAME, and a service, got %q", c.Args().Slice())
	}
	anyTarget, err := clusterTarget(c.Args().Get(1), "default") // the namespace is known later
	if err != nil {
		return err
	}
	protocol, err := traceProtocol(c, anyTarget)
	if err != nil {
		return err
	}
	kind, name, ok := strings.Cut(c.Args().First(), "/")
	if !ok || name == "" || !slices.Contains([]string{"pod", "pods", "po", "node", "nodes", "no"}, kind) {
		return usageError("%q is neither pod/NAME nor node/NAME", c.Args().First())
	}
	isPod := strings.HasPrefix(kind, "po")
	notApart := usageError("%s has the node's network, and no rules of its own: leave --in-pod out", c.Args().First())
	if c.Bool("in-pod") && !isPod {
		return notApart
	}
	k, nodes, which, err := openCluster(c, 2, 1)
	if err != nil {
		return err
	}
	client := cluster.Pod{Node: name}
	if isPod {
		if client, err = k.FindPod(c.Context, k.Namespace, name); err != nil {
			return err
		}
	}
	if c.Bool("in-pod") && len(client.Addresses) == 0 {
		return notApart
	}
	i := slices.IndexFunc(nodes, func(n cluster.Node) bool { return n.Name == client.Node })
	if i < 0 {
		return usageError("%w %s among those that were asked for", cluster.ErrNoNode, client.Node)
	}
	answers := cluster.Ask(c.Context, k, nodes[i:i+1], func(ctx context.Context, n cluster.Node) (trace.Result, error) {
		return traceFrom(ctx, k.Client(n), client, *which, protocol)
	})
	if t := answers[0].Trouble; t != nil {
		return fmt.Errorf("node %s: %w", client.Node, t)
	}
	if c.Bool("in-pod") {
		if err := traceInPod(c.Context, k, nodes[i], client, &answers[0].Value); err != nil {
			return err
		}
	}
	if !isForPrograms(c.String("output")) {
		fmt.Fprintf(c.App.Writer, "on node %s\n", client.Node)
	}
	return printer(c, printTrace)(c.App.Writer, &answers[0].Value)
}

func clusterPin(c *cli.Context) error {
	if c.NArg() != 2 {
		return usageError("pin takes a service and one of %s", strings.Join(preferences, ", "))
	}
	if err := oneOf("data plane", c.Args().Get(1), preferences...); err != nil {
		return err
	}
	k, nodes, which, err := openCluster(c, 2, 0)
	if err != nil {
		return err
	}
	answers := cluster.Ask(c.Context, k, nodes, func(ctx context.Context, n cluster.Node) (string, error) {
		return k.Exec(ctx, n, "pin", which.text, c.Args().Get(1))
	})
	for _, a := range answers {
		for line := range strings.Lines(a.Value) {
			fmt.Fprintf(c.App.Writer, "node %s: %s", a.Node.Name, line)
		}
	}
	return troubled(c.App.ErrWriter, answers)
}

// drift lists what differs on a node: a line begins with "+" for what is missing, with "-" for what is there besides.
type drift struct {
	Kproxy []string `json:"kproxy"` // of what the API server has
	Kernel []string `json:"kernel"` // of what kproxy would program for what the API server has
}

func clusterDrift(c *cli.Context) error {
	k, nodes, _, err := openCluster(c, 0, 0)
	if err != nil || len(nodes) == 0 {
		return err
	}
	api, err := k.Snapshot(c.Context, nodes[0].Name)
	if err != nil {
		return err
	}
	flags := renderCommand().Flags
	kernels := cluster.Ask(c.Context, k, nodes, func(ctx context.Context, n cluster.Node) (string, error) {
		text, err := k.Exec(ctx, n, append([]string{"render", "--diff"}, n.RenderFlags(func(name string) bool { return flagNamed(flags, name) != nil })...)...)
		if exit, ok := errors.AsType[*cluster.ExitError](err); ok && exit.Status == exitFailed && text != "" {
			err = nil // they differ
		}
		return text, err
	})
	answers := drifts(api, statuses(c, k, nodes), kernels)
	differ := 0
	for _, a := range answers {
		if len(a.Value.Kproxy)+len(a.Value.Kernel) > 0 {
			differ++
		}
	}
	print := printer(c, printDrift)
	err = errors.Join(print(c.App.Writer, byNode(answers)), troubled(c.App.ErrWriter, answers))
	if differ > 0 {
		err = errors.Join(err, fmt.Errorf("%d of %d nodes differ", differ, len(answers)))
	}
	return err
}

// drifts joins what nodes answered to the two questions. What is known of a node by one counts where it doesn't answer the other: the
// kernel can be compared where kproxy hangs.
func drifts(api *service.Snapshot, statuses []cluster.Answer[plan.Status], kernels []cluster.Answer[string]) []cluster.Answer[drift] {
	out := make([]cluster.Answer[drift], len(statuses))
	for i := range out {
		out[i].Node, out[i].Trouble = statuses[i].Node, cmp.Or(statuses[i].Trouble, kernels[i].Trouble)
		d := &out[i].Value
		d.Kproxy, d.Kernel = []string{}, []string{}
		if statuses[i].Trouble == nil {
			d.Kproxy = append(d.Kproxy, cluster.Missed(api, &statuses[i].Value)...)
		}
		d.Kernel = slices.AppendSeq(d.Kernel, strings.FieldsFuncSeq(kernels[i].Value, func(r rune) bool { return r == '\n' }))
	}
	return out
}

func printDrift(w io.Writer, nodes []ofNode[drift]) error {
	var b strings.Builder
	for _, n := range nodes {
		d := n.Items
		fmt.Fprintf(&b, "node %s", n.Node)
		switch {
		case n.Error != "":
			fmt.Fprintf(&b, ": not all is known: %s", n.Error)
		case len(d.Kproxy)+len(d.Kernel) == 0:
			b.WriteString(": no difference")
		}
		b.WriteString("\n")
		for _, part := range []struct {
			title string
			lines []string
		}{{"kproxy against the API server:", d.Kproxy}, {"the kernel against what kproxy would program:", d.Kernel}} {
			if len(part.lines) > 0 {
				fmt.Fprintf(&b, "  %s\n    %s\n", part.title, strings.Join(part.lines, "\n    "))
			}
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// traceFrom traces a client's packet to an address, or to the first address of a service port that the client has a
// family with.
func traceFrom(ctx context.Context, kproxy *web.Client, client cluster.Pod, to target, protocol service.Protocol) (trace.Result, error) {
	addresses := []netip.AddrPort{to.address}
	if to.name != "" {
		st, err := kproxy.Status(ctx)
		if err != nil {
			return trace.Result{}, err
		}
		if addresses, err = to.addresses(st.Services, protocol); err != nil {
			return trace.Result{}, err
		}
	}
	for _, a := range addresses {
		if from, ok := addressOf(client, a.Addr()); ok && a.IsValid() {
			return kproxy.Trace(ctx, trace.Request{Address: a, Protocol: protocol, From: from})
		}
	}
	return trace.Result{}, fmt.Errorf("%s has no %s port with an address of the client's family", to.text, protocol)
}

// traceInPod puts before r what becomes of its packet in the client's own network namespace.
func traceInPod(ctx context.Context, k *cluster.Cluster, n cluster.Node, client cluster.Pod, r *trace.Result) error {
	out, err := k.InPod(ctx, n, client, "trace", "--in-pod", "-o", "json", "--proto", r.Protocol.String(), r.Address.String())
	if err != nil {
		return err
	}
	var first trace.Result
	if err := json.Unmarshal([]byte(out), &first); err != nil {
		return fmt.Errorf("read what kproxy printed in pod %s/%s: %w: %.200q", client.Namespace, client.Name, err, out)
	}
	r.After(fmt.Sprintf("pod %s/%s", client.Namespace, client.Name), &first)
	return nil
}

// addressOf is that of a client's family, if it has one; the zero one for a client that is the node itself.
func addressOf(client cluster.Pod, to netip.Addr) (netip.Addr, bool) {
	for _, text := range client.Addresses {
		if a, err := netip.ParseAddr(text); err == nil && service.FamilyOf(a) == service.FamilyOf(to) {
			return a, true
		}
	}
	return netip.Addr{}, len(client.Addresses) == 0
}
