package steering

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/hashicorp/go-multierror"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/service"
)

// Default lifetimes of entries in seconds; entries bring their own. That of the alive
// sets is `--alive-timeout`.
const (
	defaultAliveTimeout = 3
	defaultLetTimeout   = 60
	defaultKeptTimeout  = 60
)

// Alive implements [kernel.Heartbeat]. Times are rounded up to seconds.
func (t *Redirects) Alive(d time.Duration) error {
	seconds := wholeSeconds(d)
	for _, f := range service.Families {
		s := everyone(kernel.SetAlive, f)
		if err := t.Store.Add(s, seconds, s.Entries...); err != nil {
			return fmt.Errorf("refresh set %s: %w", s.Name, err)
		}
	}
	return nil
}

// Dead implements [kernel.Heartbeat].
func (t *Redirects) Dead() error { return t.removeEveryone(kernel.SetAlive) }

// Starting implements [kernel.Heartbeat]. It makes the sets if they aren't there.
func (t *Redirects) Starting(d time.Duration) error {
	for _, f := range service.Families {
		s := everyone(kernel.SetStarting, f)
		empty := s
		empty.Entries = nil
		if err := t.Store.Create(empty); err != nil {
			return fmt.Errorf("create set %s: %w", s.Name, err)
		}
		if err := t.Store.Add(s, wholeSeconds(d), s.Entries...); err != nil {
			return fmt.Errorf("fill set %s: %w", s.Name, err)
		}
	}
	return nil
}

// Started implements [kernel.Heartbeat].
func (t *Redirects) Started() error { return t.removeEveryone(kernel.SetStarting) }

func (t *Redirects) removeEveryone(base string) error {
	var errs *multierror.Error
	for _, f := range service.Families {
		s := everyone(base, f)
		if err := t.Store.Delete(s, s.Entries...); err != nil && !errors.Is(err, kernel.ErrNotFound) {
			errs = multierror.Append(errs, fmt.Errorf("empty set %s: %w", s.Name, err))
		}
	}
	return errs.ErrorOrNil()
}

// everyone is a set of every address, in two halves because hash:net takes no /0.
func everyone(base string, f service.Family) kernel.Set {
	s := emptySet(base, f)
	s.Entries = netEntries(everyAddress[f])
	return s
}

// LetRefusals implements [kernel.Exceptions].
func (t *Redirects) LetRefusals(endpoint netip.AddrPort, d time.Duration) error {
	s := emptySet(kernel.SetLet, service.FamilyOf(endpoint.Addr()))
	if err := t.Store.Add(s, wholeSeconds(d), kernel.AddressEntry(service.TCP, endpoint)); err != nil {
		return fmt.Errorf("let refusals of %s through: %w", endpoint, err)
	}
	return nil
}

// emptySet is one of [EmptySetsOf] any plan.
func emptySet(base string, f service.Family) kernel.Set {
	sets := EmptySetsOf(nil)
	return sets[slices.IndexFunc(sets, func(s kernel.Set) bool { return s.Name == kernel.FamilySet(base, f) })]
}

// wholeSeconds rounds up, to one at least: a lifetime of 0 is for ever.
func wholeSeconds(d time.Duration) uint32 { return max(1, uint32((d+time.Second-1)/time.Second)) }

// KeepConnections implements [kernel.Exceptions].
func (t *Redirects) KeepConnections(d time.Duration, connections []kernel.Redirected) error {
	var entries [2][]string
	for _, h := range connections {
		f := service.FamilyOf(h.Client.Addr())
		entries[f] = append(entries[f], kernel.AddressEntry(service.TCP, h.Client)+","+h.Address.Addr().String())
	}
	var errs *multierror.Error
	for _, f := range service.Families {
		if len(entries[f]) == 0 {
			continue
		}
		if err := t.Store.Add(emptySet(kernel.SetHeld, f), wholeSeconds(d), entries[f]...); err != nil {
			errs = multierror.Append(errs, fmt.Errorf("keep %d connections: %w", len(entries[f]), err))
		}
	}
	return errs.ErrorOrNil()
}
