package strict

import (
	"bytes"
	"errors"
	"path/filepath"
	"unicode/utf8"

	kjson "sigs.k8s.io/json"
)

// Documents parses the content of the file named name: JSON if the name ends
// so, else YAML, of which JSON is a part. The documents before an error are
// returned with it; an error that has a line is an [*Error].
func Documents(name string, data []byte) ([]*Node, error) {
	data = bytes.TrimPrefix(data, []byte("\uFEFF"))
	if line := badByte(data); line > 0 {
		return nil, errorAt(line, "the file is not text in UTF-8")
	}
	if filepath.Ext(name) == ".json" {
		return jsonDocuments(data)
	}
	return yamlDocuments(data)
}

// badByte returns the line of the first byte that no text has, 0 if there is
// none. The YAML parser finds them too, but doesn't say where.
func badByte(data []byte) int {
	for i := 0; i < len(data); {
		r, size := utf8.DecodeRune(data[i:])
		if r == utf8.RuneError && size == 1 || r < ' ' && r != '\t' && r != '\n' && r != '\r' || r == 0x7f {
			return 1 + bytes.Count(data[:i], []byte("\n"))
		}
		i += size
	}
	return 0
}

// Decode fills into from a tree that has passed [Check]. Kubernetes' own decoder
// has the last word; what it refuses beyond that has no line of its own.
func (n *Node) Decode(into any) error {
	strict, err := kjson.UnmarshalStrict(n.json(nil), into)
	return errors.Join(append(strict, err)...)
}
