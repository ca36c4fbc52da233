package iptables

import (
	"context"
	"errors"
	"fmt"

	"github.com/hashicorp/go-multierror"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/service"
)

// Cleanup removes everything that kproxy has in the kernel, in both variants of
// iptables where the host has them, and nothing else. It goes on after errors
// and returns all of them.
func Cleanup(ctx context.Context, c Config, r steering.Routing) error {
	var errs *multierror.Error
	for _, v := range []kernel.Variant{kernel.VariantNFT(), kernel.VariantLegacy(), kernel.DefaultVariant()} {
		c.Variant = v
		for _, f := range service.Families {
			if err := cleanFamily(ctx, c, f); err != nil && !errors.Is(err, kernel.ErrNoProgram) {
				errs = multierror.Append(errs, err)
			}
		}
	}
	// Sets last: rules of either variant may refer to them.
	sets, err := kernel.ReadSets(c.Sets)
	errs = multierror.Append(errs, err)
	_, err = kernel.ApplySets(ctx, c.Sets, kernel.DiffSets(sets, nil))
	errs = multierror.Append(errs, err, r.Remove())
	return errs.ErrorOrNil()
}

// cleanFamily removes one family's jumps and chains.
func cleanFamily(ctx context.Context, c Config, f service.Family) error {
	b, err := New(c)
	if err != nil {
		return err
	}
	chains, jumps, err := b.observeFamily(ctx, f)
	if err != nil {
		return fmt.Errorf("clean up: %w", err)
	}
	if err := b.applyJumps(ctx, f, nil, jumps); err != nil {
		return fmt.Errorf("clean up: %w", err)
	}
	var a kernel.Applied
	if err := b.deleteChains(ctx, f, chains, &a); err != nil {
		return fmt.Errorf("clean up: %w", err)
	}
	return nil
}

// Preview says what [Cleanup] would remove, a line each, and changes nothing.
func Preview(ctx context.Context, c Config, r steering.Routing) ([]string, error) {
	var out []string
	var read [2]bool
	for _, v := range []kernel.Variant{kernel.VariantNFT(), kernel.VariantLegacy(), kernel.DefaultVariant()} {
		for _, f := range service.Families {
			if read[f] && v.Name == "" {
				continue // the same rules under the usual name
			}
			c.Variant = v
			lines, err := previewFamily(ctx, c, f)
			if errors.Is(err, kernel.ErrNoProgram) {
				continue
			}
			if err != nil {
				return nil, err
			}
			read[f], out = true, append(out, lines...)
		}
	}
	sets, err := c.Sets.List(nil)
	if err != nil {
		return nil, fmt.Errorf("list sets: %w", err)
	}
	for _, s := range sets {
		out = append(out, fmt.Sprintf("set %s, %d entries", s.Name, s.Count))
	}
	routes, err := r.Present()
	return append(out, routes...), err
}

func previewFamily(ctx context.Context, c Config, f service.Family) ([]string, error) {
	b, err := New(c)
	if err != nil {
		return nil, err
	}
	chains, jumps, err := b.observeFamily(ctx, f)
	if err != nil {
		return nil, err
	}
	var out []string
	for _, j := range jumps {
		out = append(out, fmt.Sprintf("%s table %s: rule %s %s", c.Variant.Program[f], j.Table, j.From, j.Rule))
	}
	for _, chain := range chains {
		out = append(out, fmt.Sprintf("%s table %s: chain %s, %d rules", c.Variant.Program[f], chain.Table, chain.Name, len(chain.Rules)))
	}
	return out, nil
}
