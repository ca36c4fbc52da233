package iptables

import (
	"bytes"
	"context"
	"errors"
	"fmt"

	"github.com/hashicorp/go-multierror"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/service"
)

// Apply carries out ops in order. A service whose chains the kernel refuses is
// in Applied.Failed and doesn't keep others from being programmed; its former
// rules stay. [kernel.ErrLocked] means that nothing was wrong but the moment.
func (b *Backend) Apply(ctx context.Context, ops kernel.Ops) (kernel.Applied, error) {
	a := kernel.Applied{Failed: map[service.Key]error{}}
	if b.watch != nil {
		b.watch.begin(ops)
	}
	if err := b.addSets(ctx, ops, &a); err != nil {
		return a, err
	}
	var errs *multierror.Error
	for _, f := range b.env.Families() {
		// Without its chains a family's jumps would lead nowhere, and what
		// they replace must stay.
		if err := b.applyFamily(ctx, f, ops, &a); err != nil {
			errs = multierror.Append(errs, err)
		}
	}
	if errs.ErrorOrNil() != nil {
		return a, errs.ErrorOrNil() // what is left over is deleted next time
	}
	n, err := kernel.ApplySets(ctx, b.env.Sets, kernel.SetOps{Del: ops.DelEntries})
	a.Entries += n
	errs = multierror.Append(errs, err)
	for _, f := range b.env.Families() {
		if err := b.deleteChains(ctx, f, ops.DelChains[f], &a); err != nil {
			errs = multierror.Append(errs, err)
		}
	}
	done := errs.ErrorOrNil() == nil && len(a.Failed) == 0 // else rules that stayed may still refer to sets
	return a, multierror.Append(errs, kernel.DestroySets(ctx, b.env.Sets, ops.DestroySets, done)).ErrorOrNil()
}

func (b *Backend) applyFamily(ctx context.Context, f service.Family, ops kernel.Ops, a *kernel.Applied) error {
	chains := make([]kernel.Chain, 0, len(ops.Chains[f]))
	for _, c := range ops.Chains[f] {
		if _, failed := a.Failed[c.Owner]; !failed {
			chains = append(chains, c)
		}
	}
	if err := b.writeChains(ctx, f, chains, a, len(chains) < len(ops.Chains[f])); err != nil {
		return fmt.Errorf("write %s chains: %w", f, err)
	}
	return b.applyJumps(ctx, f, ops.AddJumps[f], ops.DelJumps[f])
}

// addSets creates and fills sets. One that belongs to a service fails alone.
func (b *Backend) addSets(ctx context.Context, ops kernel.Ops, a *kernel.Applied) error {
	var errs *multierror.Error
	fail := func(s kernel.Set, err error) {
		if s.Owner == (service.Key{}) || errors.Is(err, kernel.ErrPermission) {
			errs = multierror.Append(errs, err)
			return
		}
		a.Failed[s.Owner] = err
	}
	for _, s := range ops.CreateSets {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := b.env.Sets.Create(s); err != nil {
			fail(s, fmt.Errorf("create set %s: %w", s.Name, err))
		}
	}
	for _, e := range ops.AddEntries {
		if err := b.env.Sets.Add(e.Set, 0, e.Entries...); err != nil {
			fail(e.Set, fmt.Errorf("add to set %s: %w", e.Set.Name, err))
			continue
		}
		a.Entries += len(e.Entries)
	}
	return errs.ErrorOrNil()
}

// deleteChains empties all chains, so that none leads to another, and removes them.
func (b *Backend) deleteChains(ctx context.Context, f service.Family, chains []kernel.Chain, a *kernel.Applied) error {
	if len(chains) == 0 {
		return nil
	}
	err := b.restore(ctx, f, deleteText(chains))
	if err == nil {
		a.Chains += len(chains)
		return nil
	}
	if !refused(err) {
		return fmt.Errorf("delete %s chains: %w", f, err)
	}
	// Some foreign rule, or a service whose change was refused, still leads to
	// one of them: each on its own.
	var errs *multierror.Error
	for i := range chains {
		if err := b.restore(ctx, f, deleteText(chains[i:i+1])); err != nil {
			errs = multierror.Append(errs, fmt.Errorf("delete %s chain %s: %w", f, chains[i].Name, err))
			continue
		}
		a.Chains++
	}
	return errs.ErrorOrNil()
}

func deleteText(chains []kernel.Chain) []byte {
	var text bytes.Buffer
	for _, group := range groupBy(chains, tableOf) {
		fmt.Fprintf(&text, "*%s\n", group[0].Table)
		for _, c := range group {
			fmt.Fprintf(&text, ":%s - [0:0]\n", c.Name)
		}
		for _, c := range group {
			fmt.Fprintf(&text, "-X %s\n", c.Name)
		}
		text.WriteString("COMMIT\n")
	}
	return text.Bytes()
}
