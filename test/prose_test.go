package test

import (
	"go/ast"
	"regexp"
	"strings"
	"testing"
)

// noun matches the beginning of a comment that says "X is what …" in place of a verb: "X returns …".
var noun = regexp.MustCompile(`^(?:A |An |The )?(\S+) (?:is|are) (?:what|those|who|whom|whose|which|as|how|where|when|whether|why)\b`)

// TestDocsBeginWithAVerb: the comments of functions and types say what these do.
func TestDocsBeginWithAVerb(t *testing.T) {
	for _, f := range parse(t) {
		for _, d := range f.ast.Decls {
			switch d := d.(type) {
			case *ast.FuncDecl:
				verbFirst(t, &f, d.Name, d.Doc)
			case *ast.GenDecl:
				for _, s := range d.Specs {
					if s, is := s.(*ast.TypeSpec); is {
						verbFirst(t, &f, s.Name, s.Doc)
						verbFirst(t, &f, s.Name, d.Doc)
					}
				}
			}
		}
	}
}

func verbFirst(t *testing.T, f *file, name *ast.Ident, doc *ast.CommentGroup) {
	t.Helper()
	text, _, _ := strings.Cut(doc.Text(), "\n")
	if m := noun.FindStringSubmatch(text); m != nil && m[1] == name.Name {
		t.Errorf("%s:%d: begin with a verb, as in %q: %s", f.name, fset.Position(doc.Pos()).Line, name.Name+" returns …", text)
	}
}
