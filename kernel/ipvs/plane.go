package ipvs

import (
	"context"
	"errors"
	"maps"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// Plane is the [steering.RulesetPlane] of IPVS. The layer below has the rules and sets.
type Plane struct {
	*Backend
	*Watch
	*over
	below steering.RulesetPlane
}

var (
	_ steering.RulesetPlane = (*Plane)(nil)
	_ kernel.Drainer        = (*Plane)(nil)
)

// NewPlane returns the layer over another, which is to be c's Rules.
func NewPlane(c Config, o steering.Options, below steering.RulesetPlane) *Plane {
	c.Rules = below
	b := New(c)
	return &Plane{b, NewWatch(b, below), &over{below, NewRenderer(o)}, below}
}

// over renders IPVS over what is below.
type over struct {
	below kernel.Renderer
	own   *Renderer
}

// Render implements [kernel.Renderer].
func (r *over) Render(p *plan.Plan, d plan.Delta) kernel.Ruleset {
	return kernel.Merge(r.below.Render(p, d), r.own.Render(p, d))
}

// Fresh implements [kernel.Renderer].
func (r *over) Fresh(p *plan.Plan) kernel.Ruleset {
	return kernel.Merge(r.below.Fresh(p), Render(p, r.own.options))
}

// Programmed implements [steering.RulesetPlane].
func (p *Plane) Programmed(have, want kernel.Ruleset, of *plan.Plan) map[service.Key]uint64 {
	out := p.below.Programmed(have, want, of)
	maps.Copy(out, Programmed(have, want, of))
	return out
}

// Adopted implements [steering.RulesetPlane].
func (p *Plane) Adopted(have kernel.Ruleset, s *service.Snapshot) map[service.Key]bool {
	out := p.below.Adopted(have, s)
	maps.Copy(out, Adopted(have, s))
	return out
}

// Counts implements [kernel.Counter].
func (p *Plane) Counts(ctx context.Context) (kernel.Counts, error) {
	return p.below.Counts(ctx)
}

// ReadAffinity implements [kernel.AffinityKeeper].
func (p *Plane) ReadAffinity(from []kernel.Moving) (map[service.Key][]kernel.Client, error) {
	out, err := p.below.ReadAffinity(from)
	if own := p.virtuals(from); len(own) > 0 {
		more, errOwn := ReadAffinity(own)
		maps.Copy(out, more)
		err = errors.Join(err, errOwn)
	}
	return out, err
}

// SeedAffinity implements [kernel.AffinityKeeper] for services of other data planes. To IPVS nothing but another load balancer's
// synchronisation could tell of clients, so those of its services may change their endpoint once, when it is offloaded.
func (p *Plane) SeedAffinity(ctx context.Context, to []kernel.Moving, clients map[service.Key][]kernel.Client) error {
	return p.below.SeedAffinity(ctx, to, clients)
}

func (p *Plane) virtuals(services []kernel.Moving) []kernel.Virtual {
	var out []kernel.Virtual
	for _, m := range services {
		if m.Service.DataPlane != plan.IPVS {
			continue
		}
		out = append(out, Virtuals(m.Service, m.Policy, p.own.options)...)
	}
	return out
}
