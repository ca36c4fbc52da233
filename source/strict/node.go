package strict

import (
	"encoding/json"
	"regexp"
	"strconv"
	"strings"
)

// Node is a value of a document, YAML or JSON, that knows its line. Aliases
// and merge keys are resolved.
type Node struct {
	kind    Kind
	line    int
	key     string // in the mapping that it is a value of, or its index in a sequence
	keyLine int
	value   string  // of a scalar, in JSON's spelling (a string without its quotes)
	items   []*Node // of a sequence or a mapping, in the order of the document; keys may repeat
}

// Kind says what sort of value a Node is.
type Kind uint8

// The kinds of values.
const (
	Null Kind = iota
	Bool
	Number
	String
	Mapping
	Sequence
)

// Kind returns what sort of value n is.
func (n *Node) Kind() Kind { return n.kind }

// Line returns the line that n begins on, from 1.
func (n *Node) Line() int { return n.line }

// Items returns the values of a sequence.
func (n *Node) Items() []*Node { return n.items }

// String returns n as JSON.
func (n *Node) String() string { return string(n.json(nil)) }

// Describe names a value in an error message.
func (n *Node) Describe() string {
	value := n.value
	if n.kind == String {
		value = strconv.Quote(Shorten(value))
	}
	return [...]string{"null", "the boolean ", "the number ", "the string ", "an object", "a list"}[n.kind] + value
}

// Shorten keeps a value readable in a line of log.
func Shorten(s string) string {
	const most = 60
	if len(s) <= most {
		return s
	}
	return strings.ToValidUTF8(s[:most], "") + "…"
}

// Get returns the value of the first field named key, or nil.
func (n *Node) Get(key string) *Node {
	if n != nil {
		for _, item := range n.items {
			if item.key == key {
				return item
			}
		}
	}
	return nil
}

// Text returns a string's value, "" for anything else.
func (n *Node) Text() string {
	if n == nil || n.kind != String {
		return ""
	}
	return n.value
}

// Locate returns the line of the field that a path such as
// "spec.ports[0].name" or "metadata.labels[a.b/c]" names, or of the nearest
// one around it.
func (n *Node) Locate(path string) int {
	line, _ := n.walk(path)
	return line
}

// At returns the value that a path such as Locate takes names, or nil.
func (n *Node) At(path string) *Node {
	_, found := n.walk(path)
	return found
}

var steps = regexp.MustCompile(`\[[^\]]*\]|[^.\[]+`)

// walk goes along path, and returns the line it comes to and, if that is the
// path's end, the value there.
func (n *Node) walk(path string) (line int, end *Node) {
	line = n.line
	for _, step := range steps.FindAllString(path, -1) {
		if n = n.Get(strings.Trim(step, "[]")); n == nil {
			return line, nil
		}
		line = n.keyLine
	}
	return line, n
}

// json appends n as JSON. It writes of equal keys both.
func (n *Node) json(b []byte) []byte {
	ends := "[]"
	switch n.kind {
	case Null:
		return append(b, "null"...)
	case Bool, Number:
		return append(b, n.value...)
	case String:
		return append(b, quote(n.value)...)
	case Mapping:
		ends = "{}"
	}
	b = append(b, ends[0])
	for i, item := range n.items {
		if i > 0 {
			b = append(b, ',')
		}
		if n.kind == Mapping {
			b = append(append(b, quote(item.key)...), ':')
		}
		b = item.json(b)
	}
	return append(b, ends[1])
}

func quote(s string) []byte {
	quoted, _ := json.Marshal(s) // no string is refused
	return quoted
}
