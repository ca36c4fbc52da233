package kerneltest

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/service"
)

// Links are the dummy links of a [Host]. Their methods refuse what the kernel
// refuses, with the same error numbers.
type Links struct{ host *Host }

// Links returns the host's dummy links.
func (h *Host) Links() *Links { return &Links{h} }

type modelLink struct {
	up        bool
	addresses map[netip.Addr]bool
}

// Add makes a link, which is down.
func (l *Links) Add(name string) error {
	l.host.mu.Lock()
	defer l.host.mu.Unlock()
	if l.host.links[name] != nil {
		return unix.EEXIST
	}
	l.host.links[name] = &modelLink{addresses: map[netip.Addr]bool{}}
	return nil
}

// Exists reports whether there is a link, and whether it is up.
func (l *Links) Exists(name string) (exists, up bool) {
	l.host.mu.Lock()
	defer l.host.mu.Unlock()
	m := l.host.links[name]
	return m != nil, m != nil && m.up
}

// SetUp sets a link up.
func (l *Links) SetUp(name string) error {
	l.host.mu.Lock()
	defer l.host.mu.Unlock()
	if l.host.links[name] == nil {
		return unix.ENODEV
	}
	l.host.links[name].up = true
	return nil
}

// Delete removes a link with its addresses.
func (l *Links) Delete(name string) error {
	l.host.mu.Lock()
	defer l.host.mu.Unlock()
	if l.host.links[name] == nil {
		return unix.ENODEV
	}
	delete(l.host.links, name)
	return nil
}

// Addresses returns a link's addresses in order.
func (l *Links) Addresses(name string) ([]netip.Addr, error) {
	l.host.mu.Lock()
	defer l.host.mu.Unlock()
	if l.host.links[name] == nil {
		return nil, unix.ENODEV
	}
	return slices.SortedFunc(maps.Keys(l.host.links[name].addresses), netip.Addr.Compare), nil
}

// AddAddress adds an address to a link.
func (l *Links) AddAddress(name string, a netip.Addr) error {
	l.host.mu.Lock()
	defer l.host.mu.Unlock()
	switch m := l.host.links[name]; {
	case m == nil:
		return unix.ENODEV
	case m.addresses[a]:
		return unix.EEXIST
	default:
		m.addresses[a] = true
		l.host.reachable(name, a)
	}
	return nil
}

// DelAddress removes an address from a link.
func (l *Links) DelAddress(name string, a netip.Addr) error {
	l.host.mu.Lock()
	defer l.host.mu.Unlock()
	switch m := l.host.links[name]; {
	case m == nil:
		return unix.ENODEV
	case !m.addresses[a]:
		return unix.EADDRNOTAVAIL
	default:
		delete(m.addresses, a)
	}
	for k, v := range l.host.virtuals {
		if name == kernel.DummyLink && k.address.Addr() == a && !slices.Contains(l.host.node, a) {
			for _, real := range v.order() {
				l.host.cutOff(v, real, "whose address was taken off the link")
			}
		}
	}
	return nil
}

// reachable notes addresses that packets are delivered to before everything is
// there that they need: somebody who answers, the record of that, and the rules
// that masquerade.
func (h *Host) reachable(link string, a netip.Addr) {
	if link != kernel.DummyLink {
		return
	}
	answers := false
	for k := range h.virtuals {
		answers = answers || k.address.Addr() == a && h.recorded(k)
	}
	nat := h.tables[service.FamilyOf(a)]["nat"]
	ruled := len(nat[kernel.Prefix+"VIRTUAL"]) > 0
	for _, hook := range builtin["nat"] {
		ruled = ruled && (hook == "INPUT" || slices.ContainsFunc(nat[hook], mentionsOwn))
	}
	if !answers || !ruled {
		h.early = append(h.early, a)
	}
}

// mentionsOwn reports whether a rule is about one of kproxy's chains.
func mentionsOwn(rule string) bool { return strings.Contains(rule, kernel.Prefix) }

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

// ForeignLinks prints the dummy links that aren't kproxy's.
func (h *Host) ForeignLinks() string {
	h.mu.Lock()
	defer h.mu.Unlock()
	out := ""
	for _, name := range slices.Sorted(maps.Keys(h.links)) {
		if name != kernel.DummyLink {
			m := h.links[name]
			out += fmt.Sprintln("link", name, "up", m.up, slices.SortedFunc(maps.Keys(m.addresses), netip.Addr.Compare))
		}
	}
	return out
}
