package strict

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"syscall"
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

// Error is something wrong at a line.
type Error struct {
	Line int    // from 1
	Path string // of the field, "spec.ports[0].port"; empty where there is none
	What string
}

// Message returns what is wrong with which field, without the line.
func (e *Error) Message() string {
	if e.Path == "" {
		return e.What
	}
	return e.Path + ": " + e.What
}

// Error returns "line 3: spec.type: expected a string, found an object".
func (e *Error) Error() string { return fmt.Sprintf("line %d: %s", e.Line, e.Message()) }

func errorAt(line int, format string, args ...any) *Error {
	return &Error{Line: line, What: fmt.Sprintf(format, args...)}
}

// Read returns the content of a file of at most MaxFileSize bytes. It
// reads regular files only: opening a pipe or a device may wait for ever.
func Read(name string) ([]byte, error) {
	f, err := os.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, errors.New("not a regular file")
	}
	data, err := io.ReadAll(io.LimitReader(f, MaxFileSize+1))
	if err != nil {
		return nil, err
	}
	if len(data) > MaxFileSize {
		return nil, fmt.Errorf("larger than the %d MiB that a file may have: split it into several files", MaxFileSize>>20)
	}
	return data, nil
}
