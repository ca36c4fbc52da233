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
