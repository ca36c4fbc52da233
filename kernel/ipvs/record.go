package ipvs

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/hashicorp/go-multierror"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/service"
)

// DrainSlack is how many seconds longer entries of [kernel.SetDrain] live than
// their real server drains: an entry that went first would leave a real server
// behind of which nothing says that it drains, and kproxy may be down for a while.
const DrainSlack = 7 * 24 * 3600

// recordBases name the sets of the record.
var recordBases = [3]string{kernel.SetDrain, kernel.SetVIP, kernel.SetVirtual}

// Sets are the record of what is kproxy's, per family and sorted. They are
// Dynamic: the Backend keeps their entries in step with the objects.
func Sets() []kernel.Set {
	var out []kernel.Set
	for _, base := range recordBases {
		for _, f := range service.Families {
			out = append(out, recordSet(base, f))
		}
	}
	return out
}

// recordSet is the definition of one of Sets.
func recordSet(base string, f service.Family) kernel.Set {
	s := kernel.Set{Name: kernel.FamilySet(base, f), Family: f, Dynamic: true}
	switch base {
	case kernel.SetDrain:
		s.Type, s.Timeout = kernel.HashIPPortIP, DrainSlack // entries bring their own
	case kernel.SetVIP:
		s.Type = kernel.HashIP
	case kernel.SetVirtual:
		s.Type = kernel.HashIPPort
	}
	return s
}

var recordNames = func() map[string]bool {
	out := map[string]bool{}
	for _, s := range Sets() {
		out[s.Name] = true
	}
	return out
}()

func isRecordName(name string) bool { return recordNames[name] }

func isRecord(s kernel.Set) bool { return recordNames[s.Name] }

// recording reports whether the record has anything to say.
func (b *Backend) recording() bool { return len(b.servers)+len(b.addresses) > 0 }

// entries are entries of the record, collected to be added or deleted at once.
type entries struct {
	backend *Backend
	now     time.Time
	of      map[entriesKey][]string
}

type entriesKey struct {
	base    string
	family  service.Family
	timeout uint32
}

func (b *Backend) newEntries() *entries {
	return &entries{backend: b, now: b.config.Now(), of: map[entriesKey][]string{}}
}

func (e *entries) put(base string, a netip.Addr, timeout uint32, entry string) {
	k := entriesKey{base, service.FamilyOf(a), timeout}
	e.of[k] = append(e.of[k], entry)
}

// virtual: a virtual server is kproxy's.
func (e *entries) virtual(v kernel.Virtual) {
	e.put(kernel.SetVirtual, v.Address.Addr(), 0, kernel.AddressEntry(v.Protocol, v.Address))
}

// vip: an address is on the link.
func (e *entries) vip(a netip.Addr) { e.put(kernel.SetVIP, a, 0, a.String()) }

// drainUntil: a real server of s drains.
func (e *entries) drainUntil(s *server, real netip.AddrPort, deadline time.Time) {
	left := (deadline.Sub(e.now) + time.Second - 1) / time.Second
	e.put(kernel.SetDrain, real.Addr(), uint32(max(1, int64(left)+DrainSlack)), drainEntry(s, real))
}

// drain: a real server of s doesn't drain any more. The entry has no port of a
// real server, so it stays while another one drains at the same address.
func (e *entries) drain(s *server, real netip.AddrPort) {
	for other := range s.draining {
		if other.Addr() == real.Addr() && other != real {
			return
		}
	}
	e.put(kernel.SetDrain, real.Addr(), 0, drainEntry(s, real))
}

func drainEntry(s *server, real netip.AddrPort) string {
	return kernel.AddressEntry(s.Protocol, s.Address) + "," + real.Addr().String()
}

// keys are in the same order each time.
func (e *entries) keys() []entriesKey {
	maps.DeleteFunc(e.of, func(_ entriesKey, list []string) bool { return len(list) == 0 })
	return slices.SortedFunc(maps.Keys(e.of), func(a, b entriesKey) int {
		return cmp.Or(strings.Compare(a.base, b.base), cmp.Compare(a.family, b.family), cmp.Compare(a.timeout, b.timeout))
	})
}

// insert adds the entries.
func (e *entries) insert() error {
	var errs *multierror.Error
	for _, k := range e.keys() {
		s := recordSet(k.base, k.family)
		if err := e.backend.config.Sets.Add(s, k.timeout, e.of[k]...); err != nil {
			errs = multierror.Append(errs, fmt.Errorf("add to set %s: %w", s.Name, err))
		}
	}
	return errs.ErrorOrNil()
}

// remove deletes the entries.
func (e *entries) remove() error {
	var errs *multierror.Error
	for _, k := range e.keys() {
		s := recordSet(k.base, k.family)
		if err := e.backend.config.Sets.Delete(s, e.of[k]...); err != nil && !errors.Is(err, kernel.ErrNotFound) {
			errs = multierror.Append(errs, fmt.Errorf("delete from set %s: %w", s.Name, err))
		}
	}
	return errs.ErrorOrNil()
}

// everything returns what the record should say.
func (b *Backend) everything() *entries {
	e := b.newEntries()
	for _, s := range b.servers {
		e.virtual(s.Virtual)
		for a, deadline := range s.draining {
			e.drainUntil(s, a, deadline)
		}
	}
	for a := range b.addresses {
		e.vip(a)
	}
	return e
}

// record is the record as it was read: per set its entries with the seconds that
// they live yet. A set that doesn't exist isn't in it.
type record map[string]map[string]uint32

func (b *Backend) readRecord() (record, error) {
	states, err := b.config.Sets.List(isRecordName)
	if err != nil {
		return nil, fmt.Errorf("read the record of virtual servers: %w", err)
	}
	out := record{}
	for _, s := range states {
		if !isRecordName(s.Name) {
			continue
		}
		m := make(map[string]uint32, len(s.Entries))
		for i, e := range s.Entries {
			m[e] = 0
			if i < len(s.Remaining) {
				m[e] = s.Remaining[i]
			}
		}
		out[s.Name] = m
	}
	return out, nil
}

// mend makes the record say what it should, in the sets that exist, and returns
// it.
func (b *Backend) mend(r record) (map[string][]string, error) {
	lack, stale := b.everything(), b.newEntries()
	out := map[string][]string{}
	for k, list := range lack.of {
		name := kernel.FamilySet(k.base, k.family)
		out[name] = append(out[name], list...)
		have, exists := r[name]
		lack.of[k] = slices.DeleteFunc(slices.Clone(list), func(e string) bool { _, ok := have[e]; return ok || !exists })
	}
	for _, base := range recordBases {
		for _, f := range service.Families {
			name := kernel.FamilySet(base, f)
			slices.Sort(out[name])
			out[name] = slices.Compact(out[name])
			for e := range r[name] {
				if _, wanted := slices.BinarySearch(out[name], e); !wanted {
					k := entriesKey{base: base, family: f}
					stale.of[k] = append(stale.of[k], e)
				}
			}
		}
	}
	if err := lack.insert(); err != nil {
		return nil, err
	}
	return out, stale.remove()
}
