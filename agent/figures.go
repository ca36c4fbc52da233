package agent

import (
	"context"
	"maps"
	"sync"
	"sync/atomic"
	"time"

	"kproxy.dev/kproxy/conntrack"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// Observer learns how long things took. Its methods are called by several
// goroutines.
type Observer interface {
	// Synced: a pass took effect.
	Synced(time.Duration)
	// Programmed: the rules were changed; full, after what was there had been read.
	Programmed(full bool, took time.Duration)
	// Reached: a change in the cluster has taken effect in family f.
	Reached(f service.Family, took time.Duration)
	// Swept: the conntrack entries were looked through.
	Swept(time.Duration)
}

// figures are counted as things happen. Safe for concurrent use.
type figures struct {
	observer Observer

	restores [2]atomic.Uint64 // iptables-restore failed
	deleted  [2]atomic.Uint64 // conntrack entries

	mu        sync.Mutex // the loops write, scrapes read
	counted   *service.Snapshot
	applied   *service.Snapshot // of the last pass that succeeded
	services  uint64
	endpoints uint64
	triggers  [2][]time.Time // of changes in the cluster that no pass has carried out
	holds     kernel.Objects
	written   [2]map[string]int // rules, by table
	writes    plan.Writes

	passFailures, ruleFailures, ruleRepairs, setRepairs, overflows atomic.Uint64
	draining                                                       atomic.Int64

	moves moveCounts
	sets  cached[map[string]int] // entries of kproxy's ipsets

	packets cached[packetCounts]
}

// cached holds what was read last. Safe for concurrent use; the zero value is ready.
type cached[T any] struct {
	mu   sync.Mutex // one reader at a time
	last T
	at   time.Time // when that, or something newer, was asked for
}

// get returns what was read less than age ago, else what read makes of that; after an
// error the last.
func (c *cached[T]) get(age time.Duration, read func(last T) (T, error)) (T, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if time.Since(c.at) < age {
		return c.last, nil
	}
	c.at = time.Now()
	now, err := read(c.last)
	if err == nil {
		c.last = now
	}
	return c.last, err
}

// begun counts what is new in s, which triggers led to.
func (f *figures) begun(s *service.Snapshot, triggers [2][]time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for fam := range triggers {
		f.triggers[fam] = append(f.triggers[fam], triggers[fam]...)
	}
	services, endpoints := service.CountChanges(f.counted, s)
	f.counted = s
	f.services += uint64(services)
	f.endpoints += uint64(endpoints)
}

// done: what is in s has taken effect.
func (f *figures) done(s *service.Snapshot, took time.Duration) {
	f.mu.Lock()
	f.applied = s
	triggers := f.triggers
	f.triggers = [2][]time.Time{}
	f.mu.Unlock()
	f.observer.Synced(took)
	for _, fam := range service.Families {
		for _, at := range triggers[fam] {
			f.observer.Reached(fam, time.Since(at))
		}
	}
}

// synced counts what a Sync of a plane did, and what the kernel holds after it.
func (f *figures) synced(r *kernel.Result, took time.Duration) {
	f.wrote(r.Applied)
	f.mu.Lock()
	if r.Holds != nil {
		f.holds = *r.Holds
	}
	wrote := r.OK() && r.Tried
	if wrote {
		f.written = r.Written
	}
	f.mu.Unlock()
	if wrote {
		f.observer.Programmed(r.Full, took)
	}
}

// wrote adds up what was changed, as a whole or in part.
func (f *figures) wrote(a kernel.Applied) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.writes.Chains += uint64(a.Chains)
	f.writes.Rules += uint64(a.Rules)
	f.writes.Entries += uint64(a.Entries)
	f.writes.Virtuals += uint64(a.Virtuals)
}

func (f *figures) forgot(flow *conntrack.Flow) {
	f.deleted[service.FamilyOf(flow.OrigSrc.Addr())].Add(1)
}

// How old counts may be: those of packets take processes to find out, and a list of sets
// takes its turn among the requests by which services move.
const (
	countsAge    = 5 * time.Second
	setCountsAge = time.Second
)

// packetCounts are the packets that the shared rules have counted since the start,
// also those of rules that were written anew, and what the rules said last.
type packetCounts struct{ sum, was kernel.Counts }

// Figures returns what is counted, as of now.
func (a *Agent) Figures() plan.Figures {
	f := &a.figures
	p := a.current.Load()
	if p == nil {
		return plan.Figures{} // Run may still be setting up
	}
	var out plan.Figures
	latest := a.source.Latest()
	f.mu.Lock()
	out.ServiceChanges, out.EndpointChanges, out.Rules, out.Written = f.services, f.endpoints, f.holds.Rules, f.written
	out.VirtualServers, out.RealServers, out.Writes = f.holds.Virtuals, f.holds.Reals, f.writes
	applied := f.applied
	f.mu.Unlock()
	out.ServicesPending, out.EndpointsPending = service.CountChanges(applied, latest)
	out.NoLocalInternal, out.NoLocalExternal = p.NoLocal()
	for _, fam := range service.Families {
		out.RestoreFailures[fam], out.ConntrackDeletions[fam] = f.restores[fam].Load(), f.deleted[fam].Load()
	}
	st := a.sync.get()
	out.Queued, out.Synced = st.queued, st.status.LastSuccess
	packets := a.countPackets()
	out.InvalidDropped, out.Refused, out.Steered = packets.Invalid, packets.Refused, packets.Steered
	out.PassFailures, out.RuleFailures = f.passFailures.Load(), f.ruleFailures.Load()
	out.RuleRepairs, out.SetRepairs = f.ruleRepairs.Load(), f.setRepairs.Load()
	out.ConntrackOverflows, out.Draining = f.overflows.Load(), int(f.draining.Load())
	out.Offloads, out.Recalls, out.CatchUps = f.moves.byCause()
	out.Sets = a.countSets()
	if count, limit, err := conntrack.Use(); err == nil {
		out.Conntrack = plan.Usage{Count: count, Max: limit}
	}
	for i, proto := range []service.Protocol{service.TCP, service.UDP} {
		b := a.userspace.Budget(proto)
		out.Descriptors[i], out.DescriptorWaits[i] = plan.Usage{Count: b.Used, Max: b.Limit}, b.Waiting
		out.Shed[i] = a.userspace.Shed(proto)
	}
	out.Exhausted = a.userspace.Exhausted()
	out.Ejections, out.Resets = a.passive.counts()
	return out
}

// countPackets returns what the shared rules have counted, at most countsAge ago.
func (a *Agent) countPackets() kernel.Counts {
	counter, counts := a.programmer.plane.(kernel.Counter)
	if !counts {
		return kernel.Counts{}
	}
	c, err := a.figures.packets.get(countsAge, func(c packetCounts) (packetCounts, error) {
		ctx, cancel := context.WithTimeout(context.Background(), countsAge)
		defer cancel()
		is, err := counter.Counts(ctx)
		c.sum.Add(c.was, is)
		c.was = is
		return c, err
	})
	if err != nil {
		a.log.Warn("packets can't be counted", "error", err)
	}
	return c.sum
}

// countSets returns how many entries kproxy's ipsets have, as of setCountsAge ago; nil without ipsets.
func (a *Agent) countSets() map[string]int {
	counter, counts := a.steering.(kernel.SetCounter)
	if !counts {
		return nil
	}
	sets, err := a.figures.sets.get(setCountsAge, func(map[string]int) (map[string]int, error) { return counter.SetEntries() })
	if err != nil {
		a.log.Warn("kproxy's sets can't be counted", "error", err)
	}
	return sets
}

// moveCounts counts how services go between userspace and the kernel. Safe for
// concurrent use; the zero value is ready.
type moveCounts struct {
	mu       sync.Mutex // the fast loop counts, scrapes read
	offloads map[plan.Cause]uint64
	recalls  map[plan.Cause]uint64
	catchUps uint64
	services map[service.Key]serviceMoves
	gone     []service.Key // since the last change: who reads may have begun before
}

// serviceMoves counts the moves of one service port since it exists.
type serviceMoves struct{ offloads, recalls uint64 }

// count counts what d moves. The first plan moves nothing: what stands in the kernel
// then was adopted.
func (m *moveCounts) count(d plan.Delta) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.services == nil {
		m.offloads, m.recalls = map[plan.Cause]uint64{}, map[plan.Cause]uint64{}
		m.services = map[service.Key]serviceMoves{}
	}
	for _, k := range m.gone {
		delete(m.services, k)
	}
	m.gone = nil
	for _, c := range d.Changes {
		is := c.Is
		if is == nil {
			m.gone = append(m.gone, c.Key())
			continue
		}
		s := m.services[is.Port.Key]
		switch c.Move() {
		case plan.NoMove:
			continue
		case plan.Recall:
			m.recalls[is.Cause]++
			s.recalls++
		case plan.Offload:
			m.offloads[is.Cause]++
			s.offloads++
		case plan.CatchUp:
			if is.DataPlane == plan.Userspace {
				m.catchUps++
			}
		}
		m.services[is.Port.Key] = s
	}
}

// byCause returns the sums, which also hold the moves of services that are gone.
func (m *moveCounts) byCause() (offloads, recalls map[plan.Cause]uint64, catchUps uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return maps.Clone(m.offloads), maps.Clone(m.recalls), m.catchUps
}

// of returns the moves of a service port.
func (m *moveCounts) of(k service.Key) serviceMoves {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.services[k]
}
