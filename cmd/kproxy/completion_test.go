package main

import (
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/urfave/cli/v2"
)

func TestComplete(t *testing.T) {
	socket := dns().serve(t)
	for line, want := range map[string]string{
		"stat":                              "status",
		"l":                                 "lab",
		"lab d":                             "demo down",
		"help lab u":                        "up",
		"completion ":                       "bash zsh fish",
		"--vers":                            "--version",
		"status --wat":                      "--watch",
		"status default/web --wat":          "--watch",
		"status -o ":                        "table wide json yaml name",
		"status --output = j":               "json",
		"lab up --mode i":                   "iptables ipvs",
		"status --socket ":                  "",
		"status --socket S ":                "default/web kube-system/dns",
		"status --socket=S kube":            "kube-system/dns",
		"trace --socket S --from 10.1.0.2 ": "default/web kube-system/dns",
		"pin --socket S default/web k":      "kube-system/dns kernel",
		"status --socket /nonexistent ":     "",
		"version ":                          "",
	} {
		args := append([]string{"complete", "--"}, strings.Split(strings.Replace(line, "S ", socket+" ", 1), " ")...)
		got := runLine(t, args...)
		if words := strings.Join(strings.Fields(got.stdout), " "); words != want || got.status != 0 {
			t.Errorf("%q: %q, want %q (%+v)", line, words, want, got)
		}
	}
	all := strings.Fields(runLine(t, "complete", "--", "").stdout)
	for _, c := range newApp().Commands {
		if slices.Contains(all, c.Name) == c.Hidden {
			t.Errorf("command %s, hidden %v, is among %q", c.Name, c.Hidden, all)
		}
	}
}

// Bash calls the function with the words of a line; a function stands in for kproxy.
func TestBashCompletion(t *testing.T) {
	script := runLine(t, "completion", "bash").stdout + `
kproxy() { IFS=' '; echo "asked: $*" >&3; printf '%s\n' default/web default/www kube-system/dns; }
COMP_WORDS=(kproxy status -o json default/w) COMP_CWORD=4
_kproxy 3>&1
echo "${COMPREPLY[@]}"
COMP_WORDS=(kproxy "") COMP_CWORD=1
_kproxy 3>&1
echo "${#COMPREPLY[@]}"
`
	// What the substitution's function says goes to the test's output, not into the words.
	out, err := exec.Command("bash", "-c", script).CombinedOutput()
	if want := "asked: complete -- status -o json default/w\ndefault/web default/www\nasked: complete -- \n3\n"; err != nil || string(out) != want {
		t.Errorf("%v: %q, want %q", err, out, want)
	}
}

func TestCompletionScripts(t *testing.T) {
	for _, shell := range []string{"bash", "zsh", "fish"} {
		got := runLine(t, "completion", shell)
		if got.status != 0 || !strings.Contains(got.stdout, "kproxy complete -- ") {
			t.Errorf("%s: %+v", shell, got)
		}
	}
	for _, args := range [][]string{{"completion"}, {"completion", "tcsh"}} {
		if got := runLine(t, args...); got.status != exitUsage || !strings.Contains(got.err, "fish") {
			t.Errorf("%q: %+v", args, got)
		}
	}
}

// Every command, and every command of commands, is in the man page, with its flags.
func TestMan(t *testing.T) {
	page := runLine(t, "man")
	if page.status != 0 || !strings.Contains(page.stdout, ".SH NAME") {
		t.Fatalf("%+v", page)
	}
	text := strings.ReplaceAll(page.stdout, `\-`, "-")
	everyCommand(newApp().Commands, func(c *cli.Command) {
		if listed := strings.Contains(text, "\n.SH "+c.Name+"\n") || strings.Contains(text, "\n.SS "+c.Name+"\n"); listed == c.Hidden {
			t.Errorf("command %s, hidden %v, listed %v", c.Name, c.Hidden, listed)
		}
		for _, name := range flagNames(c.VisibleFlags()) {
			if !c.Hidden && !strings.Contains(text, name) {
				t.Errorf("flag %s of %s isn't there", name, c.Name)
			}
		}
	})
}
