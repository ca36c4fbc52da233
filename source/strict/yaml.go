package strict

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// yamlReader returns a function that returns the next document, nil after the
// last. After a syntax error no later document can be told apart.
func yamlReader(data []byte) func() (*yaml.Node, error) {
	dec := yaml.NewDecoder(bytes.NewReader(data))
	return func() (*yaml.Node, error) {
		var y yaml.Node
		if err := dec.Decode(&y); errors.Is(err, io.EOF) {
			return nil, nil
		} else if err != nil {
			return nil, yamlSyntaxError(data, err)
		}
		return y.Content[0], nil
	}
}

var lineBreak = regexp.MustCompile("\r\n|[\n\r\u0085\u2028\u2029]") // YAML's

// yamlSyntaxError takes err apart. The parser gives its errors as text only.
// Its line is one too low where the grammar failed ("did not find expected …")
// and right where the scanner did, and it gives none for the first line.
func yamlSyntaxError(data []byte, err error) error {
	line, what := 1, strings.TrimPrefix(err.Error(), "yaml: ")
	if _, err := fmt.Sscanf(what, "line %d:", &line); err == nil {
		_, what, _ = strings.Cut(what, ": ")
		if strings.HasPrefix(what, "did not find expected") {
			line++
		}
	} else if name, ok := strings.CutPrefix(what, "unknown anchor '"); ok {
		name, _, _ = strings.Cut(name, "'")
		before, _, _ := bytes.Cut(data, []byte("*"+name))
		line, what = 1+bytes.Count(before, []byte("\n")), "alias *"+name+" stands for nothing"
	}
	// Where the end of the file was not expected, that is a line too far.
	return errorAt(min(line, 1+len(lineBreak.FindAllIndex(bytes.TrimRight(data, "\r\n"), -1))), "%s", what)
}

// limits bound what one file may make its reader hold. It is how many nodes there are so far.
type limits int

const (
	maxDepth = 200
	maxNodes = 4 << 20 // few aliases can stand for very many of them
)

// spend takes account of one more node.
func (l *limits) spend(line, depth int) error {
	switch *l++; {
	case depth > maxDepth:
		return errorAt(line, "nested more than %d levels deep", maxDepth)
	case *l > maxNodes:
		return errorAt(line, "more than %d values, counting every use of an alias", maxNodes)
	}
	return nil
}

// convert turns a yaml.Node into a Node.
func (l *limits) convert(y *yaml.Node, depth int) (*Node, error) {
	if err := l.spend(y.Line, depth); err != nil {
		return nil, err
	}
	n, step := &Node{line: y.Line, kind: Sequence}, 1
	switch y.Kind {
	case yaml.AliasNode:
		y.Kind = 0 // while it is open
		n, err := l.convert(y.Alias, depth+1)
		y.Kind = yaml.AliasNode
		return n, err
	case 0:
		return nil, errorAt(y.Line, "alias *%s stands inside of what it stands for", y.Value)
	case yaml.ScalarNode:
		return n, n.scalar(y)
	case yaml.MappingNode:
		n.kind, step = Mapping, 2
	}
	n.items = make([]*Node, 0, len(y.Content)/step)
	var merged []*Node
	for i := 0; i < len(y.Content); i += step {
		v, err := l.convert(y.Content[i+step-1], depth+1)
		if err != nil {
			return nil, err
		}
		v.key, v.keyLine = strconv.Itoa(i), v.line
		if n.kind == Mapping {
			k := y.Content[i]
			v.keyLine = k.Line
			if k.Kind == yaml.AliasNode {
				k = k.Alias
			} else if k.ShortTag() == "!!merge" {
				merged = append(merged, v)
				continue
			}
			if v.key = k.Value; k.Kind != yaml.ScalarNode || k.ShortTag() == "!!null" {
				return nil, errorAt(v.keyLine, "a key has to be a string")
			}
		}
		n.items = append(n.items, v)
	}
	return n, n.merge(merged)
}

// merge adds fields that n doesn't have, as "<<" asks for.
func (n *Node) merge(from []*Node) error {
	for _, m := range from {
		maps := []*Node{m}
		if m.kind == Sequence {
			maps = m.items
		}
		for _, m := range maps {
			if m.kind != Mapping {
				return errorAt(m.line, "<< merges objects, found %s", m.Describe())
			}
			for _, f := range m.items {
				if n.Get(f.key) == nil {
					n.items = append(n.items, f)
				}
			}
		}
	}
	return nil
}

// scalar gives n the value of y. A number keeps its spelling if that is JSON's.
func (n *Node) scalar(y *yaml.Node) error {
	switch tag := y.ShortTag(); tag {
	case "!!null":
		n.kind = Null
		return nil
	case "!!str", "!!timestamp": // Kubernetes has no date type; its times are strings
		n.kind, n.value = String, y.Value
		return nil
	case "!!bool":
		n.kind = Bool
	case "!!int", "!!float":
		n.kind = Number
	default:
		return errorAt(y.Line, "tag %s has no meaning here", tag)
	}
	var v any
	err := y.Decode(&v)
	if n.value = fmt.Sprint(v); json.Valid([]byte(y.Value)) {
		n.value = y.Value
	} else if _, float := v.(float64); float && !strings.ContainsAny(n.value, ".e") {
		n.value += ".0" // or it would be a whole number
	}
	if err != nil || !json.Valid([]byte(n.value)) {
		return errorAt(y.Line, "%q is not a boolean or a number that JSON could hold", Shorten(y.Value))
	}
	return nil
}
