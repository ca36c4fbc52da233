package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/urfave/cli/v2"

	"kproxy.dev/kproxy/agent/node"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/trace"
	"kproxy.dev/kproxy/web"
)

func traceCommand() *cli.Command {
	return &cli.Command{
		Name:      "trace",
		Usage:     "say where a connection would go, and what stops it: rules, sets and virtual servers as they are in the kernel",
		ArgsUsage: "ADDRESS:PORT[/PROTOCOL] | NAMESPACE/NAME[:PORT]",
		Flags: []cli.Flag{
			socketFlag(),
			&cli.StringFlag{Name: "from", Usage: "the client's `IP`; this node itself if not given"},
			&cli.StringFlag{Name: "proto", Usage: "tcp or udp", Value: "tcp"},
			&cli.StringFlag{Name: "from-pod", Usage: "the client is the pod of this node with this `NAME`"},
			&cli.StringFlag{Name: "netns", Usage: "the client is in this network namespace, a `PATH` (/proc/PID/ns/net) or a name of ip netns"},
			&cli.BoolFlag{Name: "in-pod", Usage: "follow what this network namespace, a pod's, sends, until it leaves; kubectl kproxy trace --in-pod runs it there"},
			&cli.BoolFlag{Name: "watch", Usage: "mark the next packets that really come there, and show what each met beside what was predicted; as root in kproxy's network namespace"},
			&cli.IntFlag{Name: "count", Usage: "with --watch: end after so `MANY` connections", Value: 5},
			&cli.DurationFlag{Name: "timeout", Usage: "with --watch: end after this `TIME` at last", Value: 30 * time.Second},
			&cli.BoolFlag{Name: "probe", Usage: "send one connection or datagram from where the client is, and show its conntrack entry"},
			outputFlag("text", "json", "yaml"),
		},
		Action: runTrace,
	}
}

func runTrace(c *cli.Context) error {
	client := clientOf(c)
	if !c.Bool("watch") && (c.IsSet("count") || c.IsSet("timeout")) {
		return usageError("--count and --timeout say when --watch ends")
	}
	req, err := traceRequest(c, client)
	if err != nil {
		return err
	}
	if c.Bool("in-pod") {
		return runInPod(c, req)
	}
	if c.Bool("watch") {
		return runWatch(c, client, req)
	}
	res, err := traceWith(c, client, req)
	if err != nil {
		return err
	}
	return printer(c, printTrace)(c.App.Writer, &res)
}

// runInPod asks no kproxy.
func runInPod(c *cli.Context, req trace.Request) error {
	for _, other := range []string{"socket", "from", "from-pod", "netns", "probe", "watch"} {
		if c.IsSet(other) {
			return usageError("--in-pod follows what this network namespace sends, by its kernel alone; leave --%s out", other)
		}
	}
	ctx, cancel := context.WithTimeout(c.Context, trace.Timeout)
	defer cancel()
	res, err := trace.Depart(ctx, req)
	if err != nil {
		return traceError(err)
	}
	return printer(c, printTrace)(c.App.Writer, &res)
}

// traceWith asks the running kproxy, or reads the kernel alone where there is none.
func traceWith(c *cli.Context, client *web.Client, req trace.Request) (res trace.Result, err error) {
	if err = client.Answers(c.Context, traceWait); err == nil {
		res, err = client.Trace(c.Context, req)
	}
	if notAnswering(err) && (c.IsSet("socket") || req.Probe) {
		return res, fmt.Errorf("trace: %w; nothing was traced: without --socket and --probe, kproxy trace reads the kernel alone, of the network namespace it is run in (nsenter --net=PATH enters another)", err)
	}
	if notAnswering(err) {
		fmt.Fprintf(c.App.ErrWriter, "kproxy: %v\nkproxy: reading the kernel alone\n", err)
		proxy := &trace.Proxy{Explainers: node.Explainers()}
		if !errors.Is(err, web.ErrNotRunning) {
			proxy.Silent = err.Error()
		}
		ctx, cancel := context.WithTimeout(c.Context, trace.Timeout)
		defer cancel()
		res, err = trace.Run(ctx, req, proxy)
	}
	if err != nil {
		return res, traceError(err)
	}
	return res, nil
}

// runWatch prints packets as they come, for programs all at the end.
func runWatch(c *cli.Context, client *web.Client, req trace.Request) error {
	switch {
	case req.Probe:
		return usageError("--watch waits for real packets; --probe sends one: run it meanwhile")
	case c.Int("count") < 1:
		return usageError("--count %d isn't at least 1", c.Int("count"))
	case c.Duration("timeout") <= 0:
		return usageError("--timeout %s isn't longer than nothing", c.Duration("timeout"))
	}
	forPeople := !isForPrograms(c.String("output"))
	var seen []trace.Packet
	look := traceLook(c.App.Writer)
	res, err := trace.Watch(c.Context, trace.WatchRequest{
		Request: req, Count: c.Int("count"), Timeout: c.Duration("timeout"),
		Started: func() {
			fmt.Fprintf(c.App.ErrWriter, "kproxy: watching %s %s for %s, or until %d connections have come\n", req.Protocol, req.Address, c.Duration("timeout"), c.Int("count"))
		},
		Predict: func(_ context.Context, req trace.Request) (trace.Result, error) { return traceWith(c, client, req) },
	}, func(p *trace.Packet) {
		if forPeople {
			fmt.Fprintln(c.App.Writer, p.Text(look, p.Same(seen)))
			seen = append(seen, *p)
		}
	})
	if _, ok := errors.AsType[*exitError](err); ok { // by traceWith
		return err
	} else if err != nil {
		return traceError(err)
	}
	return printer(c, func(w io.Writer, r *trace.Watched) error {
		_, err := io.WriteString(w, r.Summary(look))
		return err
	})(c.App.Writer, &res)
}

// traceWait is how long a kproxy that hangs is waited for.
const traceWait = 10 * time.Second

// notAnswering reports whether there is no kproxy to ask, or it dies while it is
// asked, so that the kernel is all there is.
func notAnswering(err error) bool {
	return isAny(err, web.ErrNotRunning, web.ErrNoAnswer, os.ErrDeadlineExceeded, context.DeadlineExceeded, syscall.ECONNRESET, io.EOF, io.ErrUnexpectedEOF)
}

// traceError gives errors about the question their exit status.
func traceError(err error) error {
	switch {
	case errors.Is(err, trace.ErrElsewhere), errors.Is(err, trace.ErrClient), strings.HasPrefix(err.Error(), trace.ErrClient.Error()): // the latter by way of the socket
		return &exitError{exitUsage, err}
	case errors.Is(err, kernel.ErrPermission):
		return &exitError{exitHost, fmt.Errorf("%w; run kproxy trace as root", err)}
	}
	return hostError(err)
}

// traceRequest reads the command line.
func traceRequest(c *cli.Context, client *web.Client) (req trace.Request, err error) {
	if c.NArg() != 1 {
		return req, usageError("trace takes one ADDRESS:PORT or NAMESPACE/NAME[:PORT], got %q", c.Args().Slice())
	}
	which, err := parseTarget(c.Args().First())
	if err != nil {
		return req, err
	}
	if req.Protocol, err = traceProtocol(c, &which); err != nil {
		return req, err
	}
	if from := c.String("from"); from != "" {
		if ap, portErr := netip.ParseAddrPort(from); portErr == nil { // as kproxy connections prints clients
			req.From = ap.Addr()
		} else if req.From, err = netip.ParseAddr(from); err != nil {
			return req, usageError("--from %q isn't an IP address", from)
		}
	}
	req.Probe, req.Pod, req.Netns = c.Bool("probe"), c.String("from-pod"), c.String("netns")
	switch {
	case req.Pod != "" && (req.Netns != "" || req.From.IsValid()):
		return req, usageError("--from-pod says all of the client; leave --netns and --from out")
	case req.Netns != "" && !strings.Contains(req.Netns, "/"):
		req.Netns = filepath.Join("/run/netns", req.Netns)
	case req.Netns != "":
		if req.Netns, err = filepath.Abs(req.Netns); err != nil {
			return req, fmt.Errorf("find network namespace %s: %w", c.String("netns"), err)
		}
	}
	if req.Address = which.address; which.name != "" {
		if req.Address, err = serviceAddress(c.Context, client, which, req); err != nil {
			return req, err
		}
	}
	if err := req.Check(); err != nil {
		return req, usageError("%w", err)
	}
	return req, nil
}

// traceProtocol is that of the packet to follow, by --proto and by the target; an error if they don't say one packet.
func traceProtocol(c *cli.Context, which *target) (service.Protocol, error) {
	p, err := service.ParseProtocol(c.String("proto"))
	switch {
	case err != nil || p == service.SCTP:
		return p, usageError("--proto %q is neither tcp nor udp", c.String("proto"))
	case which.nodePort != 0:
		return p, usageError("%q is a node port on every address of the node: name one, such as 192.0.2.1:%d", which.text, which.nodePort)
	case which.protocol == nil:
		return p, nil
	case c.IsSet("proto") && *which.protocol != p:
		return p, usageError("--proto %s contradicts %q", c.String("proto"), which.text)
	case *which.protocol == service.SCTP:
		return p, usageError("%q is neither tcp nor udp", which.text)
	}
	return *which.protocol, nil
}

// serviceAddress is the first address of a service port that is named, of the
// client's family.
func serviceAddress(ctx context.Context, client *web.Client, which target, req trace.Request) (netip.AddrPort, error) {
	st, err := client.Status(ctx)
	if err != nil {
		return netip.AddrPort{}, fmt.Errorf("look up %s: %w (an ADDRESS:PORT can be traced without)", which.text, err)
	}
	addresses, err := which.addresses(st.Services, req.Protocol)
	if err != nil {
		return netip.AddrPort{}, usageError("%w", err)
	}
	for _, a := range addresses {
		if !req.From.IsValid() || service.FamilyOf(req.From) == service.FamilyOf(a.Addr()) {
			return a, nil
		}
	}
	return netip.AddrPort{}, usageError("%s has no %s port with an address of the client's family", which.text, req.Protocol)
}

// printTrace fits the answer to the terminal that w is, if it is one: 80 columns and no colour
// otherwise.
func printTrace(w io.Writer, r *trace.Result) error {
	_, err := io.WriteString(w, r.Text(traceLook(w)))
	return err
}

func traceLook(w io.Writer) trace.Look {
	width := terminalWidth(w)
	look := trace.Look{Width: width, Colour: width > 0 && os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb"}
	if plain, is := w.(*plainWriter); is {
		look.Colour = look.Colour && plain.own
		plain.colours = look.Colour
	}
	return look
}
