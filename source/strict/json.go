package strict

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"strconv"
	"strings"
)

// jsonDocuments parses data, any number of JSON values one after the other.
// JSON is nearly, but not quite, a subset of what the YAML parser takes: that
// one refuses escaped surrogate pairs, for example.
func jsonDocuments(data []byte) ([]*Node, error) {
	p := jsonParser{dec: json.NewDecoder(bytes.NewReader(data)), data: data, line: 1, left: maxNodes}
	p.dec.UseNumber()
	var docs []*Node
	for {
		n, err := p.value(0)
		if errors.Is(err, io.EOF) {
			return docs, nil
		}
		if err != nil {
			return docs, p.fail(err)
		}
		docs = append(docs, n)
	}
}

type jsonParser struct {
	dec    *json.Decoder
	data   []byte
	offset int // up to where lines are counted
	line   int // at offset
	left   int // nodes
}

// token returns the next token, which must come inside of a list or an object; p.line is
// the line it ends on, which is the line it begins on, since no token spans lines.
func (p *jsonParser) token(inside bool) (json.Token, error) {
	tok, err := p.dec.Token()
	p.countTo(int(p.dec.InputOffset()))
	if inside && errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	return tok, err
}

func (p *jsonParser) countTo(offset int) {
	offset = min(offset, len(p.data))
	if offset > p.offset {
		p.line += bytes.Count(p.data[p.offset:offset], []byte("\n"))
		p.offset = offset
	}
}

func (p *jsonParser) value(depth int) (*Node, error) {
	tok, err := p.token(depth > 0)
	if err != nil {
		return nil, err
	}
	if p.left--; p.left < 0 {
		return nil, errorAt(p.line, "more than %d values", maxNodes)
	}
	if depth > maxDepth {
		return nil, errorAt(p.line, "nested more than %d levels deep", maxDepth)
	}
	n := &Node{line: p.line}
	switch t := tok.(type) {
	case bool:
		n.kind, n.value = Bool, strconv.FormatBool(t)
	case json.Number:
		n.kind, n.value = Int, t.String()
		if strings.ContainsAny(n.value, ".eE") {
			n.kind = Float
		}
	case string:
		n.kind, n.value = String, t
	case json.Delim:
		if n.kind = Sequence; t == '{' {
			n.kind = Mapping
		}
		return n, p.inside(n, depth)
	}
	return n, nil
}

// inside reads what is in a list or an object, and its end.
func (p *jsonParser) inside(n *Node, depth int) error {
	for p.dec.More() {
		var f field
		if n.kind == Mapping {
			tok, err := p.token(true)
			if err != nil {
				return err
			}
			f.key, _ = tok.(string) // the decoder lets nothing else through
			f.line = p.line
		}
		v, err := p.value(depth + 1)
		if err != nil {
			return err
		}
		if f.value = v; n.kind == Mapping {
			n.fields = append(n.fields, f)
		} else {
			n.items = append(n.items, v)
		}
	}
	_, err := p.token(true)
	return err
}

// fail gives err its line.
func (p *jsonParser) fail(err error) error {
	var at *Error
	if errors.As(err, &at) {
		return at
	}
	var syntax *json.SyntaxError
	switch {
	case errors.As(err, &syntax):
		p.countTo(int(syntax.Offset) - 1)
	case errors.Is(err, io.ErrUnexpectedEOF):
		p.countTo(len(bytes.TrimRight(p.data, "\n")))
		return errorAt(p.line, "the file ends in the middle of a value")
	}
	return errorAt(p.line, "%s", err)
}
