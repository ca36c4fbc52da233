package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/urfave/cli/v2"
	"golang.org/x/term"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/trace"
	"kproxy.dev/kproxy/web"
)

func traceCommand() *cli.Command {
	return &cli.Command{
		Name:      "trace",
		Usage:     "say where a connection would go, and what stops it: rules, sets and virtual servers as they are in the kernel",
		ArgsUsage: "ADDRESS:PORT | NAMESPACE/NAME[:PORT]",
		Flags: []cli.Flag{
			socketFlag(),
			&cli.StringFlag{Name: "from", Usage: "the client's `IP`; this node itself if not given"},
			&cli.StringFlag{Name: "proto", Usage: "tcp or udp", Value: "tcp"},
			&cli.BoolFlag{Name: "probe", Usage: "send one connection or datagram from this node, and show its conntrack entry"},
			outputFlag("text", "json"),
		},
		Action: runTrace,
	}
}

func runTrace(c *cli.Context) error {
	show, err := tracePrinter(c.String("output"))
	if err != nil {
		return err
	}
	client := web.NewClient(c.String("socket"))
	req, err := traceRequest(c, client)
	if err != nil {
		return err
	}
	var res trace.Result
	if err = client.Answers(c.Context, traceWait); err == nil {
		res, err = client.Trace(c.Context, req)
	}
	if notAnswering(err) {
		fmt.Fprintf(c.App.ErrWriter, "kproxy: %v\nkproxy: reading the kernel alone\n", err)
		res, err = traceAlone(c.Context, req)
	}
	if err != nil {
		return traceError(err)
	}
	return show(c.App.Writer, &res)
}

// traceWait is how long a kproxy that hangs is waited for.
const traceWait = 10 * time.Second

// notAnswering reports whether there is no kproxy to ask, or it dies while it is
// asked, so that the kernel is all there is.
func notAnswering(err error) bool {
	return slices.ContainsFunc([]error{web.ErrNotRunning, web.ErrNoAnswer, os.ErrDeadlineExceeded, context.DeadlineExceeded, syscall.ECONNRESET, io.EOF, io.ErrUnexpectedEOF},
		func(target error) bool { return errors.Is(err, target) })
}

func traceAlone(ctx context.Context, req trace.Request) (trace.Result, error) {
	ctx, cancel := context.WithTimeout(ctx, trace.Timeout)
	defer cancel()
	return trace.Run(ctx, req, nil)
}

// traceError gives errors about the question their exit status.
func traceError(err error) error {
	switch {
	case errors.Is(err, trace.ErrProbe), strings.HasPrefix(err.Error(), trace.ErrProbe.Error()): // the latter by way of the socket
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
	if req.Protocol, err = service.ParseProtocol(c.String("proto")); err != nil || req.Protocol == service.SCTP {
		return req, usageError("--proto %q is neither tcp nor udp", c.String("proto"))
	}
	if from := c.String("from"); from != "" {
		if req.From, err = netip.ParseAddr(from); err != nil {
			return req, usageError("--from %q isn't an IP address", from)
		}
	}
	req.Probe = c.Bool("probe")
	if arg := c.Args().First(); strings.Contains(arg, "/") {
		req.Address, err = serviceAddress(c.Context, client, arg, req)
	} else if req.Address, err = netip.ParseAddrPort(arg); err != nil {
		err = usageError("%q is neither ADDRESS:PORT, such as 10.96.0.10:80 or [fd00::10]:80, nor NAMESPACE/NAME[:PORT]", arg)
	}
	if err != nil {
		return req, err
	}
	if err := req.Check(); err != nil {
		return req, usageError("%w", err)
	}
	return req, nil
}

// serviceAddress is the first address of a service port that is named, of the
// client's family.
func serviceAddress(ctx context.Context, client *web.Client, name string, req trace.Request) (netip.AddrPort, error) {
	ns, svc, port, err := parseServiceName(name)
	if err != nil {
		return netip.AddrPort{}, err
	}
	st, err := client.Status(ctx)
	if err != nil {
		return netip.AddrPort{}, fmt.Errorf("look up %s: %w (an ADDRESS:PORT can be traced without)", name, err)
	}
	for i := range st.Services {
		s := &st.Services[i]
		if s.Namespace != ns || s.Name != svc || !strings.EqualFold(s.Protocol, req.Protocol.String()) || port != "" && port != s.Port && !hasNumber(s, port) {
			continue
		}
		for _, a := range s.Addresses {
			if !req.From.IsValid() || service.FamilyOf(req.From) == service.FamilyOf(a.Addr()) {
				return a, nil
			}
		}
	}
	return netip.AddrPort{}, usageError("there is no service %s with a %s port that has an address; kproxy status lists what there is", name, req.Protocol)
}

func hasNumber(s *plan.ServiceStatus, port string) bool {
	for _, a := range s.Addresses {
		if strconv.Itoa(int(a.Port())) == port {
			return true
		}
	}
	return false
}

// tracePrinter is how the answer is printed.
func tracePrinter(output string) (func(io.Writer, *trace.Result) error, error) {
	switch output {
	case "json":
		return func(w io.Writer, r *trace.Result) error { return printJSON(w, r) }, nil
	case "text":
		return func(w io.Writer, r *trace.Result) error {
			_, err := io.WriteString(w, r.Text(traceLook(w)))
			return err
		}, nil
	}
	return nil, usageError("output %q is not one of text, json", output)
}

// traceLook is for the terminal that w is, if it is one: 80 columns and no
// colour otherwise.
func traceLook(w io.Writer) trace.Look {
	f, ok := w.(*os.File)
	if !ok || !term.IsTerminal(int(f.Fd())) {
		return trace.Look{}
	}
	width, _, err := term.GetSize(int(f.Fd()))
	if err != nil {
		width = 0
	}
	return trace.Look{Width: width, Colour: os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb"}
}
