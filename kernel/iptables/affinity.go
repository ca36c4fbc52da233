package iptables

import (
	"errors"
	"fmt"
	"net/netip"
	"time"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/service"
)

// affinityDefault is the default lifetime of affinity sets' entries in
// seconds, Kubernetes' default; every rule brings its service's own.
const affinityDefault = 10800

// EndpointAffinity is the set of the clients of one endpoint of k.
func EndpointAffinity(k service.Key, endpoint netip.AddrPort) kernel.Set {
	return kernel.Set{
		Name: kernel.AffinitySet(k, endpoint), Type: kernel.HashIP, Family: service.FamilyOf(endpoint.Addr()),
		Timeout: affinityDefault, Dynamic: true, Owner: k,
	}
}

// SeedAffinity makes clients keep their endpoints when k moves to the kernel.
// Clients of endpoints that have no set (they aren't used any more) are passed
// over. Endpoints are all of k's: a client may be in another's set from an
// earlier time in the kernel, and the rules take the first that has it.
func SeedAffinity(store kernel.SetStore, k service.Key, endpoints []netip.AddrPort, clients []kernel.Client) error {
	type batch struct {
		endpoint netip.AddrPort
		seconds  uint32
	}
	batches := map[batch][]string{}
	kept := map[netip.AddrPort][]string{} // what each endpoint has, of any lifetime
	for _, c := range clients {
		b := batch{c.Endpoint, uint32((c.Remaining + time.Second - 1) / time.Second)}
		if b.seconds > 0 {
			batches[b] = append(batches[b], c.Address.String())
			kept[c.Endpoint] = append(kept[c.Endpoint], c.Address.String())
		}
	}
	for b, addresses := range batches {
		s := EndpointAffinity(k, b.endpoint)
		err := store.Add(s, b.seconds, addresses...)
		if err != nil && !errors.Is(err, kernel.ErrNotFound) {
			return fmt.Errorf("seed affinity of %s: %w", k, err)
		}
		if err != nil {
			delete(kept, b.endpoint) // these clients are wherever they are
		}
	}
	for _, e := range endpoints {
		if err := forgetElsewhere(store, k, e, kept); err != nil {
			return fmt.Errorf("seed affinity of %s: %w", k, err)
		}
	}
	return nil
}

// forgetElsewhere deletes from e's set the clients that other endpoints of its
// family have been given.
func forgetElsewhere(store kernel.SetStore, k service.Key, e netip.AddrPort, kept map[netip.AddrPort][]string) error {
	var others []string
	for o, addresses := range kept {
		if o != e && o.Addr().Is4() == e.Addr().Is4() {
			others = append(others, addresses...)
		}
	}
	if len(others) == 0 {
		return nil
	}
	if err := store.Delete(EndpointAffinity(k, e), others...); err != nil && !errors.Is(err, kernel.ErrNotFound) {
		return err
	}
	return nil
}

// ReadAffinity returns the clients that the kernel keeps with the given
// endpoints of k, for userspace to go on with.
func ReadAffinity(store kernel.SetStore, k service.Key, endpoints []netip.AddrPort) ([]kernel.Client, error) {
	of := make(map[string]netip.AddrPort, len(endpoints))
	for _, e := range endpoints {
		of[kernel.AffinitySet(k, e)] = e
	}
	states, err := store.List(func(name string) bool { _, ok := of[name]; return ok })
	if err != nil {
		return nil, fmt.Errorf("read affinity of %s: %w", k, err)
	}
	var out []kernel.Client
	for _, s := range states {
		endpoint, ok := of[s.Name]
		if !ok {
			continue
		}
		for i, e := range s.Entries {
			a, err := netip.ParseAddr(e)
			if err != nil {
				return nil, fmt.Errorf("read affinity of %s: %w", k, err)
			}
			out = append(out, kernel.Client{Address: a, Endpoint: endpoint, Remaining: time.Duration(s.Remaining[i]) * time.Second})
		}
	}
	return out, nil
}
