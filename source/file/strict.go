package file

import (
	"encoding/json"
	"fmt"
	"reflect"
	"strconv"
	"strings"
	"sync"
)

// checker compares a tree with a Go type, as strictly as the API server does
// with fieldValidation=Strict: no unknown field, no key twice, no value of
// another type. The decoders that exist stop at the first wrong type and know
// no lines; this finds every problem with its line.
type checker struct{ errors []*lineError }

func (c *checker) fail(line int, path, format string, args ...any) {
	what := fmt.Sprintf(format, args...)
	if path != "" {
		what = path + ": " + what
	}
	c.errors = append(c.errors, &lineError{line: line, what: what})
}

var unmarshaler = reflect.TypeFor[json.Unmarshaler]()

// check reports where n doesn't fit t. Null fits everything, as in JSON.
func (c *checker) check(n *node, t reflect.Type, path string) {
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	switch {
	case n.kind == kindNull:
	case reflect.PointerTo(t).Implements(unmarshaler):
		c.checkLeaf(n, t, path)
	case t.Kind() == reflect.Struct:
		c.checkStruct(n, t, path)
	case t.Kind() == reflect.Map:
		c.checkMap(n, t, path)
	case t.Kind() == reflect.Slice:
		if n.kind != kindSequence {
			c.fail(n.line, path, "expected a list, found %s", n.describe())
			return
		}
		for i, item := range n.items {
			c.check(item, t.Elem(), fmt.Sprintf("%s[%d]", path, i))
		}
	default:
		c.checkScalar(n, t, path)
	}
}

// checkLeaf leaves types that decode themselves (times, quantities) to it.
func (c *checker) checkLeaf(n *node, t reflect.Type, path string) {
	if err := json.Unmarshal(n.json(nil), reflect.New(t).Interface()); err != nil {
		c.fail(n.line, path, "%s doesn't fit: %v", n.describe(), err)
	}
}

func (c *checker) checkStruct(n *node, t reflect.Type, path string) {
	if n.kind != kindMapping {
		c.fail(n.line, path, "expected an object, found %s", n.describe())
		return
	}
	known := fieldsOf(t)
	c.checkKeys(n, path, func(key string) string { return join(path, key) })
	for _, f := range n.fields {
		ft, ok := known[f.key]
		if !ok {
			c.fail(f.line, join(path, f.key), "unknown field%s", suggest(f.key, known))
			continue
		}
		c.check(f.value, ft, join(path, f.key))
	}
}

func (c *checker) checkMap(n *node, t reflect.Type, path string) {
	if n.kind != kindMapping {
		c.fail(n.line, path, "expected an object, found %s", n.describe())
		return
	}
	at := func(key string) string { return path + "[" + key + "]" }
	c.checkKeys(n, path, at)
	for _, f := range n.fields {
		c.check(f.value, t.Elem(), at(f.key))
	}
}

// checkKeys reports keys that are given twice.
func (c *checker) checkKeys(n *node, path string, at func(string) string) {
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

func (c *checker) checkScalar(n *node, t reflect.Type, path string) {
	switch t.Kind() {
	case reflect.String:
		switch n.kind {
		case kindString:
		case kindBool, kindInt, kindFloat:
			c.fail(n.line, path, "expected a string, found %s: put it in quotes", n.describe())
		default:
			c.fail(n.line, path, "expected a string, found %s", n.describe())
		}
	case reflect.Bool:
		if n.kind != kindBool {
			c.fail(n.line, path, "expected true or false, found %s", n.describe())
		}
	case reflect.Int32, reflect.Int64:
		if n.kind != kindInt {
			c.fail(n.line, path, "expected a whole number, found %s", n.describe())
		} else if _, err := strconv.ParseInt(n.value, 10, t.Bits()); err != nil {
			c.fail(n.line, path, "%s is beyond the range of the field", n.value)
		}
	default:
		c.fail(n.line, path, "fields of Go type %s are not understood", t)
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

// suggest proposes a field that differs in case only, the commonest slip.
func suggest(key string, known map[string]reflect.Type) string {
	for name := range known {
		if strings.EqualFold(name, key) {
			return fmt.Sprintf(", did you mean %s?", name)
		}
	}
	return ""
}
