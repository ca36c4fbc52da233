package test

import (
	"go/ast"
	"os"
	"regexp"
	"strings"
	"testing"
)

// testName is how test/semantics.md names a test: its folder and its function.
var testName = regexp.MustCompile("`([a-z0-9/]+)\\.((?:Test|Fuzz)[A-Za-z0-9_]*)`")

// TestSemantics: every test that test/semantics.md and the threat model name exists, and every row of their
// tables says what there is, or why there is nothing.
func TestSemantics(t *testing.T) {
	namesTests(t, "test/semantics.md", 2)
	namesTests(t, "docs/security.md", 3)
}

// namesTests checks a page whose tables have so many columns.
func namesTests(t *testing.T, name string, columns int) {
	t.Helper()
	data, err := os.ReadFile("../" + name)
	if err != nil {
		t.Fatal(err)
	}
	tests := map[string]bool{}
	for _, f := range parse(t) {
		for _, d := range f.ast.Decls {
			if fn, ok := d.(*ast.FuncDecl); ok && f.test && fn.Recv == nil {
				tests[f.folder+"."+fn.Name.Name] = true
			}
		}
	}
	named := 0
	line := 0
	for text := range strings.Lines(string(data)) {
		line++
		for _, m := range testName.FindAllStringSubmatch(text, -1) {
			named++
			if !tests[m[1]+"."+m[2]] {
				t.Errorf("%s:%d: there is no test %s in %s", name, line, m[2], m[1])
			}
		}
		cells := strings.Split(strings.TrimSpace(text), "|")
		if strings.HasPrefix(text, "|") && (len(cells) != columns+2 || strings.TrimSpace(cells[1]) == "" || strings.TrimSpace(cells[2]) == "") {
			t.Errorf("%s:%d: want a row of %d cells whose first two aren't empty", name, line, columns)
		}
	}
	if named == 0 {
		t.Errorf("%s names no test", name)
	}
}
