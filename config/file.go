package config

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"k8s.io/kube-proxy/config/v1alpha1"

	"kproxy.dev/kproxy/source/strict"
)

// What a KubeProxyConfiguration names itself.
const (
	apiVersion = "kubeproxy.config.k8s.io/v1alpha1"
	kind       = "KubeProxyConfiguration"
)

// File is a KubeProxyConfiguration, as read. It isn't modified.
type File struct {
	Name      string
	Data      []byte // what was read
	kubeProxy v1alpha1.KubeProxyConfiguration
	node      *strict.Node
	former    []Outcome // of fields of the API's past
}

// Read reads the file named name. The error has one line for each mistake in
// it, "file:line: field: what".
func Read(name string) (*File, error) {
	data, err := strict.Read(name)
	if err != nil {
		return nil, fmt.Errorf("--config: read %s: %w", name, strict.Cause(err))
	}
	return Parse(name, data)
}

// Parse reads the content of the file named name. What its values mean is judged
// by Config.Validate once they are applied, all at once. It is strict where kube-proxy
// only warns, about fields it doesn't know or that are given twice: a slip in
// nodePortAddresses or clusterCIDR would otherwise open or masquerade what its
// author meant to keep shut, and a warning of a proxy that runs goes unread.
func Parse(name string, data []byte) (*File, error) {
	f := &File{Name: name, Data: data}
	docs, err := strict.Documents(name, data)
	if err != nil {
		return nil, f.mistake(err)
	}
	if f.node, err = f.only(docs); err != nil {
		return nil, err
	}
	if err := f.checkKind(); err != nil {
		return nil, err
	}
	wrong, _ := f.node.Decode(&f.kubeProxy)
	for _, field := range former {
		if v := f.node.At(field.Path); v != nil {
			f.former = append(f.former, Outcome{Field: field, Line: f.node.Locate(field.Path), Value: v.String()})
			wrong = slices.DeleteFunc(wrong, func(e *strict.Error) bool { return e.Path == field.Path })
		}
	}
	var all []error
	for _, e := range wrong {
		all = append(all, f.mistake(e))
	}
	if len(all) > 0 {
		return nil, errors.Join(all...)
	}
	return f, nil
}

// mistake puts the file's name before a line's number.
func (f *File) mistake(err error) error {
	at, ok := errors.AsType[*strict.Error](err)
	if !ok {
		return fmt.Errorf("%s: %w", f.Name, err)
	}
	what := at.Message()
	if strings.HasPrefix(at.What, "unknown field") {
		what += "; kube-proxy has none of this name: correct or remove it"
	}
	return f.at(at.Line, what)
}

func (f *File) at(line int, what string) error { return fmt.Errorf("%s:%d: %s", f.Name, line, what) }

// only returns the one document.
func (f *File) only(docs []*strict.Node) (*strict.Node, error) {
	var found *strict.Node
	for _, n := range docs {
		switch {
		case n.Kind() == strict.Null: // between two lines of ---
		case found != nil:
			return nil, f.at(n.Line(), "a second document; keep the "+kind+" in a file of its own")
		default:
			found = n
		}
	}
	switch {
	case found == nil:
		return nil, fmt.Errorf("%s: the file is empty; give it apiVersion: %s and kind: %s, at least", f.Name, apiVersion, kind)
	case found.Kind() != strict.Mapping:
		return nil, f.at(found.Line(), "expected a "+kind+", found "+found.Describe())
	}
	return found, nil
}

func (f *File) checkKind() error {
	gotVersion, gotKind := f.node.Get("apiVersion").Text(), f.node.Get("kind").Text()
	switch {
	case gotVersion == apiVersion && gotKind == kind:
		return nil
	case gotKind == "ConfigMap":
		return f.at(f.node.Locate("kind"), "this is a ConfigMap; give the file that is in it, under config.conf in kubeadm's")
	case gotKind != kind:
		return f.at(f.node.Locate("kind"), fmt.Sprintf("kind: %q is not %s; correct it", gotKind, kind))
	}
	return f.at(f.node.Locate("apiVersion"), fmt.Sprintf("apiVersion: %q is not %s, the only version there is; correct it", gotVersion, apiVersion))
}

// Locate says of problems that Validate found in a Config where the file has
// what they are about. Those of flags that isGiven are left as they are.
func (f *File) Locate(err error, isGiven func(flag string) bool) error {
	if err == nil {
		return nil
	}
	var all []error
	for _, e := range split(err) {
		if p, ok := errors.AsType[*Problem](e); ok && !isGiven(p.Flag) {
			e = f.locate(p)
		}
		all = append(all, e)
	}
	return errors.Join(all...)
}

func (f *File) locate(p *Problem) error {
	for _, field := range fields {
		if field.Flag() == p.Flag && f.isIn(field) && f.node.At(field.Path) != nil {
			return f.at(f.node.Locate(field.Path), field.Path+": "+p.What)
		}
	}
	return p
}

// isIn reports whether the field has an effect in the file's mode.
func (f *File) isIn(field Field) bool {
	not, but := strings.CutPrefix(field.Only, "!")
	switch {
	case field.Only == "":
		return true
	case but:
		return string(f.kubeProxy.Mode) != not
	}
	return string(f.kubeProxy.Mode) == field.Only
}

// split takes apart what errors.Join has joined.
func split(err error) []error {
	if many, ok := err.(interface{ Unwrap() []error }); ok {
		return many.Unwrap()
	}
	return []error{err}
}
