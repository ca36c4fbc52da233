// Command kproxy is a Layer-4 service proxy for Linux nodes. It forwards TCP
// and UDP for Kubernetes Services, or the same manifests from disk, in
// userspace first and through the kernel once a service qualifies.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/urfave/cli/v2"
)

// Set by the build (-ldflags -X).
var (
	version = "dev"
	commit  = "unknown"
)

// Exit statuses of every command.
const (
	exitFailed = 1 // failed while running
	exitUsage  = 2 // wrong usage, configuration or manifests
	exitHost   = 3 // this host lacks something
)

// exitError carries the exit status of a command's error.
type exitError struct {
	status int
	err    error
}

func (e *exitError) Error() string { return e.err.Error() }
func (e *exitError) Unwrap() error { return e.err }

// usageError marks what the user can mend on the command line or in a file.
func usageError(format string, args ...any) error {
	return &exitError{exitUsage, fmt.Errorf(format, args...)}
}

func main() {
	ctx, stop := signalContext()
	defer stop()
	err := newApp().RunContext(ctx, os.Args)
	if err == nil {
		return
	}
	fmt.Fprintln(os.Stderr, "kproxy:", err)
	os.Exit(statusOf(err))
}

// statusOf returns the exit status for err.
func statusOf(err error) int {
	var e *exitError
	if errors.As(err, &e) {
		return e.status
	}
	return exitFailed
}

// signalContext ends with the first SIGTERM or SIGINT, so that a command can
// finish in good order; a second one ends the process at once.
func signalContext() (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(context.Background())
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT)
	go func() {
		<-signals
		cancel()
		<-signals
		os.Exit(exitFailed)
	}()
	return ctx, cancel
}

func newApp() *cli.App {
	usage := func(c *cli.Context, err error, _ bool) error {
		return usageError("%w (see kproxy %s --help)", err, c.Command.Name)
	}
	app := &cli.App{
		Name:            "kproxy",
		Usage:           "a Layer-4 service proxy: userspace, iptables and IPVS in one program",
		HideHelpCommand: true,
		HideVersion:     true,
		OnUsageError:    usage,
		// Errors are printed and turned into an exit status in main only.
		ExitErrHandler: func(*cli.Context, error) {},
		Action: func(c *cli.Context) error {
			if c.Args().Present() {
				return usageError("there is no command %q (see kproxy --help)", c.Args().First())
			}
			return cli.ShowAppHelp(c)
		},
		Commands: []*cli.Command{
			runCommand(), statusCommand(), connectionsCommand(), pinCommand(), checkCommand(),
			renderCommand(), cleanupCommand(), labCommand(), versionCommand(),
		},
	}
	for _, c := range app.Commands {
		setUsageError(c, usage)
	}
	return app
}

// setUsageError gives a command and its subcommands the same treatment of wrong flags.
func setUsageError(c *cli.Command, f cli.OnUsageErrorFunc) {
	c.OnUsageError = f
	for _, sub := range c.Subcommands {
		setUsageError(sub, f)
	}
}
