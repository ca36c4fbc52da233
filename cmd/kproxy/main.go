// Command kproxy is a Layer-4 service proxy for Linux nodes. It forwards TCP
// and UDP for Kubernetes Services, or the same manifests from disk, in
// userspace first and through the kernel once a service qualifies.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"

	"github.com/urfave/cli/v2"

	"kproxy.dev/kproxy/bugreport"
)

// Set by the build (-ldflags -X).
var (
	version = "dev"
	commit  = "unknown"
)

func main() {
	ctx, stop := signalContext()
	defer stop()
	switch {
	case len(os.Args) < 2:
	case os.Args[1] == "run":
		hangups() // also while the command line is being read
	case os.Args[1] == "bugreport":
		bugreport.BeNice() // before there are more threads
	}
	app := newApp()
	if strings.HasPrefix(filepath.Base(os.Args[0]), pluginName) {
		app = newPlugin()
	}
	supervisor, err := underSupervisor()
	if err == nil {
		app.Metadata = map[string]any{supervisorMetadata: supervisor}
		err = run(ctx, app, os.Args)
	}
	if err != nil {
		fmt.Fprintln(app.ErrWriter, "kproxy:", err)
	}
	supervisor.end()
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
		left := ""
		if len(os.Args) > 1 && os.Args[1] == "lab" {
			left = "; kproxy lab down removes what is left"
		}
		fmt.Fprintln(os.Stderr, "kproxy: a second signal ended it at once"+left)
		os.Exit(exitFailed)
	}()
	return ctx, cancel
}

// groupedCommands are the commands under the headings that the help sorts them by.
func groupedCommands() map[string][]*cli.Command {
	return map[string][]*cli.Command{
		"Run":                   {runCommand(), pinCommand(), drainCommand(), cleanupCommand()},
		"Inspect":               {statusCommand(), readyCommand(), describeCommand(), connectionsCommand(), eventsCommand(), traceCommand(), bugreportCommand()},
		"Validate and preview":  {checkCommand(), renderCommand()},
		"Try it on one machine": {labCommand()},
		"Program":               {completeCommand(), completionCommand(), helpCommand(), manCommand(), versionCommand()},
	}
}

func newApp() *cli.App {
	return appOf("kproxy", "a Layer-4 service proxy: userspace, iptables, IPVS and nftables in one program", groupedCommands())
}

// appOf is a program of that name with commands under headings.
func appOf(name, usage string, groups map[string][]*cli.Command) *cli.App {
	app := &cli.App{
		Writer: &plainWriter{to: os.Stdout, own: name != pluginName}, ErrWriter: &plainWriter{to: os.Stderr},
		Name:            name,
		Usage:           usage,
		HideHelpCommand: true, // helpCommand knows commands of commands
		HideVersion:     true, // the library's flag is also -v
		Flags:           []cli.Flag{&cli.BoolFlag{Name: "version", Usage: "print what kproxy version does", DisableDefaultText: true}, cli.HelpFlag},
		// Errors are printed and turned into an exit status in main only.
		ExitErrHandler: func(*cli.Context, error) {},
		OnUsageError:   wrongFlag,
		Action: func(c *cli.Context) error {
			switch {
			case c.Args().Present():
				return noCommand(c.App.Name, c.App.Commands, c.Args().First())
			case c.Bool("version"):
				return printVersion(c)
			}
			return cli.ShowAppHelp(c)
		},
	}
	for group, commands := range groups {
		for _, c := range commands {
			c.Category = group
		}
		app.Commands = append(app.Commands, commands...)
	}
	slices.SortFunc(app.Commands, func(a, b *cli.Command) int { return strings.Compare(a.Name, b.Name) })
	everyCommand(app.Commands, func(c *cli.Command) {
		c.OnUsageError, c.HideHelpCommand = wrongFlag, true
		if c.ArgsUsage == "" && len(c.Subcommands) == 0 && !c.Hidden {
			c.Before = noArguments
		}
	})
	return app
}

// noArguments is the error of a command that takes none and got some.
func noArguments(c *cli.Context) error {
	if c.Args().Present() {
		return usageError("%s takes no arguments, got %q", c.Command.HelpName, c.Args().Slice())
	}
	return nil
}

// wrongFlag turns the library's error about a flag into a usage error that explains it.
func wrongFlag(c *cli.Context, err error, _ bool) error {
	return usageError("%w (see %s --help)", explainFlag(c.Command, err), c.Command.HelpName)
}

// everyCommand calls f for commands and the commands of commands.
func everyCommand(commands []*cli.Command, f func(*cli.Command)) {
	for _, c := range commands {
		f(c)
		everyCommand(c.Subcommands, f)
	}
}

func helpCommand() *cli.Command {
	return &cli.Command{
		Name: "help", Usage: "explain kproxy, or one command", ArgsUsage: "[COMMAND…]",
		Action: func(c *cli.Context) error {
			return run(c.Context, c.App, slices.Concat([]string{c.App.Name}, c.Args().Slice(), []string{"--help"}))
		},
	}
}

func manCommand() *cli.Command {
	return &cli.Command{
		Name: "man", Usage: "print kproxy's man page, kproxy(8), for kproxy man >kproxy.8",
		Action: func(c *cli.Context) error {
			page, err := c.App.ToMan()
			if err != nil {
				return err
			}
			_, err = fmt.Fprint(c.App.Writer, page)
			return err
		},
	}
}

func versionCommand() *cli.Command {
	return &cli.Command{
		Name:   "version",
		Usage:  "print version, commit and Go version",
		Action: printVersion,
	}
}

func printVersion(c *cli.Context) error {
	_, err := fmt.Fprintf(c.App.Writer, "kproxy %s, commit %s, %s\n", version, commit, runtime.Version())
	return err
}
