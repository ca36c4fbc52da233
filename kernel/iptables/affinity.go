package iptables

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/hashicorp/go-multierror"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/plan"
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

// SeedAffinity implements [kernel.AffinityKeeper].
func (p *Plane) SeedAffinity(_ context.Context, to []kernel.Moving, clients map[service.Key][]kernel.Client) error {
	var errs *multierror.Error
	for _, m := range to {
		if k := m.Service.Port.Key; m.Service.DataPlane == plan.IPTables {
			if err := seed(p.env.Sets, m.Service, clients[k]); err != nil {
				errs = multierror.Append(errs, fmt.Errorf("seed affinity of %s: %w", k, err))
			}
		}
	}
	return errs.ErrorOrNil()
}

// seed makes clients keep their endpoints when s moves to the kernel. Clients of
// endpoints that have no set (they aren't used any more) are passed over. A client may
// be in another endpoint's set from an earlier time in the kernel, and the rules take
// the first that has it, so it is deleted there.
func seed(store kernel.SetStore, s *plan.Service, clients []kernel.Client) error {
	type batch struct {
		endpoint netip.AddrPort
		seconds  uint32
	}
	k := s.Port.Key
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
		err := store.Add(EndpointAffinity(k, b.endpoint), b.seconds, addresses...)
		if errors.Is(err, kernel.ErrNotFound) {
			delete(kept, b.endpoint) // these clients are wherever they are
		} else if err != nil {
			return err
		}
	}
	for i := range s.Endpoints {
		e := s.Endpoints[i].Address
		var others []string
		for o, addresses := range kept {
			if o != e && o.Addr().Is4() == e.Addr().Is4() {
				others = append(others, addresses...)
			}
		}
		if len(others) == 0 {
			continue
		}
		if err := store.Delete(EndpointAffinity(k, e), others...); err != nil && !errors.Is(err, kernel.ErrNotFound) {
			return err
		}
	}
	return nil
}

// ReadAffinity implements [kernel.AffinityKeeper].
func (p *Plane) ReadAffinity(from []kernel.Moving) (map[service.Key][]kernel.Client, error) {
	type place struct {
		service  service.Key
		endpoint netip.AddrPort
	}
	sets := map[string]place{}
	for _, m := range from {
		if m.Service.DataPlane != plan.IPTables {
			continue
		}
		for i := range m.Service.Endpoints {
			at := place{m.Service.Port.Key, m.Service.Endpoints[i].Address}
			sets[kernel.AffinitySet(at.service, at.endpoint)] = at
		}
	}
	out := map[service.Key][]kernel.Client{}
	if len(sets) == 0 {
		return out, nil
	}
	states, err := p.env.Sets.List(func(name string) bool { _, ok := sets[name]; return ok })
	if err != nil {
		return out, fmt.Errorf("read affinity: %w", err)
	}
	for _, s := range states {
		at, ok := sets[s.Name]
		if !ok {
			continue
		}
		for i, e := range s.Entries {
			a, err := netip.ParseAddr(e)
			if err != nil {
				return out, fmt.Errorf("read affinity of %s: %w", at.service, err)
			}
			out[at.service] = append(out[at.service], kernel.Client{Address: a, Endpoint: at.endpoint, Remaining: time.Duration(s.Remaining[i]) * time.Second})
		}
	}
	return out, nil
}
