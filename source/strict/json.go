package strict

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"go.yaml.in/yaml/v3"
)

// jsonReader returns a function that reads the next JSON value into the nodes
// that YAML is read into, nil after the last. The YAML parser itself doesn't take all of
// JSON: it refuses \/ and surrogate pairs, a tab before the first brace, a colon that isn't
// beside its key and keys of more than 1024 characters, and takes 1e400 for a string.
func jsonReader(data []byte) func() (*yaml.Node, error) {
	p := jsonParser{dec: json.NewDecoder(bytes.NewReader(data)), data: data, line: 1}
	p.dec.UseNumber()
	return func() (*yaml.Node, error) {
		if len(bytes.TrimLeft(data[p.dec.InputOffset():], " \t\r\n")) == 0 {
			return nil, nil
		}
		return p.node(0)
	}
}

type jsonParser struct {
	limits
	dec     *json.Decoder
	data    []byte
	counted int // up to where lines are
	line    int // there
}

// token returns the next token, which must come. It ends on p.line, and begins there, since
// no token spans lines.
func (p *jsonParser) token() (json.Token, error) {
	tok, err := p.dec.Token()
	to := int(p.dec.InputOffset())
	p.line += bytes.Count(p.data[p.counted:to], []byte("\n"))
	p.counted = to
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return nil, errorAt(p.line, "the file ends in the middle of a value")
	} else if err != nil {
		return nil, errorAt(p.line, "%s", err)
	}
	return tok, nil
}

// node reads a value, or the key of one.
func (p *jsonParser) node(depth int) (*yaml.Node, error) {
	tok, err := p.token()
	if err != nil {
		return nil, err
	}
	if err := p.spend(p.line, depth); err != nil {
		return nil, err
	}
	y := &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!null", Value: fmt.Sprint(tok), Line: p.line}
	switch t := tok.(type) {
	case string:
		y.Tag = "!!str"
	case json.Number:
		y.Tag = "!!float"
	case bool:
		y.Tag = "!!bool"
	case json.Delim:
		if y.Kind = yaml.SequenceNode; t == '{' {
			y.Kind = yaml.MappingNode
		}
		for p.dec.More() {
			item, err := p.node(depth + 1)
			if err != nil {
				return nil, err
			}
			y.Content = append(y.Content, item)
		}
		_, err = p.token()
	}
	return y, err
}
