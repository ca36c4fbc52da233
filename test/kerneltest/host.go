package kerneltest

import (
	"context"
	"net/netip"
	"slices"
	"sync"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/service"
)

// Host is a model of a host: virtual servers, the dummy link and ipsets of kproxy, in memory. It refuses what the
// kernel refuses, and passes the same tests. Chains and jumps it only keeps, for IPVS and the agent
// to work with: that iptables takes them is tested on the kernel. It is safe for concurrent use.
type Host struct {
	mu         sync.Mutex
	chains     [2][]kernel.Chain
	jumps      [2][]kernel.Jump
	sets       map[string]*modelSet
	virtuals   map[server]*modelVirtual
	link       *modelDummy
	node       []netip.Addr // addresses on other links
	schedulers []string     // that the kernel has
	cut        []string     // see [Host.Cut]
	early      []netip.Addr // see [Host.Early]
}

// NewHost returns a host without rules or sets.
func NewHost() *Host {
	return &Host{sets: map[string]*modelSet{}, virtuals: map[server]*modelVirtual{}, schedulers: defaultSchedulers}
}

// Rules returns the [kernel.Backend] of the host's chains, jumps and sets. A family's chains are one call
// that may fail, as are its jumps, and each set.
func (h *Host) Rules(f *Faults) kernel.Backend { return modelRules{h, f, f.Sets(h.Sets())} }

type modelRules struct {
	host   *Host
	faults *Faults
	sets   kernel.SetStore
}

func (m modelRules) do(change func()) error {
	return m.faults.program(func() error {
		m.host.mu.Lock()
		defer m.host.mu.Unlock()
		change()
		return nil
	})
}

// Observe implements [kernel.Backend].
func (m modelRules) Observe(context.Context) (out kernel.Ruleset, err error) {
	for f := range service.Families {
		if err := m.do(func() {
			out.Chains[f], out.Jumps[f] = append(out.Chains[f], m.host.chains[f]...), append(out.Jumps[f], m.host.jumps[f]...)
		}); err != nil {
			return out, err
		}
	}
	out.Sets, err = kernel.ReadSets(m.sets)
	return out, err
}

// Apply implements [kernel.Backend].
func (m modelRules) Apply(ctx context.Context, ops kernel.Ops) (a kernel.Applied, err error) {
	if a.Entries, err = kernel.ApplySets(ctx, m.sets, kernel.SetOps{Create: ops.CreateSets, Add: ops.AddEntries}); err != nil {
		return a, err
	}
	for f := range service.Families {
		if err := m.write(f, ops, &a); err != nil {
			return a, err
		}
	}
	n, err := kernel.ApplySets(ctx, m.sets, kernel.SetOps{Del: ops.DelEntries})
	if a.Entries += n; err != nil {
		return a, err
	}
	for f := range service.Families {
		if len(ops.DelChains[f]) == 0 {
			continue
		}
		if err := m.do(func() { m.host.deleteChains(f, ops.DelChains[f]) }); err != nil {
			return a, err
		}
		a.Chains += len(ops.DelChains[f])
	}
	return a, kernel.DestroySets(ctx, m.sets, ops.DestroySets, true)
}

// write writes a family's chains, then its jumps.
func (m modelRules) write(f int, ops kernel.Ops, a *kernel.Applied) error {
	if chains := ops.Chains[f]; len(chains) > 0 {
		if err := m.do(func() {
			m.host.deleteChains(f, chains)
			for _, c := range chains {
				m.host.chains[f] = append(m.host.chains[f], kernel.Chain{Table: c.Table, Name: c.Name, Rules: append([]string(nil), c.Text()...)})
				a.Rules += c.Len()
			}
			slices.SortFunc(m.host.chains[f], kernel.CompareChains)
		}); err != nil {
			return err
		}
		a.Chains += len(chains)
	}
	if len(ops.AddJumps[f])+len(ops.DelJumps[f]) == 0 {
		return nil
	}
	return m.do(func() {
		m.host.jumps[f] = append(slices.DeleteFunc(m.host.jumps[f], func(j kernel.Jump) bool { return kernel.HasJump(ops.DelJumps[f], j) }), ops.AddJumps[f]...)
	})
}

func (h *Host) deleteChains(f int, chains []kernel.Chain) {
	h.chains[f] = slices.DeleteFunc(h.chains[f], func(c kernel.Chain) bool {
		return slices.ContainsFunc(chains, func(o kernel.Chain) bool { return kernel.CompareChains(c, o) == 0 })
	})
}

// Flush empties a chain of both families, as another program may.
func (h *Host) Flush(table, name string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for f := range h.chains {
		for i, c := range h.chains[f] {
			if c.Table == table && c.Name == name {
				h.chains[f][i].Rules = nil
			}
		}
	}
}
