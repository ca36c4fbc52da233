// Command kproxy is a Layer-4 service proxy for Linux nodes. It forwards TCP
// and UDP for Kubernetes Services, or the same manifests from disk, in
// userspace first and through the kernel once a service qualifies.
package main

import (
	"context"
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
			runCommand(), statusCommand(), connectionsCommand(), pinCommand(), traceCommand(), checkCommand(),
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
