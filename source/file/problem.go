package file

import "fmt"

// Problem is something wrong with a manifest.
type Problem struct {
	File    string
	Line    int // from 1; 0 for the file as a whole
	Message string
}

// String returns "file:line: message", or "file: message" without a line.
func (p Problem) String() string {
	if p.Line == 0 {
		return fmt.Sprintf("%s: %s", p.File, p.Message)
	}
	return fmt.Sprintf("%s:%d: %s", p.File, p.Line, p.Message)
}
