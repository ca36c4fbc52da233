package main

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/urfave/cli/v2"

	"kproxy.dev/kproxy/web"
)

// completions are the scripts of shells. Each asks kproxy itself, by completeCommand,
// for the words that may stand where the cursor is: the library's scripts know flags only
// right behind a command, and neither a flag's values nor services.
var completions = map[string]string{
	"bash": `_kproxy() {
	local IFS=$'\n'
	COMPREPLY=($(compgen -W "$(kproxy complete -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)" -- "${COMP_WORDS[COMP_CWORD]}"))
}
complete -o default -F _kproxy kproxy
`,
	"zsh": `#compdef kproxy
_kproxy() {
	local -a found
	found=(${(f)"$(kproxy complete -- "${(@)words[2,CURRENT-1]}" "$PREFIX" 2>/dev/null)"})
	if (( $#found )); then compadd -a found; else _files; fi
}
compdef _kproxy kproxy
`,
	"fish": `function __kproxy_complete
	set -l words (commandline -opc) (commandline -ct)
	kproxy complete -- $words[2..-1] 2>/dev/null
end
complete -c kproxy -a '(__kproxy_complete)'
`,
}

func completionCommand() *cli.Command {
	return &cli.Command{
		Name: "completion", Usage: "print a script that completes commands, flags and the running kproxy's services", ArgsUsage: "bash|zsh|fish",
		Description: "Put into ~/.bashrc, or ~/.zshrc after compinit: source <(kproxy completion bash)\n" +
			"For fish: kproxy completion fish >~/.config/fish/completions/kproxy.fish",
		Action: func(c *cli.Context) error {
			if c.NArg() != 1 {
				return usageError("name one shell: bash, zsh or fish")
			}
			if err := oneOf("shell", c.Args().First(), "bash", "zsh", "fish"); err != nil {
				return err
			}
			_, err := fmt.Fprint(c.App.Writer, completions[c.Args().First()])
			return err
		},
	}
}

// completeCommand is for the scripts.
func completeCommand() *cli.Command {
	return &cli.Command{
		Name: "complete", Usage: "print what may stand for the last of some words of a command line", Hidden: true,
		Action: func(c *cli.Context) error {
			for _, word := range complete(c.Context, c.App, c.Args().Slice()) {
				if _, err := fmt.Fprintln(c.App.Writer, word); err != nil {
					return err
				}
			}
			return nil
		},
	}
}

// complete returns what may stand for the last of words, those behind the program's name.
// What shells themselves complete, files, isn't among it.
func complete(ctx context.Context, app *cli.App, words []string) []string {
	if len(words) == 0 {
		return nil
	}
	current, before := words[len(words)-1], words[:len(words)-1]
	before = slices.DeleteFunc(slices.Clone(before), func(w string) bool { return w == "=" }) // bash takes it for a word
	at, rest := commandOf(app, slices.Concat([]string{app.Name}, before))
	var out []string
	switch c := at.command; {
	case c == nil && strings.HasPrefix(current, "-"):
		out = flagNames(app.VisibleFlags())
	case c == nil:
		for _, sub := range at.commands {
			if !sub.Hidden {
				out = append(out, sub.Name)
			}
		}
	case len(rest) > 0 && isFlag(rest[len(rest)-1]) && wantsValue(c.Flags, rest[len(rest)-1]):
		if f, ok := flagNamed(c.Flags, strings.TrimLeft(rest[len(rest)-1], "-")).(*choice); ok {
			out = f.values
		}
	case strings.HasPrefix(current, "-"):
		out = flagNames(c.VisibleFlags())
	case c.Name == "help":
		return complete(ctx, app, append(rest, current))
	case c.Name == "completion":
		out = []string{"bash", "zsh", "fish"}
	case strings.Contains(c.ArgsUsage, "NAMESPACE/NAME"):
		out = serviceNames(ctx, rest)
		if c.Name == "pin" {
			out = append(out, "userspace", "kernel", "auto")
		}
	}
	return slices.DeleteFunc(slices.Clone(out), func(w string) bool { return !strings.HasPrefix(w, current) })
}

func flagNames(flags []cli.Flag) []string {
	var out []string
	for _, f := range flags {
		for _, name := range f.Names() {
			out = append(out, dashed(name))
		}
	}
	return out
}

// serviceNames returns the names of the services of the kproxy that a command line is about; none if
// it doesn't answer within a second.
func serviceNames(ctx context.Context, words []string) []string {
	socket := socketOf(defaultSocket, labSocket)
	for i, w := range words {
		if value, ok := strings.CutPrefix(w, "--socket="); ok {
			socket = value
		} else if w == "--socket" && i+1 < len(words) {
			socket = words[i+1]
		}
	}
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	st, err := web.NewClient(socket).Status(ctx)
	if err != nil {
		return nil
	}
	var out []string
	for _, s := range st.Services {
		out = append(out, s.Namespace+"/"+s.Name)
	}
	slices.Sort(out)
	return slices.Compact(out)
}
