package kerneltest

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/service"
)

// modelSet is a set of a [Host]. Entries have lifetimes, which take longer than tests do.
type modelSet struct {
	kernel.Set
	entries map[string]uint32
}

// Sets is the [kernel.SetStore] of a [Host].
type Sets struct{ host *Host }

// Sets returns the host's set store.
func (h *Host) Sets() *Sets { return &Sets{h} }

// AllEntries asks [kernel.SetStore]'s List for every set's entries.
func AllEntries(string) bool { return true }

// CheckEntry reports whether a set would take an entry: form and family.
func CheckEntry(set kernel.Set, entry string) error {
	e, err := kernel.ParseEntry(set.Type, entry)
	if err != nil {
		return err
	}
	for _, n := range []netip.Prefix{e.Net, e.Net2} {
		if n.IsValid() && service.FamilyOf(n.Addr()) != set.Family {
			return fmt.Errorf("entry %s isn't of the set's family %s", entry, set.Family)
		}
	}
	return nil
}

// Create implements [kernel.SetStore].
func (s *Sets) Create(set kernel.Set) error {
	s.host.mu.Lock()
	defer s.host.mu.Unlock()
	if !kernel.Own(set.Name) || len(set.Name) > kernel.MaxSetName {
		return fmt.Errorf("set name %q", set.Name)
	}
	if old, ok := s.host.sets[set.Name]; ok {
		if old.Type != set.Type || old.Type != kernel.BitmapPort && old.Family != set.Family || old.Timeout != set.Timeout {
			return fmt.Errorf("a different set %s exists", set.Name)
		}
		return nil
	}
	set.Entries = nil
	s.host.sets[set.Name] = &modelSet{Set: set, entries: map[string]uint32{}}
	return nil
}

// Destroy implements [kernel.SetStore].
func (s *Sets) Destroy(name string) error {
	s.host.mu.Lock()
	defer s.host.mu.Unlock()
	if s.host.sets[name] == nil {
		return kernel.ErrNotFound
	}
	delete(s.host.sets, name)
	return nil
}

// Add implements [kernel.SetStore].
func (s *Sets) Add(set kernel.Set, timeout uint32, entries ...string) error {
	s.host.mu.Lock()
	defer s.host.mu.Unlock()
	m, err := s.find(set.Name)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if err := CheckEntry(m.Set, e); err != nil {
			return err
		}
		m.entries[e] = cmp.Or(timeout, m.Timeout)
	}
	return nil
}

// Delete implements [kernel.SetStore].
func (s *Sets) Delete(set kernel.Set, entries ...string) error {
	s.host.mu.Lock()
	defer s.host.mu.Unlock()
	m, err := s.find(set.Name)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if err := CheckEntry(m.Set, e); err != nil {
			return err
		}
		delete(m.entries, e)
	}
	return nil
}

func (s *Sets) find(name string) (*modelSet, error) {
	if m := s.host.sets[name]; m != nil {
		return m, nil
	}
	return nil, kernel.ErrNotFound
}

// List implements [kernel.SetStore].
func (s *Sets) List(entries func(string) bool) ([]kernel.SetState, error) {
	s.host.mu.Lock()
	defer s.host.mu.Unlock()
	var out []kernel.SetState
	for _, name := range slices.Sorted(maps.Keys(s.host.sets)) {
		m := s.host.sets[name]
		st := kernel.SetState{Set: kernel.Set{Name: name, Type: m.Type, Family: m.Family, Timeout: m.Timeout}, Count: len(m.entries)}
		if entries != nil && entries(name) {
			for _, e := range slices.Sorted(maps.Keys(m.entries)) {
				st.Entries = append(st.Entries, e)
				if m.Timeout > 0 {
					st.Remaining = append(st.Remaining, m.entries[e])
				}
			}
		}
		out = append(out, st)
	}
	return out, nil
}
