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

// RefreshAlive is the heartbeat: from now on and for timeout, rounded up to
// seconds, new connections are redirected.
func RefreshAlive(store kernel.SetStore, timeout time.Duration) error {
	seconds := wholeSeconds(timeout)
	for _, f := range service.Families {
		s := everyone(kernel.SetAlive, f)
		if err := store.Add(s, seconds, s.Entries...); err != nil {
			return fmt.Errorf("refresh set %s: %w", s.Name, err)
		}
	}
	return nil
}

// RemoveAlive ends redirecting at once: new connections go to the kernel's rules.
func RemoveAlive(store kernel.SetStore) error { return removeEveryone(store, kernel.SetAlive) }

// AnnounceStart has clients of services that nothing serves yet try again for d,
// rounded up to seconds, where they would be refused otherwise. It makes the sets
// if they aren't there.
func AnnounceStart(store kernel.SetStore, d time.Duration) error {
	for _, f := range service.Families {
		s := everyone(kernel.SetStarting, f)
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
func EndStart(store kernel.SetStore) error { return removeEveryone(store, kernel.SetStarting) }

func removeEveryone(store kernel.SetStore, base string) error {
	var errs *multierror.Error
	for _, f := range service.Families {
		s := everyone(base, f)
		if err := store.Delete(s, s.Entries...); err != nil && !errors.Is(err, kernel.ErrNotFound) {
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

// LetRefusals lets the resets by which a TCP endpoint refuses connections
// through to the clients for d, rounded up to seconds. Otherwise the kernel
// swallows them, in the hope that the client's next SYN is answered by another
// endpoint or finds the service recalled. That hope is vain where the endpoint
// refuses this one client only (nobody recalls a service for that) and where
// the service can't be recalled: its clients would send SYNs until they time out.
func LetRefusals(store kernel.SetStore, endpoint netip.AddrPort, d time.Duration) error {
	s := emptySet(kernel.SetLet, service.FamilyOf(endpoint.Addr()))
	if err := store.Add(s, wholeSeconds(d), kernel.AddressEntry(service.TCP, endpoint)); err != nil {
		return fmt.Errorf("let refusals of %s through: %w", endpoint, err)
	}
	return nil
}

// emptySet is one of [EmptySets].
func emptySet(base string, f service.Family) kernel.Set {
	sets := EmptySets()
	return sets[slices.IndexFunc(sets, func(s kernel.Set) bool { return s.Name == kernel.FamilySet(base, f) })]
}

// wholeSeconds rounds up, to one at least: a lifetime of 0 is for ever.
func wholeSeconds(d time.Duration) uint32 { return max(1, uint32((d+time.Second-1)/time.Second)) }

// Redirected is a TCP connection that userspace carries: what its client sends.
type Redirected struct{ Client, Address netip.AddrPort }

// KeepConnections makes connections come to userspace for d, rounded up to
// seconds, also when conntrack has forgotten them and their service is in the
// kernel by now, where their next packet would begin a connection to an endpoint.
func KeepConnections(store kernel.SetStore, d time.Duration, connections []Redirected) error {
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
		if err := store.Add(emptySet(kernel.SetHeld, f), wholeSeconds(d), entries[f]...); err != nil {
			errs = multierror.Append(errs, fmt.Errorf("hold %d connections: %w", len(entries[f]), err))
		}
	}
	return errs.ErrorOrNil()
}
