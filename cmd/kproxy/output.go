package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"regexp"
	"strings"
	"unicode/utf8"

	"github.com/urfave/cli/v2"
	"golang.org/x/term"
	"sigs.k8s.io/yaml"
)

// outputFlag lets a command print in the given formats, of which the first is
// the usual one.
func outputFlag(formats ...string) cli.Flag {
	return choiceFlag(&cli.StringFlag{
		Name: "output", Aliases: []string{"o"}, Usage: "`FORMAT`: " + strings.Join(formats, ", "), Value: formats[0],
	}, formats...)
}

// isForPrograms reports whether format is one that printValue knows.
func isForPrograms(format string) bool { return format == "json" || format == "yaml" }

// printer prints answers as --output asks: for programs, or as human does.
func printer[T any](c *cli.Context, human func(io.Writer, T) error) func(io.Writer, T) error {
	format := c.String("output")
	if !isForPrograms(format) {
		return human
	}
	return func(w io.Writer, v T) error { return printValue(w, format, v) }
}

// printValue prints v as JSON or as YAML of the same names. A YAML document begins
// with its mark, so that what --watch prints is a stream of them.
func printValue(w io.Writer, format string, v any) error {
	if format == "yaml" {
		text, err := yaml.Marshal(v)
		if err != nil {
			return fmt.Errorf("print as YAML: %w", err)
		}
		_, err = fmt.Fprintf(w, "---\n%s", text)
		return err
	}
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(v)
}

// plainWriter keeps what others name (files, rules, objects of the API, nodes) from commanding the terminal: it writes control characters
// but ends of lines and tabs as JSON does, \u001b. Colours pass while trace colours what this node says.
type plainWriter struct {
	to      *os.File
	own     bool // only this node's own kproxy says what is written
	colours bool
}

var controls = regexp.MustCompile(`\x1b\[(?:[0-9;]*)m|[\x00-\x08\x0b-\x1f\x7f-\x{9f}]`)

// Write writes p, which begins and ends between characters.
func (w *plainWriter) Write(p []byte) (int, error) {
	plain := controls.ReplaceAllFunc(p, func(c []byte) []byte {
		if len(c) > 2 && w.colours {
			return c
		}
		r, size := utf8.DecodeRune(c)
		return fmt.Appendf(nil, "\\u%04x%s", r, c[size:])
	})
	if _, err := w.to.Write(plain); err != nil {
		return 0, err
	}
	return len(p), nil
}

// fileOf returns the file that w writes to; nil if it is none.
func fileOf(w io.Writer) *os.File {
	if plain, ok := w.(*plainWriter); ok {
		return plain.to
	}
	f, _ := w.(*os.File)
	return f
}

// terminalWidth returns how many columns the terminal w has; 0 if w is no terminal.
func terminalWidth(w io.Writer) int {
	f := fileOf(w)
	if f == nil {
		return 0
	}
	width, _, _ := term.GetSize(int(f.Fd())) // fails where it is none
	return max(width, 0)
}
