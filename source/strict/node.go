package strict

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Node is a value of a document, YAML or JSON, that knows its line. Aliases
// and merge keys are resolved.
type Node struct {
	kind   Kind
	line   int
	value  string  // of a scalar, in JSON's spelling (a string without its quotes)
	fields []field // of a mapping, in the order of the document; keys may repeat
	items  []*Node // of a sequence
}

type field struct {
	key   string
	line  int
	value *Node
}

// Kind says what sort of value a Node is.
type Kind uint8

// The kinds of values.
const (
	Null Kind = iota
	Bool
	Int
	Float
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

// At returns the value that a path such as Locate takes names, or nil.
func (n *Node) At(path string) *Node {
	_, found := n.walk(path)
	return found
}

// String returns n as JSON.
func (n *Node) String() string { return string(n.json(nil)) }

// Remove takes out the field that a path such as Locate takes names, every time
// it is there.
func (n *Node) Remove(path string) {
	parent, last := n, path
	if i := strings.LastIndex(path, "."); i >= 0 {
		last = path[i+1:]
		for step := range strings.SplitSeq(path[:i], ".") {
			parent = parent.Get(step)
		}
	}
	if parent != nil {
		parent.fields = slices.DeleteFunc(parent.fields, func(f field) bool { return f.key == last })
	}
}

// Describe names a value in an error message.
func (n *Node) Describe() string {
	switch n.kind {
	case Null:
		return "null"
	case Bool:
		return "the boolean " + n.value
	case Int, Float:
		return "the number " + n.value
	case String:
		return "the string " + strconv.Quote(Shorten(n.value))
	case Mapping:
		return "an object"
	default:
		return "a list"
	}
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
	if f := n.find(key); f != nil {
		return f.value
	}
	return nil
}

func (n *Node) find(key string) *field {
	if n == nil {
		return nil
	}
	for i := range n.fields {
		if n.fields[i].key == key {
			return &n.fields[i]
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

// walk goes along path, and returns the line it comes to and, if that is the
// path's end, the value there.
func (n *Node) walk(path string) (line int, end *Node) {
	line = n.line
	for path != "" {
		var step string
		step, path = nextStep(path)
		if n.kind == Sequence {
			i, err := strconv.Atoi(step)
			if err != nil || i < 0 || i >= len(n.items) {
				return line, nil
			}
			n = n.items[i]
			line = n.line
			continue
		}
		f := n.find(step)
		if f == nil {
			return line, nil
		}
		n, line = f.value, f.line
	}
	return line, n
}

// nextStep splits the first step off a path.
func nextStep(path string) (step, rest string) {
	if inside, ok := strings.CutPrefix(path, "["); ok {
		step, rest, _ = strings.Cut(inside, "]")
		return step, strings.TrimPrefix(rest, ".")
	}
	i := strings.IndexAny(path, ".[")
	if i < 0 {
		return path, ""
	}
	return path[:i], strings.TrimPrefix(path[i:], ".")
}

// json appends n as JSON. It writes of equal keys both.
func (n *Node) json(b []byte) []byte {
	switch n.kind {
	case Null:
		return append(b, "null"...)
	case Bool, Int, Float:
		return append(b, n.value...)
	case String:
		return appendString(b, n.value)
	case Sequence:
		b = append(b, '[')
		for i, item := range n.items {
			if i > 0 {
				b = append(b, ',')
			}
			b = item.json(b)
		}
		return append(b, ']')
	}
	b = append(b, '{')
	for i, f := range n.fields {
		if i > 0 {
			b = append(b, ',')
		}
		b = append(appendString(b, f.key), ':')
		b = f.value.json(b)
	}
	return append(b, '}')
}

// appendString quotes s for JSON. strconv.Quote won't do: it writes \x00 and
// \U0001f600, which JSON doesn't know.
func appendString(b []byte, s string) []byte {
	b = append(b, '"')
	for i := range len(s) {
		switch c := s[i]; {
		case c == '"' || c == '\\':
			b = append(b, '\\', c)
		case c < 0x20:
			b = fmt.Appendf(b, `\u%04x`, c)
		default:
			b = append(b, c)
		}
	}
	return append(b, '"')
}

// Limits of what one file may make its reader hold.
const (
	MaxFileSize = 16 << 20
	maxDepth    = 200
	maxNodes    = 4 << 20 // after aliases are resolved
)
