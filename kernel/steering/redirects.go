package steering

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/plan"
)

// Redirects is the [kernel.Steering] by redirect sets.
type Redirects struct {
	Store  kernel.SetStore
	Routes Routing
	// applied is the plan that the kernel's sets follow; nil if that isn't
	// known, as at start or after an error.
	applied *plan.Plan
}

var (
	_ kernel.Steering   = (*Redirects)(nil)
	_ kernel.SetCounter = (*Redirects)(nil)
)

// Follow implements [kernel.Steering].
func (t *Redirects) Follow(ctx context.Context, p *plan.Plan, d plan.Delta) (r kernel.Result) {
	ops, err := t.changes(p, d)
	if err != nil {
		return kernel.Result{Err: err}
	}
	t.applied = nil
	if r.Applied.Entries, r.Err = kernel.ApplySets(ctx, t.Store, ops); r.Err == nil {
		t.applied = p
	}
	return r
}

func (t *Redirects) changes(p *plan.Plan, d plan.Delta) (kernel.SetOps, error) {
	if t.applied != nil {
		return SetChanges(t.applied, p, d), nil
	}
	have, err := t.observe(p)
	return kernel.DiffSets(have, Sets(p)), err
}

// Damage implements [kernel.Steering].
func (t *Redirects) Damage() (string, error) {
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

// Local implements [kernel.Steering].
func (t *Redirects) Local(a netip.Addr) bool { return slices.Contains(ListenerAddress[:], a) }

// Missing implements [kernel.Steering].
func (t *Redirects) Missing() ([]string, error) { return t.Routes.Missing() }

// affinitySets is what all sets of session affinity are counted as: there is one
// for each endpoint.
const affinitySets = kernel.Prefix + "AFF"

// SetEntries implements [kernel.SetCounter], for the sets of all data planes.
func (t *Redirects) SetEntries() (map[string]int, error) {
	states, err := t.Store.List(nil)
	if err != nil {
		return nil, err
	}
	entries := make(map[string]int, len(states))
	for _, s := range states {
		name := s.Name
		if strings.HasPrefix(name, affinitySets+"-") {
			name = affinitySets
		}
		entries[name] += s.Count
	}
	return entries, nil
}
