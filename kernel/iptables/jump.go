package iptables

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	goiptables "github.com/coreos/go-iptables/iptables"
	"github.com/hashicorp/go-multierror"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/service"
)

// Jumper reads and changes single rules of built-in chains. *iptables.IPTables of
// coreos/go-iptables is one.
type Jumper interface {
	Exists(table, chain string, rulespec ...string) (bool, error)
	List(table, chain string) ([]string, error) // as iptables -S prints them
	Insert(table, chain string, pos int, rulespec ...string) error
	Append(table, chain string, rulespec ...string) error
	Delete(table, chain string, rulespec ...string) error
}

// applyJumps adds what is missing, then deletes what isn't wanted. A jump that is
// in both lists has been moved by then.
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
		if slices.ContainsFunc(add, func(o kernel.Jump) bool {
			return o.Last && o.Table == j.Table && o.From == j.From && kernel.SameRule(o.Rule, j.Rule)
		}) {
			continue
		}
		err := classifyJump(b.jumps[f].Delete(j.Table, j.From, kernel.Words(j.Rule)...))
		if err != nil && !errors.Is(err, kernel.ErrNotFound) {
			errs = multierror.Append(errs, fmt.Errorf("delete jump from %s %s %s: %w", f, j.Table, j.From, err))
		}
	}
	return errs.ErrorOrNil()
}

func addJump(to Jumper, j kernel.Jump) error {
	if j.Last {
		return addLast(to, j)
	}
	spec := kernel.Words(j.Rule)
	if present, err := to.Exists(j.Table, j.From, spec...); err != nil || present {
		return err
	}
	return to.Insert(j.Table, j.From, 1, spec...)
}

// addLast puts j at the end of its chain, or right before the first rule there
// that nothing gets past. One that is behind such a rule does nothing, so it is
// deleted first: by what it says, because numbers change under others' hands.
func addLast(to Jumper, j kernel.Jump) error {
	spec := kernel.Words(j.Rule)
	lines, err := to.List(j.Table, j.From)
	if err != nil {
		return err
	}
	number, end := 0, 0
	for _, line := range lines {
		rule, ok := strings.CutPrefix(line, "-A "+j.From+" ")
		if !ok {
			continue // the policy
		}
		number++
		switch same := kernel.SameRule(rule, j.Rule); {
		case same && end == 0:
			return nil
		case same:
			if err := to.Delete(j.Table, j.From, spec...); err != nil {
				return err
			}
		case end == 0 && refusesAll(rule):
			end = number
		}
	}
	if end == 0 {
		return to.Append(j.Table, j.From, spec...)
	}
	return to.Insert(j.Table, j.From, end, spec...)
}

// refusesAll reports whether a rule rejects or drops every packet: where a host
// has its firewall end that way (iptables-services, as RHEL has it), what comes
// after is never reached.
func refusesAll(rule string) bool {
	words := kernel.Words(rule)
	for len(words) > 2 && (words[0] == "-m" && words[1] == "comment" || words[0] == "--comment") {
		words = words[2:]
	}
	return len(words) >= 2 && words[0] == "-j" && (words[1] == "DROP" || words[1] == "REJECT")
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
