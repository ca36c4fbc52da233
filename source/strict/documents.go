package strict

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

// Documents parses the content of the file named name: JSON if the name ends
// so, else YAML, of which JSON is a part. The documents before an error are
// returned with it; an error that has a line is an [*Error].
func Documents(name string, data []byte) (docs []*Node, err error) {
	data = bytes.TrimPrefix(data, []byte("\uFEFF"))
	// The YAML parser finds bytes that no text has too, but doesn't say where.
	text := bytes.ToValidUTF8(data, []byte{0})
	if i := bytes.IndexFunc(text, func(r rune) bool { return r < ' ' && !strings.ContainsRune("\t\n\r", r) || r == 0x7f }); i >= 0 {
		return nil, errorAt(1+bytes.Count(text[:i], []byte("\n")), "the file is not text in UTF-8")
	}
	next := yamlReader(data)
	if filepath.Ext(name) == ".json" {
		next = jsonReader(data)
	}
	var l limits
	for {
		y, err := next()
		if y == nil || err != nil {
			return docs, err
		}
		n, err := l.convert(y, 0)
		if err != nil {
			return docs, err
		}
		docs = append(docs, n)
	}
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

// MaxFileSize is how many bytes a file may have.
const MaxFileSize = 16 << 20

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

// Cause returns err without the operation and the path, for messages that name the file.
func Cause(err error) error {
	if p, ok := errors.AsType[*fs.PathError](err); ok {
		return p.Err
	}
	return err
}
