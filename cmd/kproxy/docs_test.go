package main

import (
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"kproxy.dev/kproxy/config"
)

var update = flag.Bool("update", false, "write the lists of fields and flags into docs/configuration.md")

// The lists in the documentation are those that the program goes by.
func TestDocumentation(t *testing.T) {
	for section, want := range map[string]string{"fields": fieldList(), "ignored": ignoredList()} {
		t.Run(section, func(t *testing.T) { documented(t, section, want) })
	}
}

func documented(t *testing.T, section, want string) {
	t.Helper()
	const name = "../../docs/configuration.md"
	begin, end := "<!-- "+section+" -->\n", "<!-- /"+section+" -->"
	text, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, ok := strings.Cut(string(text), begin)
	is, after, ok2 := strings.Cut(rest, end)
	if !ok || !ok2 {
		t.Fatalf("%s has no %s and %s", name, begin, end)
	}
	if is == want {
		return
	}
	if !*update {
		t.Fatalf("the %s in %s are not those of the program; run go test ./cmd/kproxy -update", section, name)
	}
	if err := os.WriteFile(name, []byte(before+begin+want+end+after), 0o644); err != nil {
		t.Fatal(err)
	}
}

func fieldList() string {
	var b strings.Builder
	for _, f := range config.Fields() {
		note := f.Note
		switch mode, but := strings.CutPrefix(f.Only, "!"); {
		case f.Ignored != "":
			continue
		case but:
			note = "unless mode is " + mode
		case f.Only != "":
			note = "where mode is " + mode
		}
		if note != "" {
			note = "; " + note
		}
		fmt.Fprintf(&b, "- `%s`: `--%s`%s\n", f.Path, f.Flag(), note)
	}
	return "\n" + b.String() + "\n"
}

// ignoredList has, for each reason, the fields and flags that have no effect for it.
func ignoredList() string {
	var reasons []string
	names := map[string][]string{}
	add := func(name, why string) {
		if !slices.Contains(reasons, why) {
			reasons = append(reasons, why)
		}
		names[why] = append(names[why], "`"+name+"`")
	}
	for _, f := range config.Fields() {
		if f.Ignored != "" {
			add(f.Path, f.Ignored)
		}
	}
	for _, f := range ignoredFlags() {
		add("--"+f.name(), f.why)
	}
	var b strings.Builder
	for _, why := range reasons {
		fmt.Fprintf(&b, "- %s: %s\n", strings.Join(names[why], ", "), why)
	}
	return "\n" + b.String() + "\n"
}
