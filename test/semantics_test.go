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

// TestSemantics: every test that test/semantics.md names exists, and every row of its
// tables says what there is, or why there is nothing.
func TestSemantics(t *testing.T) {
	const name = "test/semantics.md"
	data, err := os.ReadFile("semantics.md")
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
		if strings.HasPrefix(text, "|") && (len(cells) != 4 || strings.TrimSpace(cells[1]) == "" || strings.TrimSpace(cells[2]) == "") {
			t.Errorf("%s:%d: want a row of two cells that aren't empty", name, line)
		}
	}
	if named == 0 {
		t.Errorf("%s names no test", name)
	}
}
