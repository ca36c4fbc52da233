package strict

import "fmt"

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
