package main

import (
	"context"
	"errors"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/urfave/cli/v2"

	"kproxy.dev/kproxy/source/strict"
)

// run runs the command line args, whose first is the program's name.
func run(ctx context.Context, app *cli.App, args []string) error {
	args, err := flagsFirst(app, args)
	if err != nil {
		return err
	}
	return app.RunContext(ctx, args)
}

// flagsFirst moves the flags of a command before its arguments. The library stops
// at the first argument, as package flag does; people add flags where they are.
func flagsFirst(app *cli.App, args []string) ([]string, error) {
	words, rest := commandOf(app, args)
	if words.command == nil {
		return args, nil
	}
	var flags, arguments []string
	for i := 0; i < len(rest); i++ {
		switch word := rest[i]; {
		case word == "--":
			arguments = append(arguments, rest[i+1:]...)
			flags = append(flags, "--")
			i = len(rest)
		case !isFlag(word):
			arguments = append(arguments, word)
		case !wantsValue(words.command.Flags, word):
			flags = append(flags, word)
		case i+1 == len(rest):
			return nil, usageError("%s needs a value (see %s --help)", word, strings.Join(words.path, " "))
		default:
			flags = append(flags, word, rest[i+1])
			i++
		}
	}
	return slices.Concat(args[:len(args)-len(rest)], flags, arguments), nil
}

// commandWords holds those words of a command line that name the command.
type commandWords struct {
	path     []string       // "kproxy", "lab", "up"
	commands []*cli.Command // that may come next
	command  *cli.Command   // nil as long as one has to come next
}

// commandOf finds the command that args, whose first is the program's name, are
// for. rest is what comes after its name.
func commandOf(app *cli.App, args []string) (words commandWords, rest []string) {
	words = commandWords{path: []string{app.Name}, commands: app.Commands}
	for rest = args[1:]; len(rest) > 0 && len(words.commands) > 0; rest = rest[1:] {
		if isFlag(rest[0]) {
			continue // of kproxy itself; they take no values
		}
		i := slices.IndexFunc(words.commands, func(c *cli.Command) bool { return c.HasName(rest[0]) })
		if i < 0 {
			return words, rest
		}
		c := words.commands[i]
		words.path, words.commands = append(words.path, c.Name), c.Subcommands
		if len(c.Subcommands) == 0 {
			words.command = c
		}
	}
	return words, rest
}

// isFlag tells flags from arguments; a dash alone is one of these.
func isFlag(word string) bool { return len(word) > 1 && word[0] == '-' }

// wantsValue reports whether word is a flag whose value is the next word.
func wantsValue(flags []cli.Flag, word string) bool {
	f, ok := flagNamed(flags, strings.TrimLeft(word, "-")).(cli.DocGenerationFlag)
	return ok && f.TakesValue()
}

// flagNamed returns the flag of that name, nil if there is none.
func flagNamed(flags []cli.Flag, name string) cli.Flag {
	if i := slices.IndexFunc(flags, func(f cli.Flag) bool { return slices.Contains(f.Names(), name) }); i >= 0 {
		return flags[i]
	}
	return nil
}

// dashed returns a flag's name as it is written on the command line.
func dashed(name string) string {
	if len(name) == 1 {
		return "-" + name
	}
	return "--" + name
}

// What package flag says of flags, as text only.
var (
	flagUnknown  = regexp.MustCompile(`^flag provided but not defined: -(.*)$`)
	flagBadValue = regexp.MustCompile(`^invalid (?:boolean )?value ("(?:[^"\\]|\\.)*") for (?:flag )?-([^:]*): `)
)

// explainFlag says what is wrong with a flag of c, and what would be right.
func explainFlag(c *cli.Command, err error) error {
	if m := flagUnknown.FindStringSubmatch(err.Error()); m != nil {
		var names []string
		for _, f := range c.Flags {
			names = append(names, f.Names()...)
		}
		near := strict.Nearest(m[1], names...)
		switch {
		case near != "":
			return errors.New("there is no flag " + dashed(m[1]) + ", did you mean " + dashed(near) + "?")
		case len(c.Subcommands) > 0:
			return errors.New("there is no flag " + dashed(m[1]) + " here; a command's flags come after its name")
		}
		return errors.New("there is no flag " + dashed(m[1]))
	}
	m := flagBadValue.FindStringSubmatch(err.Error())
	if m == nil {
		return err
	}
	value, unquoteErr := strconv.Unquote(m[1])
	if unquoteErr != nil {
		return err
	}
	return errors.New(dashed(m[2]) + ": " + badValue(flagNamed(c.Flags, m[2]), value))
}

// badValue says why f can't have the value.
func badValue(f cli.Flag, value string) string {
	quoted := strconv.Quote(value)
	switch f.(type) {
	case *cli.DurationFlag:
		if _, err := strconv.ParseFloat(value, 64); err == nil {
			return quoted + " has no unit: write " + value + "s for seconds, " + value + "m for minutes"
		}
		return quoted + " is not a duration such as 500ms, 10s or 1m30s"
	case *cli.IntFlag:
		return quoted + " is not a whole number"
	case *cli.Float64Flag:
		return quoted + " is not a number"
	case *cli.BoolFlag:
		return quoted + " is neither true nor false"
	}
	return quoted + " is not a value that it can have"
}

// noCommand says that what has commands has none of that name.
func noCommand(path string, commands []*cli.Command, name string) error {
	var names []string
	for _, c := range commands {
		if !c.Hidden {
			names = append(names, c.Name)
		}
	}
	return usageError("there is no command %q%s (see %s --help)", path+" "+name, strict.DidYouMean(name, names...), path)
}

// choice is a flag with few values, of which shells can offer the right ones.
type choice struct {
	*cli.StringFlag
	values []string
}

// choiceFlag refuses other values, with the nearest of those that there are.
func choiceFlag(f *cli.StringFlag, values ...string) *choice {
	f.Action = func(_ *cli.Context, v string) error {
		return oneOf(dashed(f.Name), v, values...)
	}
	return &choice{f, values}
}

// oneOf checks that v, which messages call what, is one of values.
func oneOf(what, v string, values ...string) error {
	if slices.Contains(values, v) {
		return nil
	}
	return usageError("%s: %q is not one of %s%s", what, v, strings.Join(values, ", "), strict.DidYouMean(v, values...))
}

// DefaultSocket is where a running kproxy listens for the other commands.
const defaultSocket = "/run/kproxy/kproxy.sock"

func socketFlag() cli.Flag {
	return &cli.StringFlag{Name: "socket", Usage: "control socket of the running kproxy, a `PATH`", Value: defaultSocket}
}

func manifestsFlag() cli.Flag {
	return &cli.StringSliceFlag{Name: "manifests", Usage: "file or directory with Kubernetes manifests, a `PATH`; repeatable"}
}

func nodeFlag() cli.Flag {
	return &cli.StringFlag{Name: "node", Usage: "`NAME` of the node to decide for", Value: hostName()}
}
