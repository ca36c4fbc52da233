package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"

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

// terminalWidth is how many columns the terminal has that w is; 0 if it is none.
func terminalWidth(w io.Writer) int {
	if plain, ok := w.(*plainWriter); ok {
		w = plain.to
	}
	f, ok := w.(*os.File)
	if !ok {
		return 0
	}
	width, _, _ := term.GetSize(int(f.Fd())) // fails where it is none
	return max(width, 0)
}
