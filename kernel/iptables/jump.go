package iptables

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/hashicorp/go-multierror"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/service"
)

// applyJumps adds what is missing, then deletes what isn't wanted. A jump that is
// in both lists has been moved by then.
func (b *Backend) applyJumps(ctx context.Context, f service.Family, add, del []kernel.Jump) error {
	var errs *multierror.Error
	first, last := split(add)
	if len(first) > 0 {
		// At once: most of what a start takes, programs take.
		switch err := b.restore(ctx, f, jumpText(first)); {
		case refused(err):
			last = add // each on its own
		case err != nil:
			return fmt.Errorf("add %s jumps: %w", f, err)
		}
	}
	if len(last)+len(del) == 0 {
		return nil
	}
	rules, err := b.single(f)
	if err != nil {
		return fmt.Errorf("open %s rules: %w", f, err)
	}
	for _, j := range last {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := addJump(rules, j); err != nil {
			errs = multierror.Append(errs, fmt.Errorf("add jump to %s %s %s: %w", f, j.Table, j.From, steering.Classified(err)))
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
		if err := steering.Classified(rules.DeleteIfExists(j.Table, j.From, kernel.Words(j.Rule)...)); err != nil && !errors.Is(err, kernel.ErrNotFound) {
			errs = multierror.Append(errs, fmt.Errorf("delete jump from %s %s %s: %w", f, j.Table, j.From, err))
		}
	}
	return errs.ErrorOrNil()
}

// split tells the jumps that begin their chains from those that end them.
func split(jumps []kernel.Jump) (first, last []kernel.Jump) {
	for _, j := range jumps {
		if j.Last {
			last = append(last, j)
		} else {
			first = append(first, j)
		}
	}
	return first, last
}

// jumpText puts each jump at the beginning of its chain.
func jumpText(jumps []kernel.Jump) []byte {
	var text bytes.Buffer
	for _, group := range groupBy(jumps, func(j kernel.Jump) string { return j.Table }) {
		fmt.Fprintf(&text, "*%s\n", group[0].Table)
		for _, j := range group {
			fmt.Fprintf(&text, "-I %s 1 %s\n", j.From, j.Rule)
		}
		text.WriteString("COMMIT\n")
	}
	return text.Bytes()
}

// addJump puts j at the beginning of its chain; or at the end, or right before the first rule there
// that nothing gets past. One that is behind such a rule does nothing, so it is
// deleted first: by what it says, because numbers change under others' hands.
func addJump(rules steering.SingleRules, j kernel.Jump) error {
	words := kernel.Words(j.Rule)
	if !j.Last {
		return rules.InsertUnique(j.Table, j.From, 1, words...)
	}
	list, err := rules.List(j.Table, j.From)
	if err != nil {
		return err
	}
	number, end := 0, 0
	for line := range kernel.SavedLines(strings.Join(list, "\n")) {
		rule, ok := strings.CutPrefix(line, "-A "+j.From+" ")
		if !ok {
			continue // the policy
		}
		number++
		switch same := kernel.SameRule(rule, j.Rule); {
		case same && end == 0:
			return nil
		case same:
			if err := rules.DeleteIfExists(j.Table, j.From, words...); err != nil {
				return err
			}
		case end == 0 && refusesAll(rule):
			end = number
		}
	}
	if end == 0 {
		return rules.AppendUnique(j.Table, j.From, words...)
	}
	return rules.InsertUnique(j.Table, j.From, end, words...)
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
