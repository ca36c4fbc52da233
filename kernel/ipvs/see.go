package ipvs

import (
	"errors"
	"fmt"
	"net/netip"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/service"
)

// Seen is a virtual server with its counters, for people to look at.
type Seen struct {
	kernel.Virtual // without Reals
	Reals          []SeenReal
	Packets, Bytes uint64 // from clients
}

// SeenReal is a real server, in the kernel's order, which decides ties.
type SeenReal struct {
	kernel.Real
	Packets, Bytes   uint64 // from clients
	Active, Inactive int    // connections
}

// See returns the virtual server at an address, whoever made it; false if there
// is none.
func (t *Netlink) See(p service.Protocol, a netip.AddrPort) (Seen, bool, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	s, err := t.handle.GetService(serviceOf(kernel.Virtual{Protocol: p, Address: a}))
	if err = classify(err); errors.Is(err, kernel.ErrNotFound) {
		return Seen{}, false, nil
	}
	if err != nil {
		return Seen{}, false, fmt.Errorf("look at virtual server %s %s: %w", p, a, err)
	}
	v, ok := virtualOf(s)
	if !ok {
		return Seen{}, false, nil
	}
	seen := Seen{Virtual: v, Packets: uint64(s.Stats.PacketsIn), Bytes: s.Stats.BytesIn}
	destinations, err := t.handle.GetDestinations(s)
	if err != nil {
		return Seen{}, false, fmt.Errorf("list real servers of %s %s: %w", p, a, classify(err))
	}
	for _, d := range destinations {
		at, _ := netip.AddrFromSlice(d.Address)
		seen.Reals = append(seen.Reals, SeenReal{
			Real:    kernel.Real{Address: netip.AddrPortFrom(at.Unmap(), d.Port), Weight: uint32(d.Weight)},
			Packets: uint64(d.Stats.PacketsIn), Bytes: d.Stats.BytesIn, Active: d.ActiveConnections, Inactive: d.InactiveConnections,
		})
	}
	return seen, true, nil
}
