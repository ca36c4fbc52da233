package main

import (
	"bytes"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestListFollowsTheCode: every mutant breaks a text that is there, into Go, and its test exists. That it compiles and is
// caught takes minutes, and is the command's.
func TestListFollowsTheCode(t *testing.T) {
	all, err := read("../..", "test/mutants/mutants.txt")
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range all {
		if _, err := parser.ParseFile(token.NewFileSet(), m.file, m.broken, parser.SkipObjectResolution); err != nil {
			t.Errorf("%s: %s: %v", m.file, m.what, err)
		}
		name, _, _ := strings.Cut(m.test, "/")
		if !hasTest(t, filepath.Join("../..", m.pkg), name) {
			t.Errorf("%s: %s: %s has no %s", m.file, m.what, m.pkg, name)
		}
	}
	if len(all) < 30 {
		t.Errorf("%d mutants, want 30 at least", len(all))
	}
}

func hasTest(t *testing.T, folder, name string) bool {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(folder, "*_test.go"))
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		text, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		if bytes.Contains(text, []byte("\nfunc "+name+"(t *testing.T)")) {
			return true
		}
	}
	return false
}

func TestListsThatRot(t *testing.T) {
	root := t.TempDir()
	if err := os.WriteFile(filepath.Join(root, "a.go"), []byte("if a < b {\n\tone()\n}\nif b < c {\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct{ list, want string }{
		"fits":              {"# words\n\na.go: counts one too many\n- a < b {\n- \tone()\n+ a <= b {\n+ \tone()\n./p TestA\n", ""},
		"isn't there":       {"a.go: x\n- a > b\n+ b\n./p TestA", "0 times"},
		"is there twice":    {"a.go: x\n-  <\n+ >\n./p TestA", "2 times"},
		"changes nothing":   {"a.go: x\n- a < b\n+ a < b\n./p TestA", "changes nothing"},
		"no test":           {"a.go: x\n- a < b\n+ a > b", "needs"},
		"no sentence":       {"a.go\n- a < b\n+ a > b\n./p TestA", "needs"},
		"no blank line":     {"a.go: x\n- a < b\n+ a > b\n./p TestA\na.go: y", "too many"},
		"no file":           {"b.go: x\n- a < b\n+ a > b\n./p TestA", "no such file"},
		"nothing to remove": {"a.go: x\n+ a > b\n./p TestA", "needs"},
	} {
		t.Run(name, func(t *testing.T) {
			if err := os.WriteFile(filepath.Join(root, "list"), []byte(c.list), 0o600); err != nil {
				t.Fatal(err)
			}
			all, err := read(root, "list")
			switch {
			case c.want == "" && (err != nil || len(all) != 1 || string(all[0].broken) != "if a <= b {\n\tone()\n}\nif b < c {\n"):
				t.Errorf("got %v, %v", all, err)
			case c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)):
				t.Errorf("got error %v, want one with %q", err, c.want)
			}
		})
	}
}
