package main

import (
	"errors"
	"fmt"
	"os"
	"slices"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/config"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/source/kube"
)

// Exit statuses of every command.
const (
	exitFailed = 1 // failed while running
	exitUsage  = 2 // wrong usage, configuration or manifests
	exitHost   = 3 // this host lacks something
)

// exitError carries the exit status of a command's error.
type exitError struct {
	status int
	err    error
}

func (e *exitError) Error() string { return e.err.Error() }
func (e *exitError) Unwrap() error { return e.err }

// usageError marks what the user can mend on the command line or in a file.
func usageError(format string, args ...any) error {
	return &exitError{exitUsage, fmt.Errorf(format, args...)}
}

// flagError is about what a flag names: wrong usage, unless the host is at its limits.
func flagError(flag string, err error) error {
	if isAny(err, unix.ENOSPC, unix.EDQUOT, unix.EROFS, unix.EIO, unix.EMFILE, unix.ENFILE, unix.ENOMEM, unix.ENOLCK) {
		return fmt.Errorf("--%s: %w", flag, err)
	}
	return usageError("--%s: %w", flag, err)
}

// isAny reports whether err is one of several.
func isAny(err error, targets ...error) bool {
	return slices.ContainsFunc(targets, func(target error) bool { return errors.Is(err, target) })
}

// statusOf returns the exit status for err.
func statusOf(err error) int {
	if err == nil {
		return 0
	}
	if e, ok := errors.AsType[*exitError](err); ok {
		return e.status
	}
	return exitFailed
}

// hostError gives errors about what this host, or this version, lacks their
// exit status.
func hostError(err error) error {
	var missing *kernel.Missing
	var access *kube.ConfigError
	var setting *config.Problem
	switch {
	case errors.As(err, &missing), errors.Is(err, unix.EADDRINUSE):
		return &exitError{exitHost, err}
	case errors.Is(err, os.ErrPermission) && os.Geteuid() != 0:
		return &exitError{exitHost, fmt.Errorf("%w; run kproxy as root", err)}
	case errors.Is(err, os.ErrPermission):
		return &exitError{exitHost, err}
	case errors.As(err, &access), errors.As(err, &setting):
		return &exitError{exitUsage, err}
	}
	return err
}
