package file

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"path/filepath"
	"reflect"
	"slices"
	"unicode/utf8"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kjson "sigs.k8s.io/json"

	"kproxy.dev/kproxy/source"
)

// manifest is the content of one file.
type manifest struct {
	objects []object
	// advice is what keeps an object from having an effect without making it
	// wrong; the file is in force all the same.
	advice []Problem
	// skipped are the documents of other kinds, a line of log each.
	skipped []Problem
}

// object is one Kubernetes object and the line it begins on.
type object struct {
	metav1.Object
	kind string
	line int
}

// id identifies an object among those of all files.
type id struct{ kind, namespace, name string }

func (o object) id() id { return id{o.kind, o.GetNamespace(), o.GetName()} }

// String returns "Service default/web", as messages name objects.
func (i id) String() string {
	switch {
	case i.name == "":
		return i.kind
	case i.namespace == "":
		return i.kind + " " + i.name
	}
	return i.kind + " " + i.namespace + "/" + i.name
}

// parse reads the content of the file named name. If there are problems, the
// manifest is incomplete and not to be used.
func parse(name string, data []byte) (manifest, []Problem) {
	p := parser{file: name}
	data = bytes.TrimPrefix(data, []byte("\uFEFF"))
	if line := badByte(data); line > 0 {
		p.fail(line, "the file is not text in UTF-8")
		return p.manifest, p.problems
	}
	documents := yamlDocuments
	if filepath.Ext(name) == ".json" {
		documents = jsonDocuments
	}
	docs, err := documents(data)
	for _, n := range docs {
		p.document(n, metav1.TypeMeta{})
	}
	var at *lineError
	if errors.As(err, &at) {
		p.fail(at.line, "%s", at.what)
	} else if err != nil {
		p.fail(0, "%v", err)
	}
	slices.SortStableFunc(p.problems, func(a, b Problem) int { return cmp.Compare(a.Line, b.Line) })
	return p.manifest, p.problems
}

// badByte returns the line of the first byte that no manifest has, 0 if there
// is none. The YAML parser finds them too, but doesn't say where.
func badByte(data []byte) int {
	for i := 0; i < len(data); {
		r, size := utf8.DecodeRune(data[i:])
		if r == utf8.RuneError && size == 1 || r < ' ' && r != '\t' && r != '\n' && r != '\r' || r == 0x7f {
			return 1 + bytes.Count(data[:i], []byte("\n"))
		}
		i += size
	}
	return 0
}

type parser struct {
	file     string
	manifest manifest
	problems []Problem
}

func (p *parser) fail(line int, format string, args ...any) {
	p.problems = append(p.problems, Problem{File: p.file, Line: line, Message: fmt.Sprintf(format, args...)})
}

func (p *parser) advise(line int, format string, args ...any) {
	p.manifest.advice = append(p.manifest.advice, Problem{File: p.file, Line: line, Message: fmt.Sprintf(format, args...)})
}

// document reads an object, or a list of them. Items of a typed list name no
// kind of their own; implied is theirs.
func (p *parser) document(n *node, implied metav1.TypeMeta) {
	if n.kind == kindNull {
		return // an empty document, such as after a trailing ---
	}
	if n.kind != kindMapping {
		p.fail(n.line, "expected a Kubernetes object, found %s", n.describe())
		return
	}
	t, ok := p.typeOf(n, implied)
	if !ok {
		return
	}
	if item, ok := listOf(t); ok {
		p.list(n, item)
		return
	}
	if create, ok := kinds[t]; ok {
		p.object(n, t.Kind, create())
		return
	}
	if meant, ok := nearMiss(t); ok {
		p.fail(n.locate("kind"), "%s", meant)
		return
	}
	p.manifest.skipped = append(p.manifest.skipped, Problem{File: p.file, Line: n.line,
		Message: fmt.Sprintf("skipped %s %s: not a kind that kproxy reads", t.APIVersion, t.Kind)})
}

// typeOf reads apiVersion and kind.
func (p *parser) typeOf(n *node, implied metav1.TypeMeta) (metav1.TypeMeta, bool) {
	t, ok := implied, true
	for _, f := range []struct {
		key   string
		value *string
	}{{"apiVersion", &t.APIVersion}, {"kind", &t.Kind}} {
		v := n.get(f.key)
		if v != nil && v.kind != kindString {
			p.fail(v.line, "%s: expected a string, found %s", f.key, v.describe())
			ok = false
			continue
		}
		if s := v.text(); s != "" {
			*f.value = s
		} else if *f.value == "" {
			p.fail(n.line, "%s: missing", f.key)
			ok = false
		}
	}
	return t, ok
}

// listHead is a list without its items, which are read one by one.
type listHead struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata"`
	Items           []ignored `json:"items"`
}

// ignored takes any value.
type ignored struct{}

// UnmarshalJSON accepts everything.
func (*ignored) UnmarshalJSON([]byte) error { return nil }

func (p *parser) list(n *node, item metav1.TypeMeta) {
	var c checker
	c.check(n, reflect.TypeFor[listHead](), "")
	if p.report(c.errors, n.get("kind").text()+": ") {
		return
	}
	if items := n.get("items"); items != nil {
		for _, v := range items.items {
			p.document(v, item)
		}
	}
}

// object decodes and checks one object.
func (p *parser) object(n *node, kind string, into metav1.Object) {
	meta := n.get("metadata")
	who := id{kind, meta.get("namespace").text(), shorten(meta.get("name").text())}
	if who.namespace == "" && kind != "Node" {
		who.namespace = metav1.NamespaceDefault
	}
	prefix := who.String() + ": "
	var c checker
	c.check(n, reflect.TypeOf(into), "")
	if p.report(c.errors, prefix) {
		return
	}
	if err := decode(n, into); err != nil {
		p.fail(n.line, "%s%v", prefix, err)
		return
	}
	source.Default(into)
	for _, e := range source.Validate(into) {
		p.fail(n.locate(e.Field), "%s%v", prefix, e)
	}
	p.manifest.objects = append(p.manifest.objects, object{into, kind, n.line})
	p.adviseOn(n, into, prefix)
}

func (p *parser) report(errors []*lineError, prefix string) bool {
	for _, e := range errors {
		p.fail(e.line, "%s%s", prefix, e.what)
	}
	return len(errors) > 0
}

// decode fills an object that has passed the checker. Kubernetes' own decoder
// has the last word; what it refuses beyond that has no line of its own.
func decode(n *node, into metav1.Object) error {
	strict, err := kjson.UnmarshalStrict(n.json(nil), into)
	return errors.Join(append(strict, err)...)
}

// adviseOn says why an object without errors won't have the effect that its
// author probably expects.
func (p *parser) adviseOn(n *node, o metav1.Object, prefix string) {
	switch o := o.(type) {
	case *corev1.Service:
		_, other := o.Labels[source.ProxyNameLabel]
		if o.Spec.ClusterIP == "" && o.Spec.Type != corev1.ServiceTypeExternalName && !other {
			p.advise(n.locate("spec"), "%sspec.clusterIP: missing, and nothing allocates one for a manifest: the Service isn't served", prefix)
		}
	case *discoveryv1.EndpointSlice:
		if o.Labels[discoveryv1.LabelServiceName] == "" {
			p.advise(n.locate("metadata.labels"), "%smetadata.labels[%s]: missing: the slice belongs to no Service", prefix, discoveryv1.LabelServiceName)
		}
	}
}
