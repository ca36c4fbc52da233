package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// mutant is one decision of the product, broken.
type mutant struct {
	file, what string // the file, and what it does wrong then
	pkg, test  string // which test has to fail: "./plan", "TestX"
	old, new   string
	broken     []byte // the file with it
}

// matches reports whether one of the words is in m's file or sentence; none is everything.
func (m *mutant) matches(words []string) bool {
	for _, w := range words {
		if strings.Contains(m.file+" "+m.what, w) {
			return true
		}
	}
	return len(words) == 0
}

// read reads a list, and breaks the files that it names, which are below root. A mutant is a paragraph:
//
//	FILE: what it does wrong
//	- text that is there once
//	+ text in its place
//	PACKAGE TEST
//
// Several lines of a sort are one text. Lines with # are comments.
func read(root, list string) ([]*mutant, error) {
	text, err := os.ReadFile(filepath.Join(root, list))
	if err != nil {
		return nil, err
	}
	var out []*mutant
	for _, part := range strings.Split(string(text), "\n\n") {
		m, err := parse(part)
		if err == nil && m != nil {
			err = m.apply(root)
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %q: %w", list, part, err)
		}
		if m != nil {
			out = append(out, m)
		}
	}
	return out, nil
}

// parse returns the mutant of a paragraph; nil if it is comments only.
func parse(part string) (*mutant, error) {
	var m mutant
	var old, new []string
	for line := range strings.Lines(part) {
		line = strings.TrimSuffix(line, "\n")
		switch {
		case line == "", strings.HasPrefix(line, "#"):
		case strings.HasPrefix(line, "- "):
			old = append(old, line[2:])
		case strings.HasPrefix(line, "+ "):
			new = append(new, line[2:])
		case m.file == "":
			m.file, m.what, _ = strings.Cut(line, ": ")
		case m.pkg == "":
			m.pkg, m.test, _ = strings.Cut(line, " ")
		default:
			return nil, fmt.Errorf("%q is one line too many", line)
		}
	}
	m.old, m.new = strings.Join(old, "\n"), strings.Join(new, "\n")
	switch {
	case m.file == "" && len(old)+len(new) == 0:
		return nil, nil
	case m.what == "" || m.old == "" || m.test == "":
		return nil, fmt.Errorf("it needs FILE: SENTENCE, what is there, and PACKAGE TEST")
	case m.old == m.new:
		return nil, fmt.Errorf("it changes nothing")
	}
	return &m, nil
}

// apply breaks m's file.
func (m *mutant) apply(root string) error {
	text, err := os.ReadFile(filepath.Join(root, m.file))
	if err != nil {
		return err
	}
	if n := strings.Count(string(text), m.old); n != 1 {
		return fmt.Errorf("%s has the text %d times, not once: the mutant has to follow the code", m.file, n)
	}
	m.broken = []byte(strings.Replace(string(text), m.old, m.new, 1))
	return nil
}
