package iptables

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/service"
)

// writeChains makes all chains in one go. If they are refused, it finds the
// services whose chains they are, and makes the others.
func (b *Backend) writeChains(ctx context.Context, f service.Family, chains []kernel.Chain, a *kernel.Applied, incomplete bool) error {
	if len(chains) == 0 {
		return nil
	}
	w := &writer{b: b, ctx: ctx, family: f, applied: a}
	if !incomplete {
		if err := w.write(chains); err == nil || !refused(err) {
			return err
		}
	}
	return w.isolate(chains)
}

// refused reports whether err is about what was to be written, so that writing
// less may help.
func refused(err error) bool {
	return errors.Is(err, kernel.ErrSyntax) || errors.Is(err, kernel.ErrNotFound)
}

type writer struct {
	b       *Backend
	ctx     context.Context
	family  service.Family
	applied *kernel.Applied
}

func (w *writer) write(chains []kernel.Chain) error {
	if err := w.ctx.Err(); err != nil {
		return err
	}
	if err := w.b.restore(w.ctx, w.family, restoreText(w.b.parts(chains))); err != nil {
		return err
	}
	rules := 0
	for i := range chains {
		rules += chains[i].Len()
	}
	w.applied.Chains += len(chains)
	w.applied.Rules += rules
	w.b.written = max(w.b.written, rules)
	return nil
}

// isolate writes the shared chains first, and those of services after them, in
// groups: some mistakes, like a loop, are refused only where a packet could get
// there. A service's new chains are empty in between; nothing leads there but
// what redirects don't take, and they take the service until its rules are in.
func (w *writer) isolate(chains []kernel.Chain) error {
	var shared []kernel.Chain
	var keys []service.Key
	own := map[service.Key][]kernel.Chain{}
	for _, c := range chains {
		if c.Owner == (service.Key{}) {
			shared = append(shared, c)
			continue
		}
		if own[c.Owner] == nil {
			keys = append(keys, c.Owner)
		}
		own[c.Owner] = append(own[c.Owner], c)
	}
	placeholders, err := w.placeholders(shared)
	if err != nil {
		return err
	}
	all := slices.Concat(placeholders, shared)
	slices.SortStableFunc(all, kernel.CompareChains)
	if err := w.write(all); err != nil {
		return err
	}
	return w.services(own, keys)
}

// services writes the chains of keys. If they are refused it tries each half.
func (w *writer) services(own map[service.Key][]kernel.Chain, keys []service.Key) error {
	if len(keys) == 0 {
		return nil
	}
	var chains []kernel.Chain
	for _, k := range keys {
		chains = append(chains, own[k]...)
	}
	slices.SortStableFunc(chains, kernel.CompareChains)
	err := w.write(chains)
	switch {
	case err == nil:
		return nil
	case !refused(err):
		return err
	case len(keys) == 1:
		w.applied.Failed[keys[0]] = fmt.Errorf("write %s chains: %w", w.family, err)
		return nil
	}
	half := len(keys) / 2
	if err := w.services(own, keys[:half]); err != nil {
		return err
	}
	return w.services(own, keys[half:])
}

// placeholders are empty chains for those that shared rules lead to and that
// don't exist yet. A service whose chains are refused keeps them: it has no
// rules beneath, and userspace serves it.
func (w *writer) placeholders(shared []kernel.Chain) ([]kernel.Chain, error) {
	have, _, err := w.b.observeFamily(w.ctx, w.family)
	if err != nil {
		return nil, err
	}
	known := map[string]bool{}
	for _, c := range slices.Concat(have, shared) {
		known[c.Table+" "+c.Name] = true
	}
	var out []kernel.Chain
	for _, c := range shared {
		for _, r := range c.Text() {
			t := target(r)
			if id := c.Table + " " + t; kernel.Own(t) && !known[id] {
				known[id] = true
				out = append(out, kernel.Chain{Table: c.Table, Name: t})
			}
		}
	}
	return out, nil
}
