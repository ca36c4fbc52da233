package main

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/urfave/cli/v2"
)

// TestCommandsOfTheDocs: what the README, and the pages that one installs by, say to type is there: each command of kproxy and of its
// plugin with these flags, each target of the Makefile, each path of the repository, each file of a release.
func TestCommandsOfTheDocs(t *testing.T) {
	read := func(name string) string {
		text, err := os.ReadFile("../../" + name)
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	makefile, release := read("Makefile"), read("deploy/release.sh")
	kproxy := regexp.MustCompile(`(?:^|[;&] *|-- )(?:sudo )?(?:\S*/)?kproxy ((?:[a-z]+)(?: .*)?)$`)
	count := 0
	for _, page := range []string{"README.md", "docs/README.md", "docs/commands.md", "docs/helm.md", "docs/migration.md", "docs/cluster.md"} {
		for _, line := range commandLines(read(page)) {
			switch {
			case strings.HasPrefix(line, "make "):
				target := strings.Fields(line)[1]
				if !regexp.MustCompile(`(?m)^` + target + `: .*##`).MatchString(makefile) {
					t.Errorf("%s: the Makefile has no target %s", page, target)
				}
			case strings.HasPrefix(line, "kubectl kproxy "):
				takes(t, page, line, newPlugin, strings.TrimPrefix(line, "kubectl kproxy "))
			case strings.HasPrefix(line, "kubectl apply ") || strings.HasPrefix(line, "kubectl delete -"):
				path := strings.Fields(line)[3]
				if _, err := os.Stat("../../" + path); err != nil && !strings.Contains(release, "kproxy-${name") {
					t.Errorf("%s: %s: %v", page, line, err)
				} else if err != nil { // kproxy-NAME.yaml is of the kustomization NAME
					name := strings.TrimSuffix(strings.TrimPrefix(path, "kproxy-"), ".yaml")
					if _, err := os.Stat(filepath.Join("../../deploy/overlays", name)); err != nil {
						t.Errorf("%s: %s: no release has %s", page, line, path)
					}
				}
			default:
				m := kproxy.FindStringSubmatch(line)
				if m == nil {
					continue
				}
				takes(t, page, line, newApp, m[1])
			}
			count++
		}
	}
	if count < 30 {
		t.Errorf("only %d commands were found", count)
	}
	if words := len(strings.Fields(read("README.md"))); words > 900 {
		t.Errorf("README.md has %d words, 900 are the bound", words)
	}
}

// commandLines are the lines of a page's blocks, without comments.
func commandLines(page string) (out []string) {
	inside := false
	for line := range strings.Lines(page) {
		if strings.HasPrefix(line, "```") {
			inside = !inside
			continue
		}
		if line, _, _ = strings.Cut(line, " #"); inside || strings.HasPrefix(line, "    ") {
			out = append(out, strings.TrimSpace(line))
		}
	}
	return out
}

// takes checks that a program has a command, with the flags of a line.
func takes(t *testing.T, page, line string, program func() *cli.App, words string) {
	t.Helper()
	found, rest := commandOf(program(), append([]string{"program"}, strings.Fields(words)...))
	if found.command == nil {
		t.Errorf("%s: %s: there is no such command", page, line)
		return
	}
	for _, word := range rest {
		name, _, _ := strings.Cut(strings.TrimLeft(word, "-"), "=")
		if word == "--" {
			return
		}
		if isFlag(word) && name != "help" && flagNamed(found.command.Flags, name) == nil {
			t.Errorf("%s: %s: there is no flag %s", page, line, word)
		}
	}
}
