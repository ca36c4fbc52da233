package probe

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"
	"unicode"
	"unicode/utf8"

	"kproxy.dev/kproxy/health"
)

// localError is a failure to probe that says nothing about the endpoint.
type localError struct{ err error }

func (e *localError) Error() string { return e.err.Error() }
func (e *localError) Unwrap() error { return e.err }

// localErrnos are what a host says that has run out of something. A proxy at
// its limit must not conclude that its endpoints are down.
var localErrnos = []syscall.Errno{
	syscall.EMFILE, syscall.ENFILE, syscall.ENOBUFS, syscall.ENOMEM, syscall.EADDRNOTAVAIL,
}

// Inconclusive reports whether err, of a probe, says nothing about the endpoint.
func Inconclusive(err error) bool {
	var local *localError
	if errors.As(err, &local) || errors.Is(err, context.Canceled) {
		return true
	}
	return slices.ContainsFunc(localErrnos, func(e syscall.Errno) bool { return errors.Is(err, e) })
}

// maxReason bounds what an endpoint's own words take in status and log, in bytes.
const maxReason = 160

// clean makes err fit for a line of status output: what endpoints say of
// themselves may be long, and hold sequences that terminals obey.
func clean(err error) error {
	if err == nil {
		return nil
	}
	said := err.Error()
	text := strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return ' '
		}
		return r
	}, said[:min(len(said), maxReason+utf8.UTFMax)])
	if len(text) > maxReason {
		cut := maxReason
		for !utf8.RuneStart(text[cut]) {
			cut--
		}
		text = text[:cut] + "…"
	}
	if text == said {
		return err
	}
	return &failure{text, err}
}

// failure is a described error: one line for status output, the cause for code.
type failure struct {
	text  string
	cause error
}

func (f *failure) Error() string { return f.text }
func (f *failure) Unwrap() error { return f.cause }

// describe words err so that it is short and doesn't change from probe to
// probe: without addresses, which the reader knows, and above all without the
// probe's own port.
func describe(err error, timeout time.Duration) error {
	if err == nil {
		return nil
	}
	var local *localError
	if errors.As(err, &local) {
		return local
	}
	var worded *failure
	var op *net.OpError
	var call *os.SyscallError
	var timed interface{ Timeout() bool }
	switch {
	case errors.Is(err, context.Canceled), errors.Is(err, health.ErrSilent), errors.As(err, &worded):
		return err
	case errors.Is(err, context.DeadlineExceeded), errors.As(err, &timed) && timed.Timeout() && !errors.Is(err, syscall.ETIMEDOUT):
		return &failure{fmt.Sprintf("no answer within %s", timeout), err}
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return &failure{"connection closed without an answer", err}
	case errors.As(err, &call):
		return &failure{fmt.Sprintf("%s: %s", call.Syscall, call.Err), err}
	case errors.As(err, &op):
		return &failure{op.Err.Error(), err}
	}
	return err
}
