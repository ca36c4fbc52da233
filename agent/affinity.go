package agent

import (
	"cmp"
	"net/netip"
	"slices"
	"time"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/iptables"
	"kproxy.dev/kproxy/plan"
)

// moveAffinity takes clients along when a service moves between data planes:
// each keeps the endpoint it had. It runs before the portal follows the plan,
// so a client's next connection finds itself remembered. It is best effort: a
// client that isn't taken along gets an endpoint like a new one.
func (a *Agent) moveAffinity(old, p *plan.Plan, d plan.Delta) {
	if old == nil {
		return
	}
	var ipvs affinityJob
	for _, c := range d.Changes {
		was, s := c.Was, c.Is
		if was == nil || s == nil || s.Port.Affinity == 0 || was.DataPlane == s.DataPlane {
			continue
		}
		var err error
		switch {
		case ipvs.add(old, p, was, s):
		case was.DataPlane == plan.Userspace && s.DataPlane == plan.IPTables:
			err = a.affinityToKernel(s)
		case was.DataPlane == plan.IPTables && s.DataPlane == plan.Userspace:
			err = a.affinityToUserspace(s)
		}
		if err != nil {
			a.log.Warn("clients may change endpoints", "service", s.Port.Key, "error", err)
		}
	}
	a.clients.move(ipvs)
}

func (a *Agent) affinityToKernel(s *plan.Service) error {
	table := a.userspace.Affinity(s.Port.Key)
	if table == nil {
		return nil
	}
	var clients []kernel.Client
	for c := range table.All(time.Now()) {
		clients = append(clients, kernel.Client{Address: c.Client, Endpoint: c.Endpoint, Remaining: c.Remaining})
	}
	return iptables.SeedAffinity(a.sets, s.Port.Key, addresses(s), clients)
}

// addresses are those of s's endpoints, usable or not.
func addresses(s *plan.Service) []netip.AddrPort {
	out := make([]netip.AddrPort, len(s.Endpoints))
	for i := range s.Endpoints {
		out[i] = s.Endpoints[i].Address
	}
	return out
}

func (a *Agent) affinityToUserspace(s *plan.Service) error {
	table := a.userspace.Affinity(s.Port.Key)
	if table == nil {
		return nil
	}
	clients, err := iptables.ReadAffinity(a.sets, s.Port.Key, addresses(s))
	if err != nil {
		return err
	}
	now := time.Now()
	// The table is in order of last use; the oldest goes first.
	slices.SortFunc(clients, func(a, b kernel.Client) int { return cmp.Compare(a.Remaining, b.Remaining) })
	for _, c := range clients {
		// The table counts from the last use, so use is put back by what has passed.
		table.Set(c.Address, c.Endpoint, now.Add(c.Remaining-s.Port.Affinity))
	}
	return nil
}
