package steering

import (
	"context"
	"fmt"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/plan"
)

// Redirects keeps the membership of the redirect sets: the fast half of what is in the
// kernel. One goroutine uses it.
type Redirects struct {
	Store kernel.SetStore
	// Wrote is told how many entries were added and deleted; may be nil.
	Wrote func(entries int)
	// applied is the plan that the kernel's sets follow; nil if that isn't
	// known, as at start or after an error.
	applied *plan.Plan
}

// Follow makes the sets what p wants: entries are added before others are
// deleted, so a service is never in no data plane at all. d leads to p from the plan
// that was followed last.
func (t *Redirects) Follow(ctx context.Context, p *plan.Plan, d plan.Delta) error {
	ops, err := t.changes(p, d)
	if err != nil {
		return err
	}
	t.applied = nil
	entries, err := kernel.ApplySets(ctx, t.Store, ops)
	if t.Wrote != nil {
		t.Wrote(entries)
	}
	if err != nil {
		return err
	}
	t.applied = p
	return nil
}

func (t *Redirects) changes(p *plan.Plan, d plan.Delta) (kernel.SetOps, error) {
	if t.applied != nil {
		return SetChanges(t.applied, p, d), nil
	}
	have, err := t.observe(p)
	return kernel.DiffSets(have, Sets(p)), err
}

// Damaged says how the kernel's sets differ from what they should be; empty if
// they don't. After damage the next Follow mends it.
func (t *Redirects) Damaged() (string, error) {
	if t.applied == nil {
		return "", nil
	}
	have, err := t.observe(t.applied)
	if err != nil {
		return "", err
	}
	ops := kernel.DiffSets(have, Sets(t.applied))
	if ops.Empty() {
		return "", nil
	}
	t.applied = nil
	return fmt.Sprintf("%d sets gone, entries of %d sets gone, entries of %d sets foreign", len(ops.Create), len(ops.Add), len(ops.Del)), nil
}

// observe reads p's redirect sets back.
func (t *Redirects) observe(p *plan.Plan) ([]kernel.Set, error) {
	names := map[string]bool{}
	for _, s := range EmptySetsOf(p) {
		names[s.Name] = true
	}
	states, err := t.Store.List(func(name string) bool { return names[name] })
	if err != nil {
		return nil, fmt.Errorf("read redirect sets: %w", err)
	}
	var sets []kernel.Set
	for _, s := range states {
		if names[s.Name] {
			sets = append(sets, s.Set)
		}
	}
	return sets, nil
}
