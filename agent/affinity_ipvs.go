package agent

import (
	"cmp"
	"context"
	"log/slog"
	"net/netip"
	"slices"
	"time"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/ipvs"
	"kproxy.dev/kproxy/lb"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// affinityPatience is how long a pass waits for clients to be taken along to
// IPVS or from there. Usually that takes some milliseconds; where IPVS has some
// hundred thousand connections it takes seconds, and goes on beside the move: a
// client that connects before its turn may get another endpoint.
const affinityPatience = time.Second

// ipvsAffinity takes clients along between userspace and IPVS. It is asked by
// the fast loop, and works in a loop of its own.
type ipvsAffinity struct {
	log   *slog.Logger
	mark  uint32 // kproxy's own
	table func(service.Key) *lb.Affinity
	jobs  chan affinityJob
}

func newIPVSAffinity(log *slog.Logger, marks kernel.Marks, table func(service.Key) *lb.Affinity) *ipvsAffinity {
	return &ipvsAffinity{log: log, mark: marks.Own(), table: table, jobs: make(chan affinityJob)}
}

// affinityJob are the services that move in one pass.
type affinityJob struct {
	begun time.Time
	in    []kernel.Virtual // of those that move to IPVS
	out   []kernel.Virtual // of those that move from there
	ports map[service.Key]*plan.Service
	done  chan struct{} // closed at the end
}

// add takes note of a service if it moves between userspace and IPVS.
func (j *affinityJob) add(old, p *plan.Plan, was, is *plan.Service) bool {
	switch {
	case was.DataPlane == plan.Userspace && is.DataPlane == plan.IPVS:
		j.in = append(j.in, ipvs.Virtuals(is, &p.Policy, ipvs.DefaultOptions())...)
	case was.DataPlane == plan.IPVS && is.DataPlane == plan.Userspace:
		j.out = append(j.out, ipvs.Virtuals(was, &old.Policy, ipvs.DefaultOptions())...)
	default:
		return false
	}
	if j.ports == nil {
		j.ports = map[service.Key]*plan.Service{}
	}
	j.ports[is.Port.Key] = is
	return true
}

// move does the job, or goes on with it beside the pass if it takes long.
func (m *ipvsAffinity) move(j affinityJob) {
	if len(j.ports) == 0 {
		return
	}
	j.begun, j.done = time.Now(), make(chan struct{})
	patience := time.NewTimer(affinityPatience)
	defer patience.Stop()
	select {
	case m.jobs <- j:
	case <-patience.C:
		m.log.Warn("clients may change endpoints: those of an earlier move are still being taken along", "services", len(j.ports))
		return
	}
	select {
	case <-j.done:
	case <-patience.C:
		m.log.Info("clients are taken along while services move already", "services", len(j.ports))
	}
}

// run does jobs until ctx is done.
func (m *ipvsAffinity) run(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case j := <-m.jobs:
			m.do(ctx, j)
			close(j.done)
		}
	}
}

// do takes clients along. It is best effort: a client that isn't taken along
// gets an endpoint like a new one.
func (m *ipvsAffinity) do(ctx context.Context, j affinityJob) {
	if len(j.in) > 0 {
		if err := ipvs.SeedAffinity(ctx, m.mark, j.in, m.clients(j)); err != nil && ctx.Err() == nil {
			m.log.Warn("clients may change endpoints", "services", len(j.ports), "error", err)
		}
	}
	if len(j.out) == 0 {
		return
	}
	clients, err := ipvs.ReadAffinity(j.out)
	if err != nil {
		m.log.Warn("clients may change endpoints", "services", len(j.ports), "error", err)
		return
	}
	for k, c := range clients {
		if t := m.table(k); t != nil {
			remember(t, j.ports[k], c, j.begun)
		}
	}
}

// clients are those that userspace knows of services that move to IPVS.
func (m *ipvsAffinity) clients(j affinityJob) map[service.Key][]kernel.Client {
	out := map[service.Key][]kernel.Client{}
	for _, v := range j.in {
		if _, known := out[v.Owner]; known {
			continue
		}
		out[v.Owner] = nil
		if t := m.table(v.Owner); t != nil {
			for c := range t.All(time.Now()) {
				out[v.Owner] = append(out[v.Owner], kernel.Client{Address: c.Client, Endpoint: c.Endpoint, Remaining: c.Remaining})
			}
		}
	}
	return out
}

// remember brings clients that come from IPVS into userspace's table. Those that
// userspace has served since the move began stay where they are now.
func remember(t *lb.Affinity, s *plan.Service, clients []kernel.Client, begun time.Time) {
	now := time.Now()
	served := map[netip.Addr]bool{}
	for c := range t.All(now) {
		if now.Add(c.Remaining - t.Timeout()).After(begun) {
			served[c.Client] = true
		}
	}
	// The table is in order of last use. Of a client that is there several times,
	// with the address of each virtual server it used, the last one counts.
	slices.SortFunc(clients, func(a, b kernel.Client) int { return cmp.Compare(a.Remaining, b.Remaining) })
	endpoints := addresses(s)
	for _, c := range clients {
		if !served[c.Address] && slices.Contains(endpoints, c.Endpoint) {
			t.Set(c.Address, c.Endpoint, now.Add(c.Remaining-s.Port.Affinity))
		}
	}
}
