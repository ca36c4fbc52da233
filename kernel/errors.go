package kernel

import (
	"errors"
	"fmt"
	"strings"
)

// What can go wrong at the kernel's boundary, classified once where it happens.
// Callers use [errors.Is] and never look at a program's messages.
var (
	ErrNotFound   = errors.New("not found")
	ErrLocked     = errors.New("another program holds the xtables lock")
	ErrPermission = errors.New("permission denied")
	ErrSyntax     = errors.New("rejected")
	ErrBusy       = errors.New("still referenced")
	ErrNoProgram  = errors.New("program not installed")
)

// Missing says that this host lacks something kproxy can't do without. The
// agent ends with exit status 3.
type Missing struct {
	What string // "iptables", "CAP_NET_ADMIN"
	How  string // how to get it
	Err  error  // what the probe met; may be nil
}

func (m *Missing) Error() string {
	s := "this host lacks " + m.What
	if m.Err != nil {
		s += fmt.Sprintf(" (%v)", m.Err)
	}
	if m.How != "" {
		s += ": " + m.How
	}
	return s
}

func (m *Missing) Unwrap() error { return m.Err }

// NoPermission says that this process lacks the right to program the kernel.
func NoPermission(err error) error {
	return &Missing{What: "permission", How: "run kproxy as root, or give it CAP_NET_ADMIN and CAP_NET_RAW", Err: err}
}

// ExecError is a program that failed.
type ExecError struct {
	Program string
	Args    []string
	Status  int    // exit status, -1 if it never ran
	Stderr  string // trimmed
	Line    int    // of the input that was refused, from 1; 0 if unknown
	Kind    error  // one of the sentinels, or nil
}

func (e *ExecError) Error() string {
	s := fmt.Sprintf("run %s %s: exit status %d", e.Program, strings.Join(e.Args, " "), e.Status)
	if e.Line > 0 {
		s += fmt.Sprintf(" at line %d", e.Line)
	}
	if e.Stderr != "" {
		s += ": " + e.Stderr
	}
	return s
}

func (e *ExecError) Unwrap() error { return e.Kind }
