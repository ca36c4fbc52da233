package iptables

import (
	"context"
	"net/netip"

	"github.com/hashicorp/go-multierror"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// Plane is the [steering.RulesetPlane] of iptables: the rules that all services share, and those
// of the services that iptables carries.
type Plane struct {
	*Backend
	*Watch
	*Renderer
}

var _ steering.RulesetPlane = (*Plane)(nil)

// NewPlane returns the layer. It opens the sockets of a [Watch].
func NewPlane(c Config, o Options) (*Plane, error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	b := New(c)
	w, err := NewWatch(b)
	if err != nil {
		return nil, err
	}
	return &Plane{b, w, NewRenderer(o)}, nil
}

// Fresh is [Render].
func (r *Renderer) Fresh(p *plan.Plan) kernel.Ruleset { return Render(p, r.options) }

// Programmed is [Programmed].
func (*Renderer) Programmed(have, want kernel.Ruleset, p *plan.Plan) map[service.Key]uint64 {
	return Programmed(have, want, p)
}

// Adopted is [Adopted].
func (*Renderer) Adopted(have kernel.Ruleset, s *service.Snapshot) map[service.Key]bool {
	return Adopted(have, s)
}

// ReadAffinity implements [kernel.AffinityKeeper].
func (p *Plane) ReadAffinity(from []kernel.Moving) (map[service.Key][]kernel.Client, error) {
	out := map[service.Key][]kernel.Client{}
	var errs *multierror.Error
	for _, m := range from {
		if m.Service.DataPlane != plan.IPTables {
			continue
		}
		k := m.Service.Port.Key
		clients, err := ReadAffinity(p.config.Sets, k, addresses(m.Service))
		errs = multierror.Append(errs, err)
		out[k] = clients
	}
	return out, errs.ErrorOrNil()
}

// SeedAffinity implements [kernel.AffinityKeeper].
func (p *Plane) SeedAffinity(_ context.Context, to []kernel.Moving, clients map[service.Key][]kernel.Client) error {
	var errs *multierror.Error
	for _, m := range to {
		if m.Service.DataPlane != plan.IPTables {
			continue
		}
		errs = multierror.Append(errs, SeedAffinity(p.config.Sets, m.Service.Port.Key, addresses(m.Service), clients[m.Service.Port.Key]))
	}
	return errs.ErrorOrNil()
}

// addresses are those of s's endpoints, usable or not.
func addresses(s *plan.Service) []netip.AddrPort {
	out := make([]netip.AddrPort, len(s.Endpoints))
	for i := range s.Endpoints {
		out[i] = s.Endpoints[i].Address
	}
	return out
}
