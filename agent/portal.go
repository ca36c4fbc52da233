package agent

import (
	"context"
	"fmt"
	"time"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/plan"
)

// portal keeps the membership of the portal's sets: the fast half of what is
// in the kernel. Only the fast loop uses it, except for the heartbeat's entries.
type portal struct {
	store kernel.SetStore
	// applied is the plan that the kernel's sets follow; nil if that isn't
	// known, as at start or after an error.
	applied *plan.Plan
	// wrote is told how many entries were added and deleted; may be nil.
	wrote func(entries int)
}

// follow makes the sets what p wants: entries are added before others are
// deleted, so a service is never in no data plane at all. d leads to p from the plan
// that was followed last.
func (t *portal) follow(ctx context.Context, p *plan.Plan, d plan.Delta) error {
	ops, err := t.changes(p, d)
	if err != nil {
		return err
	}
	t.applied = nil
	entries, err := kernel.ApplySets(ctx, t.store, ops)
	if t.wrote != nil {
		t.wrote(entries)
	}
	if err != nil {
		return err
	}
	t.applied = p
	return nil
}

func (t *portal) changes(p *plan.Plan, d plan.Delta) (kernel.SetOps, error) {
	if t.applied != nil {
		return steering.SetChanges(t.applied, p, d), nil
	}
	have, err := t.observe(p)
	return kernel.DiffSets(have, steering.Sets(p)), err
}

// damaged says how the kernel's sets differ from what they should be; empty if
// they don't. After damage the next follow mends it.
func (t *portal) damaged() (string, error) {
	if t.applied == nil {
		return "", nil
	}
	have, err := t.observe(t.applied)
	if err != nil {
		return "", err
	}
	ops := kernel.DiffSets(have, steering.Sets(t.applied))
	if ops.Empty() {
		return "", nil
	}
	t.applied = nil
	return fmt.Sprintf("%d sets gone, entries of %d sets gone, entries of %d sets foreign", len(ops.Create), len(ops.Add), len(ops.Del)), nil
}

// observe reads the sets of p's portal back.
func (t *portal) observe(p *plan.Plan) ([]kernel.Set, error) {
	names := map[string]bool{}
	for _, s := range steering.EmptySetsOf(p) {
		names[s.Name] = true
	}
	states, err := t.store.List(func(name string) bool { return names[name] })
	if err != nil {
		return nil, fmt.Errorf("read portal sets: %w", err)
	}
	var sets []kernel.Set
	for _, s := range states {
		if names[s.Name] {
			sets = append(sets, s.Set)
		}
	}
	return sets, nil
}

// refresh is the heartbeat.
func (t *portal) refresh(timeout time.Duration) error { return steering.RefreshAlive(t.store, timeout) }

// expire closes the portal at once.
func (t *portal) expire() error { return steering.RemoveAlive(t.store) }
