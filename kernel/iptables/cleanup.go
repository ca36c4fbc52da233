package iptables

import (
	"context"
	"errors"
	"fmt"
	"iter"

	"github.com/hashicorp/go-multierror"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/service"
)

// Remove removes everything that kproxy has in the kernel, in both variants of
// iptables where the host has them, and nothing else. It goes on after errors
// and returns all of them.
func (*Driver) Remove(ctx context.Context, e *steering.Env, _ func(context.Context) error) error {
	var errs *multierror.Error
	for b, f := range everywhere(e) {
		if err := b.clean(ctx, f); err != nil && !errors.Is(err, kernel.ErrNoProgram) {
			errs = multierror.Append(errs, fmt.Errorf("clean up: %w", err))
		}
	}
	// Sets last: rules of either variant may refer to them.
	sets, err := kernel.ReadSets(e.Sets)
	errs = multierror.Append(errs, err)
	_, err = kernel.ApplySets(ctx, e.Sets, kernel.DiffSets(sets, nil))
	errs = multierror.Append(errs, err, e.Routing.Remove())
	return errs.ErrorOrNil()
}

// everywhere iterates over the variants and families that may have rules; the default
// variant's are those of one of the others where the host tells them apart.
func everywhere(e *steering.Env) iter.Seq2[*Backend, service.Family] {
	return func(yield func(*Backend, service.Family) bool) {
		for _, v := range []kernel.Variant{kernel.VariantNFT(), kernel.VariantLegacy(), kernel.DefaultVariant()} {
			at := *e
			at.Variant = v
			for _, f := range service.Families {
				if !yield(New(&at), f) {
					return
				}
			}
		}
	}
}

// clean removes one family's jumps and chains.
func (b *Backend) clean(ctx context.Context, f service.Family) error {
	chains, jumps, err := b.observeFamily(ctx, f)
	if err == nil {
		err = b.applyJumps(ctx, f, nil, jumps)
	}
	if err == nil {
		err = b.deleteChains(ctx, f, chains, &kernel.Applied{})
	}
	return err
}

// Preview says what Remove would remove, a line each, and changes nothing.
func (*Driver) Preview(ctx context.Context, e *steering.Env) ([]string, error) {
	var out []string
	var read [2]bool
	for b, f := range everywhere(e) {
		v := b.env.Variant
		if read[f] && v.Name == "" {
			continue // the same rules under the usual name
		}
		chains, jumps, err := b.observeFamily(ctx, f)
		if errors.Is(err, kernel.ErrNoProgram) {
			continue
		} else if err != nil {
			return nil, err
		}
		read[f] = true
		for _, j := range jumps {
			out = append(out, fmt.Sprintf("%s table %s: rule %s %s", v.Program[f], j.Table, j.From, j.Rule))
		}
		for _, chain := range chains {
			out = append(out, fmt.Sprintf("%s table %s: chain %s, %d rules", v.Program[f], chain.Table, chain.Name, len(chain.Rules)))
		}
	}
	sets, err := e.Sets.List(nil)
	if err != nil {
		return nil, fmt.Errorf("list sets: %w", err)
	}
	for _, s := range sets {
		out = append(out, fmt.Sprintf("set %s, %d entries", s.Name, s.Count))
	}
	routes, err := e.Routing.Present()
	return append(out, routes...), err
}
