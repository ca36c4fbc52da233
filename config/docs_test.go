package config

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write the table of fields into docs/configuration.md")

// The table in the documentation is the one that the program goes by.
func TestDocumentation(t *testing.T) {
	const name, begin, end = "../docs/configuration.md", "<!-- fields -->\n", "<!-- /fields -->"
	text, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, ok := strings.Cut(string(text), begin)
	is, after, ok2 := strings.Cut(rest, end)
	if !ok || !ok2 {
		t.Fatalf("%s has no %s and %s", name, begin, end)
	}
	want := fieldTable()
	if is == want {
		return
	}
	if !*update {
		t.Fatalf("the fields in %s are not those of the program; run go test ./config -update", name)
	}
	if err := os.WriteFile(name, []byte(before+begin+want+end+after), 0o644); err != nil {
		t.Fatal(err)
	}
}

func fieldTable() string {
	var b strings.Builder
	b.WriteString("\n| field | flag | |\n|---|---|---|\n")
	for _, f := range Fields() {
		flag, note := "`--"+f.Flag+"`", f.Note
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
