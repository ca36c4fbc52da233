package strict

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kjson "sigs.k8s.io/json"
)

// Decode fills what into points to, as strictly as the API server does with
// fieldValidation=Strict: no unknown field, no key twice, no value of another
// type. All that is wrong is reported, in the order of the document; what is right is
// filled in all the same, unless an error says that the decoder gave up.
func (n *Node) Decode(into any) ([]*Error, error) {
	strict, err := kjson.UnmarshalStrict(n.json(nil), into)
	if err == nil && len(strict) == 0 {
		return nil, nil
	}
	wrong := n.mistakes(reflect.TypeOf(into), "")
	if len(wrong) == 0 { // the decoder has the last word
		wrong = []*Error{errorAt(n.line, "%v", errors.Join(append(strict, err)...))}
	}
	if _, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
		err = nil
	}
	return wrong, err
}

var unmarshaler = reflect.TypeFor[json.Unmarshaler]()

// mistakes finds where n doesn't fit t. The decoder ends at the first wrong
// type and knows no lines; so it is asked about each value by itself.
func (n *Node) mistakes(t reflect.Type, path string) (wrong []*Error) {
	for t.Kind() == reflect.Pointer {
		if t = t.Elem(); n.kind == Null {
			return nil
		}
	}
	fail := func(line int, path, format string, args ...any) {
		wrong = append(wrong, &Error{Line: line, Path: path, What: fmt.Sprintf(format, args...)})
	}
	decodesItself := reflect.PointerTo(t).Implements(unmarshaler)
	isStruct := n.kind == Mapping && t.Kind() == reflect.Struct
	inside := isStruct || n.kind == Mapping && t.Kind() == reflect.Map || n.kind == Sequence && t.Kind() == reflect.Slice
	if what := expected(t); decodesItself || !inside {
		switch err := json.Unmarshal(n.json(nil), reflect.New(t).Interface()); {
		case err == nil:
		case what == "":
			fail(n.line, path, "%s doesn't fit: %v", n.Describe(), err)
		case t.Kind() == reflect.String && (n.kind == Number || n.kind == Bool):
			fail(n.line, path, "expected a string, found %s: put it in quotes", n.Describe())
		default:
			fail(n.line, path, "expected %s, found %s", what, n.Describe())
		}
		return wrong
	}
	var known map[string]reflect.Type
	if isStruct {
		known = fieldsOf(t)
	}
	first := map[string]int{} // lines of keys
	for _, item := range n.items {
		at := path + "[" + item.key + "]"
		if isStruct {
			at = strings.TrimPrefix(path+"."+item.key, ".")
		}
		if line, dup := first[item.key]; dup {
			fail(item.keyLine, at, "given twice, first on line %d", line)
		} else {
			first[item.key] = item.keyLine
		}
		switch {
		case !isStruct:
			wrong = append(wrong, item.mistakes(t.Elem(), at)...)
		case known[item.key] == nil:
			fail(item.keyLine, at, "unknown field%s", DidYouMean(item.key, slices.Sorted(maps.Keys(known))...))
		default:
			wrong = append(wrong, item.mistakes(known[item.key], at)...)
		}
	}
	return wrong
}

// expected says what a value of type t looks like; it is empty for types that
// decode themselves (times, quantities) and rare ones.
func expected(t reflect.Type) string {
	switch kind := t.Kind(); {
	case t == reflect.TypeFor[metav1.Duration]():
		return "a duration such as 30s or 1h30m"
	case reflect.PointerTo(t).Implements(unmarshaler):
	case kind == reflect.String:
		return "a string"
	case kind == reflect.Bool:
		return "true or false"
	case kind == reflect.Float32, kind == reflect.Float64:
		return fmt.Sprintf("a number of %d bits", t.Bits())
	case reflect.Uint <= kind && kind <= reflect.Uint64:
		return fmt.Sprintf("a whole number from 0, of %d bits", t.Bits())
	case reflect.Int <= kind && kind <= reflect.Int64:
		return fmt.Sprintf("a whole number of %d bits", t.Bits())
	case kind == reflect.Slice:
		return "a list"
	case kind == reflect.Map, kind == reflect.Struct:
		return "an object"
	}
	return ""
}

// fieldsOf returns the fields of a struct type by their name in JSON.
func fieldsOf(t reflect.Type) map[string]reflect.Type {
	fields := map[string]reflect.Type{}
	for f := range t.Fields() {
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		switch {
		case f.Anonymous && name == "":
			maps.Copy(fields, fieldsOf(f.Type))
		case f.IsExported() && name != "-":
			fields[cmp.Or(name, f.Name)] = f.Type
		}
	}
	return fields
}
