package kerneltest

import (
	"errors"
	"maps"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/ipvs"
	"kproxy.dev/kproxy/service"
)

// modelDummy is the [kernel.DummyLink] of a Host.
type modelDummy struct {
	up        bool
	addresses map[netip.Addr]bool
}

func (m *modelDummy) sorted() []netip.Addr {
	return slices.SortedFunc(maps.Keys(m.addresses), netip.Addr.Compare)
}

// modelLink is the [ipvs.Link] of a Host.
type modelLink struct{ host *Host }

// Link returns the host's [kernel.DummyLink].
func (h *Host) Link() ipvs.Link { return modelLink{h} }

func (l modelLink) State() (ipvs.LinkState, error) {
	l.host.mu.Lock()
	defer l.host.mu.Unlock()
	m := l.host.link
	if m == nil {
		return ipvs.LinkState{}, nil
	}
	return ipvs.LinkState{Exists: true, Up: m.up, Addresses: m.sorted()}, nil
}

func (l modelLink) Ensure() error { return errors.Join(l.create(), l.setUp()) }

// create makes the link, which is down.
func (l modelLink) create() error {
	l.host.mu.Lock()
	defer l.host.mu.Unlock()
	if l.host.link == nil {
		l.host.link = &modelDummy{addresses: map[netip.Addr]bool{}}
	}
	return nil
}

func (l modelLink) setUp() error {
	l.host.mu.Lock()
	defer l.host.mu.Unlock()
	m := l.host.link
	if m == nil {
		return unix.ENODEV
	}
	m.up = true
	return nil
}

func (l modelLink) Remove() error {
	l.host.mu.Lock()
	defer l.host.mu.Unlock()
	l.host.link = nil
	return nil
}

func (l modelLink) Add(addresses ...netip.Addr) (map[netip.Addr]error, error) {
	return l.each(addresses, func(m *modelDummy, a netip.Addr) {
		if !m.addresses[a] {
			m.addresses[a] = true
			l.host.reachable(a)
		}
	})
}

func (l modelLink) Delete(addresses ...netip.Addr) (map[netip.Addr]error, error) {
	return l.each(addresses, func(m *modelDummy, a netip.Addr) {
		if !m.addresses[a] {
			return
		}
		delete(m.addresses, a)
		for k, v := range l.host.virtuals {
			if k.address.Addr() == a && !slices.Contains(l.host.node, a) {
				for _, real := range v.order() {
					l.host.cutOff(v, real, "whose address was taken off the link")
				}
			}
		}
	})
}

func (l modelLink) each(addresses []netip.Addr, do func(*modelDummy, netip.Addr)) (map[netip.Addr]error, error) {
	l.host.mu.Lock()
	defer l.host.mu.Unlock()
	m := l.host.link
	if m == nil {
		return nil, kernel.ErrNotFound
	}
	for _, a := range addresses {
		do(m, a)
	}
	return nil, nil
}

// reachable notes addresses that packets are delivered to before everything is
// there that they need: somebody who answers, the record of that, and the rules
// that masquerade.
func (h *Host) reachable(a netip.Addr) {
	answers := false
	for k := range h.virtuals {
		answers = answers || k.address.Addr() == a && h.recorded(k)
	}
	f := service.FamilyOf(a)
	ruled := slices.ContainsFunc(h.chains[f], func(c kernel.Chain) bool {
		return c.Table == "nat" && c.Name == kernel.Prefix+"VIRTUAL" && len(c.Rules) > 0
	})
	for _, hook := range []string{"PREROUTING", "OUTPUT", "POSTROUTING"} {
		ruled = ruled && slices.ContainsFunc(h.jumps[f], func(j kernel.Jump) bool { return j.Table == "nat" && j.From == hook })
	}
	if !answers || !ruled {
		h.early = append(h.early, a)
	}
}

// Early returns the service addresses that were put on kproxy's link before
// everything was there that their packets need.
func (h *Host) Early() []netip.Addr {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.early)
}

// SetNodeAddresses says which addresses the node has on other links.
func (h *Host) SetNodeAddresses(addresses []netip.Addr) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.node = slices.Clone(addresses)
}
