package file

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"
)

func TestLocate(t *testing.T) {
	docs, err := yamlDocuments([]byte(`
metadata:
  labels:
    a.b/c: x
    "[0]": y
spec:
  ports:
  - name: a
    port: 1
  - name: b

    port: 2
  list: [[1, 2],
    [3]]
`))
	if err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]int{
		"":                       2,
		"metadata":               2,
		"metadata.labels[a.b/c]": 4,
		"metadata.labels[none]":  3,
		"spec.ports":             7,
		"spec.ports[0]":          8,
		"spec.ports[0].port":     9,
		"spec.ports[1].port":     12,
		"spec.ports[1].protocol": 10,
		"spec.ports[2].port":     7,
		"spec.ports[-1]":         7,
		"spec.ports.x":           7,
		"spec.list[0][1]":        13,
		"spec.list[1][0]":        14,
		"spec.none.at.all[3]":    6,
		"none":                   2,
	} {
		if got := docs[0].locate(path); got != want {
			t.Errorf("%q is on line %d, want %d", path, got, want)
		}
	}
}

// Every string survives the way through JSON.
func TestAppendString(t *testing.T) {
	for _, s := range []string{"", "a", `"\`, "\x00\x1f\x7f\t\n", "é€😀\u2028", strings.Repeat("x", 1000)} {
		var got string
		if err := json.Unmarshal(appendString(nil, s), &got); err != nil || got != s {
			t.Errorf("%q came back as %q, %v", s, got, err)
		}
	}
}

// The checker knows every Go type that occurs in an object that is read.
func TestCheckerKnowsAllTypes(t *testing.T) {
	seen := map[reflect.Type]bool{}
	var visit func(reflect.Type, string)
	visit = func(typ reflect.Type, path string) {
		for typ.Kind() == reflect.Pointer {
			typ = typ.Elem()
		}
		if seen[typ] || reflect.PointerTo(typ).Implements(unmarshaler) {
			return
		}
		seen[typ] = true
		switch typ.Kind() {
		case reflect.Struct:
			for name, f := range fieldsOf(typ) {
				visit(f, path+"."+name)
			}
		case reflect.Slice:
			if typ.Elem().Kind() == reflect.Uint8 {
				t.Errorf("%s is a []byte, a string in JSON, which the checker takes for a list", path)
			}
			visit(typ.Elem(), path+"[]")
		case reflect.Map:
			if typ.Key().Kind() != reflect.String {
				t.Errorf("%s has keys of type %s", path, typ.Key())
			}
			visit(typ.Elem(), path+"{}")
		case reflect.String, reflect.Bool, reflect.Int32, reflect.Int64:
		default:
			t.Errorf("%s is a %s, which the checker doesn't know", path, typ)
		}
	}
	for k, create := range kinds {
		visit(reflect.TypeOf(create()), k.Kind)
	}
	visit(reflect.TypeFor[listHead](), "List")
	if len(seen) < 50 {
		t.Errorf("only %d types visited", len(seen))
	}
}

// A few aliases that stand for billions of values are refused, not expanded.
func TestAliasBomb(t *testing.T) {
	var b strings.Builder
	b.WriteString("a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n")
	for i := 1; i < 12; i++ {
		prev := "*a" + string(rune('a'+i-2))
		if i == 1 {
			prev = "*a0"
		}
		b.WriteString("a" + string(rune('a'+i-1)) + ": &a" + string(rune('a'+i-1)) + " [" + strings.Repeat(prev+", ", 9) + prev + "]\n")
	}
	_, problems := parse("a.yaml", []byte(b.String()))
	if len(problems) != 1 || !strings.Contains(problems[0].Message, "more than 4194304 values, counting every use of an alias") {
		t.Errorf("problems %v", lines(problems))
	}
}
