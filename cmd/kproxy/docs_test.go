package main

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write the table of ignored flags into docs/configuration.md")

// The table in the documentation is the one that the program goes by.
func TestDocumentation(t *testing.T) {
	const name, begin, end = "../../docs/configuration.md", "<!-- flags -->\n", "<!-- /flags -->"
	text, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, ok := strings.Cut(string(text), begin)
	is, after, ok2 := strings.Cut(rest, end)
	if !ok || !ok2 {
		t.Fatalf("%s has no %s and %s", name, begin, end)
	}
	want := "\n| flag | why |\n|---|---|\n"
	for _, f := range ignoredFlags() {
		want += fmt.Sprintf("| `--%s` | %s |\n", f.name(), f.why())
	}
	want += "\n"
	if is == want {
		return
	}
	if !*update {
		t.Fatalf("the flags in %s are not those of the program; run go test ./cmd/kproxy -update", name)
	}
	if err := os.WriteFile(name, []byte(before+begin+want+end+after), 0o644); err != nil {
		t.Fatal(err)
	}
}
