package file

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kproxy.dev/kproxy/source"
	"kproxy.dev/kproxy/source/strict"
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

// parse reads the content of the file named name. If there are problems, advice
// is among them, and the manifest is incomplete and not to be used.
func parse(name string, data []byte) (manifest, []Problem) {
	p := parser{file: name}
	docs, err := strict.Documents(name, data)
	for _, n := range docs {
		p.document(n, metav1.TypeMeta{})
	}
	var at *strict.Error
	if errors.As(err, &at) {
		p.fail(at.Line, "%s", at.Message())
	} else if err != nil {
		p.fail(0, "%v", err)
	}
	if len(p.problems) > 0 {
		p.problems = append(p.problems, p.manifest.advice...)
	}
	slices.SortStableFunc(p.problems, func(a, b Problem) int { return cmp.Compare(a.Line, b.Line) })
	return p.manifest, p.problems
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
func (p *parser) document(n *strict.Node, implied metav1.TypeMeta) {
	if n.Kind() == strict.Null {
		return // an empty document, such as after a trailing ---
	}
	if n.Kind() != strict.Mapping {
		p.fail(n.Line(), "expected a Kubernetes object, found %s", n.Describe())
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
		p.fail(n.Locate("kind"), "%s", meant)
		return
	}
	p.manifest.skipped = append(p.manifest.skipped, Problem{File: p.file, Line: n.Line(),
		Message: fmt.Sprintf("skipped %s %s: not a kind that kproxy reads", t.APIVersion, t.Kind)})
}

// typeOf reads apiVersion and kind.
func (p *parser) typeOf(n *strict.Node, implied metav1.TypeMeta) (metav1.TypeMeta, bool) {
	t, ok := implied, true
	for _, f := range []struct {
		key   string
		value *string
	}{{"apiVersion", &t.APIVersion}, {"kind", &t.Kind}} {
		v := n.Get(f.key)
		if v != nil && v.Kind() != strict.String {
			p.fail(v.Line(), "%s: expected a string, found %s", f.key, v.Describe())
			ok = false
			continue
		}
		if s := v.Text(); s != "" {
			*f.value = s
		} else if *f.value == "" {
			p.fail(n.Line(), "%s: missing", f.key)
			ok = false
		}
	}
	return t, ok
}

// listHead is a list without its items, which are read one by one.
type listHead struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata"`
	Items           []json.RawMessage `json:"items"`
}

func (p *parser) list(n *strict.Node, item metav1.TypeMeta) {
	if wrong, _ := n.Decode(new(listHead)); p.report(wrong, n.Get("kind").Text()+": ") {
		return
	}
	if items := n.Get("items"); items != nil {
		for _, v := range items.Items() {
			p.document(v, item)
		}
	}
}

// object decodes and checks one object.
func (p *parser) object(n *strict.Node, kind string, into metav1.Object) {
	meta := n.Get("metadata")
	who := id{kind, meta.Get("namespace").Text(), strict.Shorten(meta.Get("name").Text())}
	if who.namespace == "" && kind != "Node" {
		who.namespace = metav1.NamespaceDefault
	}
	prefix := who.String() + ": "
	// What fits is checked all the same, so that all problems are reported at
	// once, unless the decoder gave up and left fields empty that the document has.
	wrong, err := n.Decode(into)
	if p.report(wrong, prefix); err != nil {
		return
	}
	source.Default(into)
	// A field that is missing may be the one that was misspelt.
	known := func(e source.FieldError) bool {
		return slices.ContainsFunc(wrong, func(w *strict.Error) bool { return w.Path == e.Field || n.At(e.Field) == nil })
	}
	for _, e := range source.Validate(into) {
		if !known(e) {
			p.fail(n.Locate(e.Field), "%s%v", prefix, e)
		}
	}
	p.manifest.objects = append(p.manifest.objects, object{into, kind, n.Line()})
	if len(wrong) == 0 {
		p.adviseOn(n, into, prefix)
	}
	for _, e := range source.CheckAnnotations(into) {
		if !known(e) {
			p.advise(n.Locate(e.Field), "%s%s", prefix, e.Message)
		}
	}
}

func (p *parser) report(errors []*strict.Error, prefix string) bool {
	for _, e := range errors {
		p.fail(e.Line, "%s%s", prefix, e.Message())
	}
	return len(errors) > 0
}

// adviseOn says why an object without errors won't have the effect that its
// author probably expects.
func (p *parser) adviseOn(n *strict.Node, o metav1.Object, prefix string) {
	switch o := o.(type) {
	case *corev1.Service:
		_, other := o.Labels[source.ProxyNameLabel]
		if o.Spec.ClusterIP == "" && o.Spec.Type != corev1.ServiceTypeExternalName && !other {
			p.advise(n.Locate("spec"), "%sspec.clusterIP: missing, and nothing allocates one for a manifest: the Service isn't served", prefix)
		}
	case *discoveryv1.EndpointSlice:
		if o.Labels[discoveryv1.LabelServiceName] == "" {
			p.advise(n.Locate("metadata.labels"), "%smetadata.labels[%s]: missing: the slice belongs to no Service", prefix, discoveryv1.LabelServiceName)
		}
	}
}

// kinds make an empty object of each kind that kproxy reads.
var kinds = map[metav1.TypeMeta]func() metav1.Object{
	{APIVersion: "v1", Kind: "Service"}:                        func() metav1.Object { return new(corev1.Service) },
	{APIVersion: "v1", Kind: "Endpoints"}:                      func() metav1.Object { return new(source.Endpoints) },
	{APIVersion: "v1", Kind: "Node"}:                           func() metav1.Object { return new(corev1.Node) },
	{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice"}: func() metav1.Object { return new(discoveryv1.EndpointSlice) },
}

// listOf returns the kind of a list's items: the empty one for a v1 List, whose
// items name their own, and false for what isn't a list of kinds read here.
func listOf(t metav1.TypeMeta) (item metav1.TypeMeta, ok bool) {
	if t == (metav1.TypeMeta{APIVersion: "v1", Kind: "List"}) {
		return metav1.TypeMeta{}, true
	}
	kind, isList := strings.CutSuffix(t.Kind, "List")
	item = metav1.TypeMeta{APIVersion: t.APIVersion, Kind: kind}
	_, known := kinds[item]
	return item, isList && known
}

// nearMiss says what was probably meant by a kind that doesn't exist, but is
// written almost like one that kproxy reads, or has another's API version. To
// skip it like any foreign kind would hide the slip. Other groups have kinds of
// the same names: only a slip in the group's name is one then.
func nearMiss(t metav1.TypeMeta) (string, bool) {
	known := slices.SortedFunc(maps.Keys(kinds), func(a, b metav1.TypeMeta) int { return strings.Compare(a.Kind, b.Kind) })
	var names, versions []string
	for _, k := range known {
		names, versions = append(names, k.Kind), append(versions, k.APIVersion)
	}
	kind, list := strings.CutSuffix(t.Kind, "List")
	suffix := ""
	if list {
		suffix = "List"
	}
	at := slices.Index(names, strict.Nearest(kind, names...))
	switch {
	case at < 0 && t.APIVersion == "v1" && strict.Nearest(t.Kind, "List") != "":
		return fmt.Sprintf("kind %s doesn't exist, did you mean List?", t.Kind), true
	case at < 0:
		return "", false
	}
	meant := known[at]
	switch exact := meant.Kind == kind; {
	case meant.APIVersion == t.APIVersion:
		return fmt.Sprintf("kind %s doesn't exist, did you mean %s?", t.Kind, meant.Kind+suffix), true
	case slices.Contains(versions, t.APIVersion), exact && group(t) != group(meant) && strict.Nearest(t.APIVersion, meant.APIVersion) != "":
		return fmt.Sprintf("%s has no kind %s, did you mean apiVersion %s, kind %s?", t.APIVersion, t.Kind, meant.APIVersion, meant.Kind+suffix), true
	}
	return "", false
}

func group(t metav1.TypeMeta) string { return path.Dir(t.APIVersion) }

// Problem is something wrong with a manifest.
type Problem struct {
	File    string
	Line    int // from 1; 0 for the file as a whole
	Message string
}

// String returns "file:line: message", or "file: message" without a line.
func (p Problem) String() string {
	if p.Line == 0 {
		return fmt.Sprintf("%s: %s", p.File, p.Message)
	}
	return fmt.Sprintf("%s:%d: %s", p.File, p.Line, p.Message)
}
