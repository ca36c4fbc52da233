package file

import (
	"fmt"
	"strconv"
	"strings"
)

// node is a value of a document, YAML or JSON, that knows its line. Aliases
// and merge keys are resolved.
type node struct {
	kind   kind
	line   int
	value  string  // of a scalar, in JSON's spelling (a string without its quotes)
	fields []field // of a mapping, in the order of the document; keys may repeat
	items  []*node // of a sequence
}

type field struct {
	key   string
	line  int
	value *node
}

type kind uint8

const (
	kindNull kind = iota
	kindBool
	kindInt
	kindFloat
	kindString
	kindMapping
	kindSequence
)

// describe names a value in an error message.
func (n *node) describe() string {
	switch n.kind {
	case kindNull:
		return "null"
	case kindBool:
		return "the boolean " + n.value
	case kindInt, kindFloat:
		return "the number " + n.value
	case kindString:
		return "the string " + strconv.Quote(shorten(n.value))
	case kindMapping:
		return "an object"
	default:
		return "a list"
	}
}

// shorten keeps a value readable in a line of log.
func shorten(s string) string {
	const most = 60
	if len(s) <= most {
		return s
	}
	return strings.ToValidUTF8(s[:most], "") + "…"
}

// get returns the value of the first field named key, or nil.
func (n *node) get(key string) *node {
	if f := n.find(key); f != nil {
		return f.value
	}
	return nil
}

func (n *node) find(key string) *field {
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

// text returns a string's value, "" for anything else.
func (n *node) text() string {
	if n == nil || n.kind != kindString {
		return ""
	}
	return n.value
}

// locate returns the line of the field that a path such as
// "spec.ports[0].name" or "metadata.labels[a.b/c]" names, or of the nearest
// one around it.
func (n *node) locate(path string) int {
	line := n.line
	for path != "" {
		var step string
		step, path = nextStep(path)
		if n.kind == kindSequence {
			i, err := strconv.Atoi(step)
			if err != nil || i < 0 || i >= len(n.items) {
				return line
			}
			n = n.items[i]
			line = n.line
			continue
		}
		f := n.find(step)
		if f == nil {
			return line
		}
		n, line = f.value, f.line
	}
	return line
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
func (n *node) json(b []byte) []byte {
	switch n.kind {
	case kindNull:
		return append(b, "null"...)
	case kindBool, kindInt, kindFloat:
		return append(b, n.value...)
	case kindString:
		return appendString(b, n.value)
	case kindSequence:
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

// limits bound what one file may make kproxy hold.
const (
	maxFileSize = 16 << 20
	maxDepth    = 200
	maxNodes    = 4 << 20 // after aliases are resolved
)

// lineError is an error at a line.
type lineError struct {
	line int
	what string
}

func (e *lineError) Error() string { return fmt.Sprintf("line %d: %s", e.line, e.what) }

func errorAt(line int, format string, args ...any) *lineError {
	return &lineError{line: line, what: fmt.Sprintf(format, args...)}
}
