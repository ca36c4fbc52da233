package ipvs

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/service"
)

// Watch notices when others change what kproxy has in the kernel, so
// that the agent reads back and repairs: virtual and real servers, the link and
// its addresses, the record, and by another Watch the rules. It is safe for concurrent use.
type Watch struct {
	backend *Backend
	rules   steering.Watch
}

// NewWatch returns a Watch over what b applies, and over what rules watches. It
// knows nothing to compare with before Expect.
func NewWatch(b *Backend, rules steering.Watch) *Watch {
	return &Watch{backend: b, rules: rules}
}

// Close closes the watch of the rules.
func (w *Watch) Close() { w.rules.Close() }

// Expect tells what is in the kernel now: what an Apply that succeeded led to.
// If it isn't there any more, the next Check says so.
func (w *Watch) Expect(want kernel.Ruleset) {
	w.rules.Expect(want)
	w.backend.mu.Lock()
	defer w.backend.mu.Unlock()
	w.backend.expected = &want
}

// Check returns what differs from what is expected, a phrase each; nothing if
// all is well, or while a change of kproxy's own is under way.
func (w *Watch) Check(ctx context.Context) ([]string, error) {
	out, err := w.rules.Check(ctx)
	if err != nil {
		return nil, err
	}
	b := w.backend
	if !b.mu.TryLock() {
		return out, nil
	}
	defer b.mu.Unlock()
	if b.expected == nil {
		return out, nil
	}
	for _, check := range []func(*kernel.Ruleset) ([]string, error){b.checkServers, b.checkLink, b.checkRecord} {
		found, err := check(b.expected)
		if err != nil {
			return nil, fmt.Errorf("watch virtual servers: %w", err)
		}
		out = append(out, found...)
	}
	return out, nil
}

// pauseFactor is how many times what it took to read all virtual servers passes before they
// are read again: at most a twentieth of a processor's time goes into it.
const pauseFactor = 20

// checkServers looks for what is missing or has other settings. What there is
// besides may be foreign, or drain.
func (b *Backend) checkServers(want *kernel.Ruleset) ([]string, error) {
	start := b.config.Now()
	if start.Before(b.checkAfter) {
		return nil, nil
	}
	servers, err := b.config.Table.List()
	if err != nil {
		return nil, err
	}
	now := b.config.Now()
	b.checkAfter = now.Add(pauseFactor * now.Sub(start))
	have := make([]kernel.Virtual, len(servers))
	for i := range servers {
		have[i] = servers[i].Virtual
	}
	var gone, changed, reals []string
	for _, c := range kernel.Diff(kernel.Ruleset{Virtuals: have}, kernel.Ruleset{Virtuals: want.Virtuals}).Virtuals {
		_, there := slices.BinarySearchFunc(have, c.Virtual, kernel.CompareVirtuals)
		switch {
		case c.Remove:
		case !there:
			gone = append(gone, name(&c.Virtual))
		default:
			if c.Settings {
				changed = append(changed, name(&c.Virtual))
			}
			if len(c.Set) > 0 {
				reals = append(reals, name(&c.Virtual))
			}
		}
	}
	return slices.Concat(kernel.Some("virtual server %s is gone", gone), kernel.Some("virtual server %s was changed", changed),
		kernel.Some("real servers of %s were changed", reals)), nil
}

func name(v *kernel.Virtual) string { return v.Protocol.String() + " " + v.Address.String() }

// checkLink looks for addresses that are missing, and for some that kproxy didn't put there.
func (b *Backend) checkLink(want *kernel.Ruleset) ([]string, error) {
	link, err := b.config.Link.State()
	if err != nil {
		return nil, err
	}
	if len(want.Addresses) > 0 && !link.Exists {
		return []string{"link " + kernel.DummyLink + " is gone"}, nil
	}
	if len(want.Addresses) > 0 && !link.Up {
		return []string{"link " + kernel.DummyLink + " is down"}, nil
	}
	var gone, strange []string
	for _, a := range want.Addresses {
		if _, ok := slices.BinarySearchFunc(link.Addresses, a, netip.Addr.Compare); !ok {
			gone = append(gone, a.String())
		}
	}
	for _, a := range link.Addresses {
		if _, ours := b.addresses[a]; !ours {
			strange = append(strange, a.String())
		}
	}
	return slices.Concat(kernel.Some("address %s of "+kernel.DummyLink+" is gone", gone),
		kernel.Some("address %s of "+kernel.DummyLink+" isn't of a service", strange)), nil
}

// checkRecord compares how many entries there are. Those of real servers that
// drain expire in time, so there may be more of them than needed.
func (b *Backend) checkRecord(want *kernel.Ruleset) ([]string, error) {
	states, err := b.config.Sets.List(nil)
	if err != nil {
		return nil, err
	}
	count := map[string]int{}
	for _, s := range states {
		count[s.Name] = s.Count
	}
	expected := b.recorded()
	var out []string
	for _, s := range want.Sets {
		have, exists := count[s.Name]
		n := expected[s.Name]
		if !isRecord(s) || !exists || have == n || have > n && strings.HasPrefix(s.Name, kernel.SetDrain) {
			continue // that a set is missing, the watch of the rules tells
		}
		out = append(out, fmt.Sprintf("set %s has %d entries, not %d", s.Name, have, n))
	}
	return out, nil
}

// recorded counts the entries that each set of the record should have.
func (b *Backend) recorded() map[string]int {
	out := map[string]int{}
	for _, s := range b.servers {
		f := service.FamilyOf(s.Address.Addr())
		out[kernel.FamilySet(kernel.SetVirtual, f)]++
		draining := map[netip.Addr]bool{} // an entry has no port of a real server
		for a := range s.draining {
			draining[a.Addr()] = true
		}
		out[kernel.FamilySet(kernel.SetDrain, f)] += len(draining)
	}
	for a := range b.addresses {
		out[kernel.FamilySet(kernel.SetVIP, service.FamilyOf(a))]++
	}
	return out
}
