package strict

import (
	"encoding/json"
	"strings"
	"testing"
)

func TestLocate(t *testing.T) {
	docs, err := Documents("a.yaml", []byte(`
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
		if got := docs[0].Locate(path); got != want {
			t.Errorf("%q is on line %d, want %d", path, got, want)
		}
	}
}

// Every string survives the way through JSON.
func TestQuote(t *testing.T) {
	for _, s := range []string{"", "a", `"\`, "\x00\x1f\x7f\t\n", "é€😀\u2028", strings.Repeat("x", 1000)} {
		var got string
		if err := json.Unmarshal(quote(s), &got); err != nil || got != s {
			t.Errorf("%q came back as %q, %v", s, got, err)
		}
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
	_, err := Documents("a.yaml", []byte(b.String()))
	if err == nil || !strings.Contains(err.Error(), "more than 4194304 values, counting every use of an alias") {
		t.Errorf("got %v", err)
	}
}

// Merged fields have the values that the YAML specification gives them: own
// ones first, then those of earlier maps.
func TestMergeOrder(t *testing.T) {
	docs, err := Documents("a.yaml", []byte("x: &x {a: 1, b: 1, c: 1}\ny: &y {b: 2, c: 2, d: 2}\nz:\n  <<: [*x, *y]\n  c: 3\n"))
	if err != nil {
		t.Fatal(err)
	}
	if got, want := string(docs[0].Get("z").json(nil)), `{"c":3,"a":1,"b":1,"d":2}`; got != want {
		t.Errorf("merged to %s, want %s", got, want)
	}
}

// Numbers keep the spelling that JSON has too; what YAML spells otherwise keeps its value and type.
func TestScalars(t *testing.T) {
	for _, tt := range []struct{ name, text, want string }{
		{"a.yaml", "[80, 80.0, 1e39, 12345678901234567890123, -0]", "[80,80.0,1e39,12345678901234567890123,-0]"},
		{"a.yaml", "[0x50, 0o17, 017, 0b11, 1_000, +3, .5, 1., 1_0.0]", "[80,15,15,3,1000,3,0.5,1.0,10.0]"},
		{"a.yaml", "[True, yes, ~, 1e400, 2024-01-01, !!str 1, '1']", `[true,"yes",null,"1e400","2024-01-01","1","1"]`},
		{"a.json", "[80, 80.0, 1E+39, 12345678901234567890123, -0, true, null, \"1\"]", `[80,80.0,1E+39,12345678901234567890123,-0,true,null,"1"]`},
		{"a.json", `{"<<": {"a": 1}, "~": "\ud83d\ude00\ud800\/\u0000"}`, `{"\u003c\u003c":{"a":1},"~":"😀�/\u0000"}`},
		{"a.json", "{\"a\"\n:\r\n\t1\n}", `{"a":1}`},                                                     // YAML wants the colon beside its key,
		{"a.json", `{"` + strings.Repeat("a", 2000) + `":1}`, `{"` + strings.Repeat("a", 2000) + `":1}`}, // and that within 1024 characters
	} {
		docs, err := Documents(tt.name, []byte(tt.text))
		if err != nil || len(docs) != 1 || docs[0].String() != tt.want {
			t.Errorf("%s became %v, %v", tt.text, docs, err)
		}
	}
	for _, text := range []string{".inf", ".nan", "!!int x", "!!int '{}'", "!!bool 5"} {
		if docs, err := Documents("a.yaml", []byte(text)); err == nil {
			t.Errorf("%s became %v", text, docs)
		}
	}
}
