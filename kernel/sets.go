package kernel

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/hashicorp/go-multierror"
	"kproxy.dev/kproxy/service"
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

// AllEntries asks [SetStore.List] for every set's entries.
func AllEntries(string) bool { return true }

// defaultAliveTimeout is `--alive-timeout` in seconds; entries bring their own.
const defaultAliveTimeout = 3

// defaultLetTimeout is in seconds; entries bring their own.
const defaultLetTimeout = 60

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
	return entries, multierror.Append(errs, DestroySets(ctx, store, ops.Destroy)).ErrorOrNil()
}

// DestroySets removes sets. It waits a moment for references that are on their
// way out, once for all of them. That a set doesn't exist is no error.
func DestroySets(ctx context.Context, store SetStore, names []string) error {
	var errs *multierror.Error
	deadline := time.Now().Add(destroyWait)
	pause := 2 * time.Millisecond
	for len(names) > 0 {
		err := store.Destroy(names[0])
		if errors.Is(err, ErrBusy) && time.Now().Before(deadline) {
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-time.After(pause):
				pause *= 2
			}
			continue
		}
		if err != nil && !errors.Is(err, ErrNotFound) {
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

// RefreshAlive is the heartbeat: from now on and for timeout, rounded up to
// seconds, the portal takes new connections.
func RefreshAlive(store SetStore, timeout time.Duration) error {
	seconds := wholeSeconds(timeout)
	for _, f := range service.Families {
		s := everyone(SetAlive, f)
		if err := store.Add(s, seconds, s.Entries...); err != nil {
			return fmt.Errorf("refresh set %s: %w", s.Name, err)
		}
	}
	return nil
}

// RemoveAlive closes the portal at once: new connections go to the kernel's rules.
func RemoveAlive(store SetStore) error { return removeEveryone(store, SetAlive) }

// AnnounceStart has clients of services that nothing serves yet try again for d,
// rounded up to seconds, where they would be refused otherwise. It makes the sets
// if they aren't there.
func AnnounceStart(store SetStore, d time.Duration) error {
	for _, f := range service.Families {
		s := everyone(SetStarting, f)
		empty := s
		empty.Entries = nil
		if err := store.Create(empty); err != nil {
			return fmt.Errorf("create set %s: %w", s.Name, err)
		}
		if err := store.Add(s, wholeSeconds(d), s.Entries...); err != nil {
			return fmt.Errorf("fill set %s: %w", s.Name, err)
		}
	}
	return nil
}

// EndStart is for the time from which on kproxy serves.
func EndStart(store SetStore) error { return removeEveryone(store, SetStarting) }

func removeEveryone(store SetStore, base string) error {
	var errs *multierror.Error
	for _, f := range service.Families {
		s := everyone(base, f)
		if err := store.Delete(s, s.Entries...); err != nil && !errors.Is(err, ErrNotFound) {
			errs = multierror.Append(errs, fmt.Errorf("empty set %s: %w", s.Name, err))
		}
	}
	return errs.ErrorOrNil()
}

// everyone is a set of every address, in two halves because hash:net takes no /0.
func everyone(base string, f service.Family) Set {
	s := portalSet(base, f)
	s.Entries = netEntries(everyAddress[f])
	return s
}

// LetRefusals lets the resets by which a TCP endpoint refuses connections
// through to the clients for d, rounded up to seconds. Otherwise the kernel
// swallows them, in the hope that the client's next SYN is answered by another
// endpoint or finds the service recalled. That hope is vain where the endpoint
// refuses this one client only (nobody recalls a service for that) and where
// the service can't be recalled: its clients would send SYNs until they time out.
func LetRefusals(store SetStore, endpoint netip.AddrPort, d time.Duration) error {
	s := portalSet(SetLet, service.FamilyOf(endpoint.Addr()))
	if err := store.Add(s, wholeSeconds(d), AddressEntry(service.TCP, endpoint)); err != nil {
		return fmt.Errorf("let refusals of %s through: %w", endpoint, err)
	}
	return nil
}

// portalSet is one of [PortalSets].
func portalSet(base string, f service.Family) Set {
	sets := PortalSets()
	return sets[slices.IndexFunc(sets, func(s Set) bool { return s.Name == FamilySet(base, f) })]
}

// wholeSeconds rounds up, to one at least: a lifetime of 0 is for ever.
func wholeSeconds(d time.Duration) uint32 { return max(1, uint32((d+time.Second-1)/time.Second)) }
