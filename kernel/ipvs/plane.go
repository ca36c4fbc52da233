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
	_ kernel.Counter        = (*Plane)(nil)
	_ kernel.AffinityKeeper = (*Plane)(nil)
	_ kernel.Drainer        = (*Plane)(nil)
)

// NewPlane returns the layer over another, which is to be c's Rules.
func NewPlane(c Config, o Options, below steering.RulesetPlane) *Plane {
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
	if c, ok := p.below.(kernel.Counter); ok {
		return c.Counts(ctx)
	}
	return kernel.Counts{}, nil
}

// ReadAffinity implements [kernel.AffinityKeeper].
func (p *Plane) ReadAffinity(from []kernel.Moving) (map[service.Key][]kernel.Client, error) {
	out, err := map[service.Key][]kernel.Client{}, error(nil)
	if own := p.virtuals(from); len(own) > 0 {
		out, err = ReadAffinity(own)
	}
	if k, ok := p.below.(kernel.AffinityKeeper); ok {
		more, errBelow := k.ReadAffinity(from)
		maps.Copy(out, more)
		err = errors.Join(err, errBelow)
	}
	return out, err
}

// SeedAffinity implements [kernel.AffinityKeeper].
func (p *Plane) SeedAffinity(ctx context.Context, to []kernel.Moving, clients map[service.Key][]kernel.Client) (err error) {
	if own := p.virtuals(to); len(own) > 0 {
		err = SeedAffinity(ctx, p.own.options.Marks.Own(), own, clients)
	}
	if k, ok := p.below.(kernel.AffinityKeeper); ok {
		err = errors.Join(err, k.SeedAffinity(ctx, to, clients))
	}
	return err
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
