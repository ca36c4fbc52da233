package strict

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
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
		tok, err := p.token()
		if errors.Is(err, io.EOF) {
			return docs, nil
		}
		if err != nil {
			return docs, p.fail(err)
		}
		n, err := p.value(tok, 0)
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

// token returns the next token; p.line is the line it ends on, which is the
// line it begins on, since no token spans lines.
func (p *jsonParser) token() (json.Token, error) {
	tok, err := p.dec.Token()
	p.countTo(int(p.dec.InputOffset()))
	return tok, err
}

func (p *jsonParser) countTo(offset int) {
	offset = min(offset, len(p.data))
	if offset > p.offset {
		p.line += bytes.Count(p.data[p.offset:offset], []byte("\n"))
		p.offset = offset
	}
}

func (p *jsonParser) value(tok json.Token, depth int) (*Node, error) {
	if p.left--; p.left < 0 {
		return nil, errorAt(p.line, "more than %d values", maxNodes)
	}
	if depth > maxDepth {
		return nil, errorAt(p.line, "nested more than %d levels deep", maxDepth)
	}
	n := &Node{line: p.line}
	switch t := tok.(type) {
	case bool:
		n.kind, n.value = Bool, map[bool]string{false: "false", true: "true"}[t]
	case json.Number:
		n.kind, n.value = Int, t.String()
		if strings.ContainsAny(n.value, ".eE") {
			n.kind = Float
		}
	case string:
		n.kind, n.value = String, t
	case json.Delim:
		if t == '[' {
			n.kind = Sequence
			return n, p.list(n, depth)
		}
		n.kind = Mapping
		return n, p.object(n, depth)
	}
	return n, nil
}

func (p *jsonParser) list(n *Node, depth int) error {
	for {
		tok, err := p.inside()
		if err != nil || tok == json.Delim(']') {
			return err
		}
		v, err := p.value(tok, depth+1)
		if err != nil {
			return err
		}
		n.items = append(n.items, v)
	}
}

func (p *jsonParser) object(n *Node, depth int) error {
	for {
		tok, err := p.inside()
		if err != nil || tok == json.Delim('}') {
			return err
		}
		f := field{line: p.line}
		f.key, _ = tok.(string) // the decoder lets nothing else through
		if tok, err = p.inside(); err != nil {
			return err
		}
		if f.value, err = p.value(tok, depth+1); err != nil {
			return err
		}
		n.fields = append(n.fields, f)
	}
}

// inside returns the next token of a list or an object, whose end must come.
func (p *jsonParser) inside() (json.Token, error) {
	tok, err := p.token()
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	return tok, err
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
