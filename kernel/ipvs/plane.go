package ipvs

import (
	"context"
	"maps"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// Plane is the [kernel.Layer] of IPVS. The layer below has the rules and sets.
type Plane struct {
	*Backend
	*Watch
	below    kernel.Layer
	renderer *Renderer
}

var (
	_ kernel.Layer   = (*Plane)(nil)
	_ kernel.Counter = (*Plane)(nil)
	_ kernel.Drainer = (*Plane)(nil)
)

// NewPlane returns the layer over another, whose Backend is to be c's Rules.
func NewPlane(c Config, o Options, below kernel.Layer) (*Plane, error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	c.Rules = below
	b, err := New(c)
	if err != nil {
		return nil, err
	}
	return &Plane{b, NewWatch(b, below), below, NewRenderer(o)}, nil
}

// Render implements [kernel.Renderer].
func (p *Plane) Render(to *plan.Plan, d plan.Delta) kernel.Ruleset {
	return kernel.Merge(p.below.Render(to, d), p.renderer.Render(to, d))
}

// Fresh implements [kernel.Renderer].
func (p *Plane) Fresh(of *plan.Plan) kernel.Ruleset {
	return kernel.Merge(p.below.Fresh(of), Render(of, p.renderer.options))
}

// Programmed implements [kernel.Layer].
func (p *Plane) Programmed(have, want kernel.Ruleset, of *plan.Plan) map[service.Key]uint64 {
	out := p.below.Programmed(have, want, of)
	maps.Copy(out, Programmed(have, want, of))
	return out
}

// Adopted implements [kernel.Layer].
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
