// Package flows has connections and clients follow the plan: it repairs and deletes entries of conntrack, takes clients along that have
// affinity, and remembers what ended. Each Run is a loop, beside which the other methods may be called.
package flows

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"slices"
	"time"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/lb"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// Affinity hands clients over between userspace and the kernel. The fast loop asks it,
// and it works in a loop of its own.
type Affinity struct {
	log   *slog.Logger
	plane kernel.AffinityKeeper
	table func(service.Key) *lb.Affinity // of userspace; nil for a service without
	jobs  chan affinityJob
}

// affinityPatience is how long a pass waits for clients to be handed over. Usually that
// takes some milliseconds; where the kernel has some hundred thousand connections it may
// take seconds, and goes on beside the move: a client that connects before its turn may
// get another endpoint.
const affinityPatience = time.Second

// affinityJob are the services that move in one pass.
type affinityJob struct {
	begun time.Time
	in    []kernel.Moving // to the kernel
	out   []kernel.Moving // from there
	is    map[service.Key]*plan.Service
	done  chan struct{} // closed at the end
}

// affinityJobOf returns the services with affinity that d moves to the kernel or from there.
func affinityJobOf(old, p *plan.Plan, d plan.Delta) affinityJob {
	j := affinityJob{is: map[service.Key]*plan.Service{}}
	for _, c := range d.Changes {
		was, is := c.Was, c.Is
		if was == nil || is == nil || is.Port.Affinity == 0 {
			continue
		}
		switch {
		case was.DataPlane == plan.Userspace && is.InKernel():
			j.in = append(j.in, kernel.Moving{Service: is, Policy: &p.Policy})
		case was.InKernel() && is.DataPlane == plan.Userspace:
			j.out = append(j.out, kernel.Moving{Service: was, Policy: &old.Policy})
		default:
			continue
		}
		j.is[is.Port.Key] = is
	}
	return j
}

// NewAffinity returns an Affinity of a data plane; table returns userspace's of a service, nil for none.
func NewAffinity(log *slog.Logger, plane kernel.AffinityKeeper, table func(service.Key) *lb.Affinity) *Affinity {
	return &Affinity{log: log, plane: plane, table: table, jobs: make(chan affinityJob)}
}

// Move hands clients over when services move between userspace and the kernel, from old to p by d:
// each keeps the endpoint it had. It runs before steering follows the plan, so a client's
// next connection finds itself remembered. It is best effort: a client that isn't handed
// over gets an endpoint like a new one. Where it takes long it goes on beside the pass.
func (m *Affinity) Move(old, p *plan.Plan, d plan.Delta) {
	j := affinityJobOf(old, p, d)
	if len(j.is) == 0 {
		return
	}
	j.begun, j.done = time.Now(), make(chan struct{})
	patience := time.NewTimer(affinityPatience)
	defer patience.Stop()
	select {
	case m.jobs <- j:
	case <-patience.C:
		m.log.Warn("clients may change endpoints: those of an earlier move are still being taken along", "services", len(j.is))
		return
	}
	select {
	case <-j.done:
	case <-patience.C:
		m.log.Info("clients are taken along while services move already", "services", len(j.is))
	}
}

// Run does jobs until ctx is done.
func (m *Affinity) Run(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case j := <-m.jobs:
			if err := m.do(ctx, j); err != nil && ctx.Err() == nil {
				m.log.Warn("clients may change endpoints", "services", len(j.is), "error", err)
			}
			close(j.done)
		}
	}
}

func (m *Affinity) do(ctx context.Context, j affinityJob) error {
	var err error
	if len(j.in) > 0 {
		err = m.plane.SeedAffinity(ctx, j.in, m.clients(j))
	}
	if len(j.out) == 0 {
		return err
	}
	clients, readErr := m.plane.ReadAffinity(j.out)
	for k, c := range clients {
		if t := m.table(k); t != nil {
			remember(t, j.is[k], c, j.begun)
		}
	}
	return errors.Join(err, readErr)
}

// clients returns the clients that userspace knows of services that move to the kernel, with their endpoints.
func (m *Affinity) clients(j affinityJob) map[service.Key][]kernel.Client {
	out := map[service.Key][]kernel.Client{}
	for _, s := range j.in {
		k := s.Service.Port.Key
		if t := m.table(k); t != nil {
			for c := range t.All(time.Now()) {
				out[k] = append(out[k], kernel.Client{Address: c.Client, Endpoint: c.Endpoint, Remaining: c.Remaining})
			}
		}
	}
	return out
}

// remember brings clients that come from the kernel into userspace's table. Those that
// userspace has served since the move began stay where they are now.
func remember(t *lb.Affinity, s *plan.Service, clients []kernel.Client, begun time.Time) {
	now := time.Now()
	served := map[netip.Addr]bool{}
	for c := range t.All(now) {
		if now.Add(c.Remaining - t.Timeout()).After(begun) {
			served[c.Client] = true
		}
	}
	// The table is in order of last use. Of a client that is there several times, the last
	// one counts.
	slices.SortFunc(clients, func(a, b kernel.Client) int { return cmp.Compare(a.Remaining, b.Remaining) })
	for _, c := range clients {
		known := slices.ContainsFunc(s.Endpoints, func(e plan.Endpoint) bool { return e.Address == c.Endpoint })
		if known && !served[c.Address] {
			// The table counts from the last use, so use is put back by what has passed.
			t.Set(c.Address, c.Endpoint, now.Add(c.Remaining-s.Port.Affinity))
		}
	}
}
