package kernel

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/hashicorp/go-multierror"
)

// SetStore is the kernel's ipsets, as far as they are kproxy's: names that
// don't begin with [Prefix] are refused, and List leaves them out.
// Implementations are safe for concurrent use.
type SetStore interface {
	// Create makes s without entries. That an equal set exists is no error.
	Create(s Set) error
	// Destroy removes a set. It fails with [ErrBusy] while a rule refers to
	// the set and with [ErrNotFound] if there is none.
	Destroy(name string) error
	// Add adds entries, or gives those that exist a new lifetime. Timeout is
	// in seconds, for sets with timeouts; 0 is the set's default.
	Add(s Set, timeout uint32, entries ...string) error
	// Delete removes entries; that one is missing is no error.
	Delete(s Set, entries ...string) error
	// List returns all sets in order of name, with the entries of those
	// for which entries returns true (nil: of none).
	List(entries func(name string) bool) ([]SetState, error)
}

// SetState is a set as the kernel has it.
type SetState struct {
	Set
	// Count is the number of entries, which those of Set may leave out. It
	// may include some that have just expired.
	Count int
	// Remaining are the lifetimes of Set.Entries in seconds, in sets with timeouts.
	Remaining []uint32
}

// Unchanged are sets that stay as they are, for what looks and would mend them: looking
// at virtual servers mends their record.
type Unchanged struct{ SetStore }

// Add implements [SetStore].
func (Unchanged) Add(Set, uint32, ...string) error { return nil }

// Delete implements [SetStore].
func (Unchanged) Delete(Set, ...string) error { return nil }

// destroyWait bounds the wait for references to a set to go. The nft variant
// frees a deleted rule's set in a work queue after the commit
// (nf_tables_trans_destroy_work).
const destroyWait = 2 * time.Second

// ApplySets carries out ops in order, the deletions also when an addition
// failed, and returns every error. Entries is the number added and deleted.
func ApplySets(ctx context.Context, store SetStore, ops SetOps) (entries int, err error) {
	var errs *multierror.Error
	for _, s := range ops.Create {
		if err := store.Create(s); err != nil {
			errs = multierror.Append(errs, fmt.Errorf("create set %s: %w", s.Name, err))
		}
	}
	for _, e := range ops.Add {
		if err := store.Add(e.Set, 0, e.Entries...); err != nil {
			errs = multierror.Append(errs, fmt.Errorf("add to set %s: %w", e.Set.Name, err))
			continue
		}
		entries += len(e.Entries)
	}
	for _, e := range ops.Del {
		if err := store.Delete(e.Set, e.Entries...); err != nil && !errors.Is(err, ErrNotFound) {
			errs = multierror.Append(errs, fmt.Errorf("delete from set %s: %w", e.Set.Name, err))
			continue
		}
		entries += len(e.Entries)
	}
	return entries, multierror.Append(errs, DestroySets(ctx, store, ops.Destroy, true)).ErrorOrNil()
}

// DestroySets removes sets. With wait, it gives references a moment that are on their
// way out, once for all of them; else a set that a rule refers to stays. That one doesn't exist is no error.
func DestroySets(ctx context.Context, store SetStore, names []string, wait bool) error {
	var errs *multierror.Error
	deadline := time.Now().Add(destroyWait)
	pause := 2 * time.Millisecond
	for len(names) > 0 {
		err := store.Destroy(names[0])
		busy := errors.Is(err, ErrBusy)
		if busy && wait && time.Now().Before(deadline) {
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-time.After(pause):
				pause *= 2
			}
			continue
		}
		if err != nil && !errors.Is(err, ErrNotFound) && (wait || !busy) {
			errs = multierror.Append(errs, fmt.Errorf("destroy set %s: %w", names[0], err))
		}
		names = names[1:]
	}
	return errs.ErrorOrNil()
}

// ReadSets returns kproxy's sets with their entries, as [Backend.Observe]
// reports them. Clients of affinity sets are left out: they come and go, and
// there may be many.
func ReadSets(store SetStore) ([]Set, error) {
	states, err := store.List(func(name string) bool { return !isAffinitySet(name) })
	if err != nil {
		return nil, fmt.Errorf("list sets: %w", err)
	}
	var out []Set
	for _, s := range states {
		out = append(out, s.Set)
	}
	return out, nil
}
