package strict

import (
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Check compares a tree with a Go type, as strictly as the API server does with
// fieldValidation=Strict: no unknown field, no key twice, no value of another
// type. The decoders that exist stop at the first wrong type and know no lines;
// this finds every problem with its line.
func Check(n *Node, t reflect.Type) []*Error {
	var c checker
	c.check(n, t, "")
	return c.errors
}

type checker struct{ errors []*Error }

func (c *checker) fail(line int, path, format string, args ...any) {
	c.errors = append(c.errors, &Error{Line: line, Path: path, What: fmt.Sprintf(format, args...)})
}

var unmarshaler = reflect.TypeFor[json.Unmarshaler]()

// check reports where n doesn't fit t. Null fits everything, as in JSON, but for
// types that decode themselves and think otherwise.
func (c *checker) check(n *Node, t reflect.Type, path string) {
	optional := t.Kind() == reflect.Pointer
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	switch {
	case n.kind == Null && optional:
	case reflect.PointerTo(t).Implements(unmarshaler):
		c.checkLeaf(n, t, path)
	case n.kind == Null:
	case t.Kind() == reflect.Struct:
		c.checkStruct(n, t, path)
	case t.Kind() == reflect.Map && t.Key().Kind() == reflect.String:
		c.checkMap(n, t, path)
	case t.Kind() == reflect.Slice && t.Elem().Kind() != reflect.Uint8: // bytes are a string in JSON
		if n.kind != Sequence {
			c.fail(n.line, path, "expected a list, found %s", n.Describe())
			return
		}
		for i, item := range n.items {
			c.check(item, t.Elem(), fmt.Sprintf("%s[%d]", path, i))
		}
	default:
		c.checkScalar(n, t, path)
	}
}

// checkLeaf leaves types that decode themselves (times, quantities) and rare ones to the decoder.
func (c *checker) checkLeaf(n *Node, t reflect.Type, path string) {
	if t == reflect.TypeFor[metav1.Duration]() {
		if _, err := time.ParseDuration(n.value); n.kind != String || err != nil {
			c.fail(n.line, path, "expected a duration such as 30s or 1h30m, found %s", n.Describe())
		}
		return
	}
	if err := json.Unmarshal(n.json(nil), reflect.New(t).Interface()); err != nil {
		c.fail(n.line, path, "%s doesn't fit: %v", n.Describe(), err)
	}
}

func (c *checker) checkStruct(n *Node, t reflect.Type, path string) {
	if n.kind != Mapping {
		c.fail(n.line, path, "expected an object, found %s", n.Describe())
		return
	}
	known := fieldsOf(t)
	c.checkKeys(n, func(key string) string { return join(path, key) })
	for _, f := range n.fields {
		ft, ok := known[f.key]
		if !ok {
			c.fail(f.line, join(path, f.key), "unknown field%s", DidYouMean(f.key, slices.Sorted(maps.Keys(known))...))
			continue
		}
		c.check(f.value, ft, join(path, f.key))
	}
}

func (c *checker) checkMap(n *Node, t reflect.Type, path string) {
	if n.kind != Mapping {
		c.fail(n.line, path, "expected an object, found %s", n.Describe())
		return
	}
	at := func(key string) string { return path + "[" + key + "]" }
	c.checkKeys(n, at)
	for _, f := range n.fields {
		c.check(f.value, t.Elem(), at(f.key))
	}
}

// checkKeys reports keys that are given twice.
func (c *checker) checkKeys(n *Node, at func(string) string) {
	if len(n.fields) < 2 {
		return
	}
	first := make(map[string]int, len(n.fields))
	for _, f := range n.fields {
		if line, dup := first[f.key]; dup {
			c.fail(f.line, at(f.key), "given twice, first on line %d", line)
			continue
		}
		first[f.key] = f.line
	}
}

func (c *checker) checkScalar(n *Node, t reflect.Type, path string) {
	number := n.kind == Int || n.kind == Float
	expected, fits, err := "", false, error(nil)
	switch t.Kind() {
	case reflect.String:
		expected, fits = "a string", n.kind == String
	case reflect.Bool:
		expected, fits = "true or false", n.kind == Bool
	case reflect.Float32, reflect.Float64:
		expected, fits = "a number", number
		_, err = strconv.ParseFloat(n.value, t.Bits())
	case reflect.Uint16, reflect.Uint32, reflect.Uint64:
		expected, fits = "a whole number", n.kind == Int
		_, err = strconv.ParseUint(n.value, 10, t.Bits())
	case reflect.Int, reflect.Int32, reflect.Int64:
		expected, fits = "a whole number", n.kind == Int
		_, err = strconv.ParseInt(n.value, 10, t.Bits())
	default:
		c.checkLeaf(n, t, path)
		return
	}
	switch {
	case !fits && t.Kind() == reflect.String && (number || n.kind == Bool):
		c.fail(n.line, path, "expected a string, found %s: put it in quotes", n.Describe())
	case !fits:
		c.fail(n.line, path, "expected %s, found %s", expected, n.Describe())
	case err != nil:
		c.fail(n.line, path, "%s is beyond the range of the field", n.value)
	}
}

func join(path, key string) string {
	if path == "" {
		return key
	}
	return path + "." + key
}

// fieldCache holds a map[string]reflect.Type for each struct type met. It is a
// pure function of the type, kept because every object asks for it.
var fieldCache sync.Map

// fieldsOf returns the fields of a struct type by their name in JSON.
func fieldsOf(t reflect.Type) map[string]reflect.Type {
	if cached, ok := fieldCache.Load(t); ok {
		return cached.(map[string]reflect.Type)
	}
	fields := map[string]reflect.Type{}
	for f := range t.Fields() {
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		switch {
		case name == "-" || !f.IsExported():
		case f.Anonymous && name == "":
			for k, v := range fieldsOf(f.Type) {
				fields[k] = v
			}
		case name == "":
			fields[f.Name] = f.Type
		default:
			fields[name] = f.Type
		}
	}
	fieldCache.Store(t, fields)
	return fields
}
