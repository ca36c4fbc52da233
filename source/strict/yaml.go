package strict

import (
	"bytes"
	"errors"
	"io"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// yamlDocuments parses data. After a syntax error no later document can be
// told apart, so there is at most one, besides the documents before it.
func yamlDocuments(data []byte) ([]*Node, error) {
	dec := yaml.NewDecoder(bytes.NewReader(data))
	c := yamlConverter{left: maxNodes}
	var docs []*Node
	for {
		var y yaml.Node
		err := dec.Decode(&y)
		if errors.Is(err, io.EOF) {
			return docs, nil
		}
		if err != nil {
			return docs, yamlSyntaxError(data, err)
		}
		n, err := c.convert(&y, 0)
		if err != nil {
			return docs, err
		}
		docs = append(docs, n)
	}
}

// yamlConverter turns yaml.Nodes into nodes. Nodes are counted, because few
// aliases can stand for very many of them.
type yamlConverter struct {
	left int
	open []*yaml.Node // anchors being converted, to find one that contains itself
}

func (c *yamlConverter) convert(y *yaml.Node, depth int) (*Node, error) {
	if c.left--; c.left < 0 {
		return nil, errorAt(y.Line, "more than %d values, counting every use of an alias", maxNodes)
	}
	if depth > maxDepth {
		return nil, errorAt(y.Line, "nested more than %d levels deep", maxDepth)
	}
	switch y.Kind {
	case yaml.DocumentNode:
		if len(y.Content) == 0 {
			return &Node{line: y.Line}, nil
		}
		return c.convert(y.Content[0], depth)
	case yaml.AliasNode:
		if slices.Contains(c.open, y.Alias) {
			return nil, errorAt(y.Line, "alias *%s stands inside of what it stands for", y.Value)
		}
		c.open = append(c.open, y.Alias)
		n, err := c.convert(y.Alias, depth+1)
		c.open = c.open[:len(c.open)-1]
		return n, err
	case yaml.ScalarNode:
		return scalar(y)
	case yaml.SequenceNode:
		n := &Node{kind: Sequence, line: y.Line, items: make([]*Node, 0, len(y.Content))}
		for _, item := range y.Content {
			v, err := c.convert(item, depth+1)
			if err != nil {
				return nil, err
			}
			n.items = append(n.items, v)
		}
		return n, nil
	case yaml.MappingNode:
		return c.mapping(y, depth)
	}
	return &Node{line: y.Line}, nil
}

func (c *yamlConverter) mapping(y *yaml.Node, depth int) (*Node, error) {
	n := &Node{kind: Mapping, line: y.Line, fields: make([]field, 0, len(y.Content)/2)}
	var merged []*Node
	for i := 0; i+1 < len(y.Content); i += 2 {
		k := y.Content[i]
		v, err := c.convert(y.Content[i+1], depth+1)
		if err != nil {
			return nil, err
		}
		if k.Kind == yaml.ScalarNode && k.ShortTag() == "!!merge" {
			merged = append(merged, v)
			continue
		}
		for k.Kind == yaml.AliasNode {
			k = k.Alias
		}
		if k.Kind != yaml.ScalarNode || k.ShortTag() == "!!null" {
			return nil, errorAt(y.Content[i].Line, "a key has to be a string")
		}
		n.fields = append(n.fields, field{key: k.Value, line: y.Content[i].Line, value: v})
	}
	for _, m := range merged {
		if err := n.merge(m); err != nil {
			return nil, err
		}
	}
	return n, nil
}

// merge adds the fields of m that n doesn't have, as "<<" asks for.
func (n *Node) merge(m *Node) error {
	switch m.kind {
	case Mapping:
		for _, f := range m.fields {
			if n.find(f.key) == nil {
				n.fields = append(n.fields, f)
			}
		}
		return nil
	case Sequence:
		for _, item := range m.items {
			if item.kind != Mapping {
				return errorAt(item.line, "<< merges objects, found %s", item.Describe())
			}
			if err := n.merge(item); err != nil {
				return err
			}
		}
		return nil
	}
	return errorAt(m.line, "<< merges objects, found %s", m.Describe())
}

func scalar(y *yaml.Node) (*Node, error) {
	n := &Node{line: y.Line, value: y.Value}
	switch tag := y.ShortTag(); tag {
	case "!!null":
		n.value = ""
	case "!!str", "!!timestamp": // Kubernetes has no date type; its times are strings
		n.kind = String
	case "!!bool":
		var b bool
		if err := y.Decode(&b); err != nil {
			return nil, errorAt(y.Line, "%q is not a boolean", Shorten(y.Value))
		}
		n.kind, n.value = Bool, strconv.FormatBool(b)
	case "!!int":
		n.kind = Int
		var i int64
		var u uint64
		if err := y.Decode(&i); err == nil {
			n.value = strconv.FormatInt(i, 10)
		} else if err := y.Decode(&u); err == nil {
			n.value = strconv.FormatUint(u, 10)
		} else {
			return nil, errorAt(y.Line, "%q is not a whole number of 64 bits", Shorten(y.Value))
		}
	case "!!float":
		var f float64
		if err := y.Decode(&f); err != nil || math.IsInf(f, 0) || math.IsNaN(f) {
			return nil, errorAt(y.Line, "%q is not a number that JSON could hold", Shorten(y.Value))
		}
		n.kind, n.value = Float, strconv.FormatFloat(f, 'g', -1, 64)
		if !strings.ContainsAny(n.value, ".e") {
			n.value += ".0" // or a message would call it a whole number
		}
	default:
		return nil, errorAt(y.Line, "tag %s has no meaning here", tag)
	}
	return n, nil
}

// yamlLine finds the line in an error of the YAML parser.
var yamlLine = regexp.MustCompile(`^(?:yaml: )?line (\d+): (?s:(.*))$`)

// yamlSyntaxError takes err apart. The parser gives its errors as text only.
// Its line is one too low where the grammar failed ("did not find expected …")
// and right where the scanner did, and it gives none for the first line.
func yamlSyntaxError(data []byte, err error) error {
	what := strings.TrimPrefix(err.Error(), "yaml: ")
	m := yamlLine.FindStringSubmatch(what)
	if m == nil {
		if name, ok := strings.CutPrefix(what, "unknown anchor '"); ok {
			name, _, _ = strings.Cut(name, "'")
			return errorAt(lineOf(data, "*"+name), "alias *%s stands for nothing", name)
		}
		return errorAt(1, "%s", what)
	}
	line, _ := strconv.Atoi(m[1])
	if strings.HasPrefix(m[2], "did not find expected") {
		line++
	}
	// Where the end of the file was not expected, that is a line too far.
	return errorAt(min(line, lineCount(data)), "%s", m[2])
}

// lineCount returns the number of the last line, counted as YAML does.
func lineCount(data []byte) int {
	n, before := 1, rune(0)
	for _, r := range string(bytes.TrimRight(data, "\r\n")) {
		if strings.ContainsRune("\n\r\u0085\u2028\u2029", r) && (before != '\r' || r != '\n') {
			n++
		}
		before = r
	}
	return n
}

// lineOf returns the line of the first occurrence of s, 1 if there is none.
func lineOf(data []byte, s string) int {
	i := max(0, bytes.Index(data, []byte(s)))
	return 1 + bytes.Count(data[:i], []byte("\n"))
}
