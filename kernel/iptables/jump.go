package iptables

import (
	"context"
	"errors"
	"fmt"

	goiptables "github.com/coreos/go-iptables/iptables"
	"github.com/hashicorp/go-multierror"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/service"
)

// Jumper changes single rules of built-in chains. *iptables.IPTables of
// coreos/go-iptables is one.
type Jumper interface {
	Exists(table, chain string, rulespec ...string) (bool, error)
	Insert(table, chain string, pos int, rulespec ...string) error
	Append(table, chain string, rulespec ...string) error
	Delete(table, chain string, rulespec ...string) error
}

// applyJumps adds what is missing, then deletes what isn't wanted.
func (b *Backend) applyJumps(ctx context.Context, f service.Family, add, del []kernel.Jump) error {
	if len(add)+len(del) == 0 {
		return nil
	}
	if b.jumps[f] == nil {
		j, err := b.config.Jumper(f)
		if err != nil {
			return fmt.Errorf("open %s built-in chains: %w", f, err)
		}
		b.jumps[f] = j
	}
	var errs *multierror.Error
	for _, j := range add {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := addJump(b.jumps[f], j); err != nil {
			errs = multierror.Append(errs, fmt.Errorf("add jump to %s %s %s: %w", f, j.Table, j.From, classifyJump(err)))
		}
	}
	for _, j := range del {
		if err := ctx.Err(); err != nil {
			return err
		}
		err := classifyJump(b.jumps[f].Delete(j.Table, j.From, kernel.Words(j.Rule)...))
		if err != nil && !errors.Is(err, kernel.ErrNotFound) {
			errs = multierror.Append(errs, fmt.Errorf("delete jump from %s %s %s: %w", f, j.Table, j.From, err))
		}
	}
	return errs.ErrorOrNil()
}

func addJump(to Jumper, j kernel.Jump) error {
	spec := kernel.Words(j.Rule)
	switch present, err := to.Exists(j.Table, j.From, spec...); {
	case err != nil || present:
		return err
	case j.Last:
		return to.Append(j.Table, j.From, spec...)
	}
	return to.Insert(j.Table, j.From, 1, spec...)
}

// classifyJump gives go-iptables' errors the meaning that [kernel.Exec] gives
// those of the programs it runs.
func classifyJump(err error) error {
	var e *goiptables.Error
	if !errors.As(err, &e) {
		return err
	}
	out := &kernel.ExecError{Program: "iptables", Status: e.ExitStatus(), Stderr: e.Error()}
	kernel.Classify(out)
	return out
}
