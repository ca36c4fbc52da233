package main

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"

	"kproxy.dev/kproxy/config"
)

var update = flag.Bool("update", false, "write the tables of flags and fields into docs/configuration.md")

// The tables in the documentation are those that the program goes by.
func TestDocumentation(t *testing.T) {
	for section, want := range map[string]string{"flags": flagTable(), "fields": fieldTable()} {
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

func flagTable() string {
	var b strings.Builder
	b.WriteString("\n| flag | why |\n|---|---|\n")
	for _, f := range ignoredFlags() {
		fmt.Fprintf(&b, "| `--%s` | %s |\n", f.name(), f.why)
	}
	return b.String() + "\n"
}

func fieldTable() string {
	var b strings.Builder
	b.WriteString("\n| field | flag | |\n|---|---|---|\n")
	for _, f := range config.Fields() {
		flag, note := "`--"+f.Flag()+"`", f.Note
		switch mode, but := strings.CutPrefix(f.Only, "!"); {
		case f.Ignored != "":
			flag, note = "ignored", f.Ignored
		case but:
			note = "unless mode is " + mode
		case f.Only != "":
			note = "where mode is " + mode
		}
		fmt.Fprintf(&b, "| `%s` | %s | %s |\n", f.Path, flag, note)
	}
	return b.String() + "\n"
}
