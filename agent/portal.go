package agent

import (
	"context"
	"fmt"
	"time"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/plan"
)

// portal keeps the membership of the portal's sets: the fast half of what is
// in the kernel. Only the fast loop uses it, except for the heartbeat's entries.
type portal struct {
	store kernel.SetStore
	have  []kernel.Set
	known bool // have is what the kernel holds
}

// follow makes the sets what p wants: entries are added before others are
// deleted, so a service is never in no data plane at all.
func (t *portal) follow(ctx context.Context, p *plan.Plan) error {
	want := kernel.Portal(p)
	if !t.known {
		have, err := t.observe()
		if err != nil {
			return err
		}
		t.have, t.known = have, true
	}
	ops := kernel.DiffSets(t.have, comparable(want))
	if ops.Empty() {
		return nil
	}
	if _, err := kernel.ApplySets(ctx, t.store, ops); err != nil {
		t.known = false
		return err
	}
	t.have = comparable(want)
	return nil
}

// observe reads the portal's sets back, without the heartbeat's entries.
func (t *portal) observe() ([]kernel.Set, error) {
	names := map[string]bool{}
	for _, s := range kernel.PortalSets() {
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
	return comparable(sets), nil
}

// damaged reports how the kernel's sets differ from what they should be.
func (t *portal) damaged() (string, error) {
	if !t.known {
		return "", nil
	}
	have, err := t.observe()
	if err != nil {
		return "", err
	}
	ops := kernel.DiffSets(have, t.have)
	if ops.Empty() {
		return "", nil
	}
	t.have = have
	return fmt.Sprintf("%d sets gone, entries of %d sets gone, entries of %d sets foreign", len(ops.Create), len(ops.Add), len(ops.Del)), nil
}

// refresh is the heartbeat.
func (t *portal) refresh(timeout time.Duration) error { return kernel.RefreshAlive(t.store, timeout) }

// expire closes the portal at once.
func (t *portal) expire() error { return kernel.RemoveAlive(t.store) }

// comparable returns sets as DiffSets should compare them: entries matter,
// except the heartbeat's.
func comparable(sets []kernel.Set) []kernel.Set {
	out := make([]kernel.Set, len(sets))
	for i, s := range sets {
		s.Dynamic = s.Name == kernel.FamilySet(kernel.SetAlive, s.Family)
		if s.Dynamic {
			s.Entries = nil
		}
		out[i] = s
	}
	return out
}
