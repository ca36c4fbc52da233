package conntrack

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// Figures count the connections of a service port or of one of its endpoints
// that the kernel carried, since the first list. Everything but Active only grows,
// for as long as the plan holds the service port. A TCP connection counts in Total
// once an endpoint took it, or in Failed once none did; until then it counts nowhere.
type Figures struct {
	Active   int64
	Total    uint64
	Failed   uint64
	BytesIn  uint64 // from clients, IP headers included
	BytesOut uint64 // to clients, IP headers included
}

// count adds a flow; one that has ended isn't active. Before is what of it was
// there before counting began, nil for nothing.
func (f *Figures) count(flow *Flow, ended bool, before *Figures) {
	switch {
	case !ended && flow.Opening():
		return
	case !ended && flow.Open() && !flow.Failed():
		f.Active++
	}
	n := &f.Total
	if flow.Failed() {
		n = &f.Failed
	}
	f.BytesIn += flow.OrigBytes
	f.BytesOut += flow.ReplyBytes
	if before == nil {
		*n++
		return
	}
	f.BytesIn -= before.BytesIn
	f.BytesOut -= before.BytesOut
}

// ServiceFigures are the figures of a service port. Endpoints holds those of the
// plan, or that still have connections, of which there is anything to tell.
type ServiceFigures struct {
	Figures
	Endpoints map[netip.AddrPort]Figures
}

// Connection is a flow that the kernel carries to an endpoint now.
type Connection struct {
	Service service.Key
	Flow    Flow // OrigSrc is the client, OrigDst the service address, ReplySrc the endpoint
}

// Accounting adds up what the kernel carries: the flows that have ended, as
// events tell, and those in the table, as a list tells. What the first list finds
// began before: it is active, but only what it carries from then on is counted.
// The kernel keeps a closed connection for two minutes, so that all of those
// would be counted again after a restart. It is safe for concurrent use.
type Accounting struct {
	// OnEnd, if it isn't nil, is called with the flows of service ports that have ended. It returns at once and
	// doesn't call the Accounting. Set it before there are any.
	OnEnd func(*plan.Service, *Flow)

	refresh sync.Mutex // held while listing: an older list must not replace a newer

	mu        sync.Mutex // guards what follows: three goroutines meet here (events, plans, readers)
	plan      *plan.Plan
	index     *index // of all protocols
	services  map[service.Key]*account
	flows     map[identity]*entry
	peak      int               // the most flows since flows was made
	lists     uint64            // how many there were
	ended     map[identity]bool // ends told while a list is under way; else nil
	refreshed time.Time
	took      time.Duration        // of the last list
	ports     [1 << 16 / 64]uint64 // that an endpoint of any plan has had, a bit each
}

// endGrace is how long after a flow has gone from the list its end, which
// brings the final figures, may still be told. Then the last known figures are
// final: the kernel doesn't tell the end of flows that began before anybody
// listened, nor of those for which the event buffer was too small.
const endGrace = 2 * time.Second

// account holds the figures of one service port. Accounting has one only for those that the
// kernel has carried something of: most do nothing most of the time.
type account struct {
	service   *plan.Service // nil once the plan doesn't hold it
	ended     Figures
	endpoints map[netip.AddrPort]*Figures // ended; those that carried something, or have left the plan
}

// entry is a flow with the account it belongs to, which is found once: the flow may
// outlive both its endpoint and its frontend.
type entry struct {
	*account
	flow   Flow
	list   uint64    // the last that had it
	gone   time.Time // when it went missing from lists, its end not yet told; zero while it is live
	before *Figures  // what of the flow isn't counted, as it was there before the first list; nil for nothing
}

// NewAccounting returns an Accounting without a plan, which counts nothing.
// local reports whether an address is one of this node's.
func NewAccounting(local func(netip.Addr) bool) *Accounting {
	return &Accounting{
		index:    &index{fronts: map[frontendKey]front{}, local: local},
		services: map[service.Key]*account{}, flows: map[identity]*entry{},
	}
}

// SetPlan makes the Accounting count for the service ports of p, to which d leads
// from the plan before. Figures of service ports that p doesn't hold are forgotten. Those of an endpoint that p
// doesn't hold are counted on until it has no more flows; the service port's
// own figures keep what it carried.
func (a *Accounting) SetPlan(p *plan.Plan, d plan.Delta) {
	a.mu.Lock()
	defer a.mu.Unlock()
	// Out with the old before the new: an address may have changed hands.
	for _, c := range d.Changes {
		if c.Was == nil {
			continue
		}
		a.index.remove(c.Was)
		if acc := a.services[c.Key()]; acc != nil && c.Is == nil {
			acc.service = nil
			delete(a.services, c.Key())
		}
	}
	for _, c := range d.Changes {
		if c.Is == nil {
			continue
		}
		a.index.add(c.Is)
		if acc := a.services[c.Key()]; acc != nil {
			acc.service = c.Is
		}
		if c.Was != nil {
			for i := range c.Was.Endpoints {
				if address := c.Was.Endpoints[i].Address; endpoint(c.Is, address) == nil {
					a.of(c.Is).endpoint(address) // counted on, until it has no more flows
				}
			}
		}
		for i := range c.Is.Endpoints {
			port := c.Is.Endpoints[i].Address.Port()
			a.ports[port/64] |= 1 << (port % 64)
		}
	}
	a.plan = p
}

// Resume counts on from the figures of another process, as far as the plan has their service ports and endpoints. It comes
// between the first SetPlan and the first Refresh.
func (a *Accounting) Resume(figures map[service.Key]ServiceFigures) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for key, is := range figures {
		s := a.plan.Find(key)
		if s == nil {
			continue
		}
		acc := a.of(s)
		acc.ended, acc.ended.Active = is.Figures, 0
		for address, f := range is.Endpoints {
			if f.Active = 0; endpoint(s, address) != nil {
				*acc.endpoint(address) = f
			}
		}
	}
}

// ServiceAt returns the service port of the plan that answers at an address; false if there is none.
func (a *Accounting) ServiceAt(protocol service.Protocol, address netip.AddrPort) (service.Key, bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	hit, ok := a.index.find(&Flow{Protocol: protocol, Family: service.FamilyOf(address.Addr()), OrigDst: address})
	if !ok {
		return service.Key{}, false
	}
	return hit.service.Port.Key, true
}

// HadEndpointAt reports whether an endpoint of any plan so far has had a port.
func (a *Accounting) HadEndpointAt(port uint16) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.ports[port/64]>>(port%64)&1 != 0
}

// of returns the account of a service port of the plan.
func (a *Accounting) of(s *plan.Service) *account {
	acc := a.services[s.Port.Key]
	if acc == nil {
		acc = &account{service: s, endpoints: map[netip.AddrPort]*Figures{}}
		a.services[s.Port.Key] = acc
	}
	return acc
}

func (acc *account) endpoint(address netip.AddrPort) *Figures {
	f := acc.endpoints[address]
	if f == nil {
		f = &Figures{}
		acc.endpoints[address] = f
	}
	return f
}

// counts reports whether an endpoint has figures of its own: in the plan, or since it
// was there.
func (acc *account) counts(address netip.AddrPort) bool {
	return acc.endpoints[address] != nil || acc.service != nil && endpoint(acc.service, address) != nil
}

// entryOf returns what is known of a flow, or a new entry for one that the kernel data plane of a
// service port carries; nil for any other. Where the service port was deleted and made anew, a flow that
// is known belongs to the new one, which counts what it carries from then on.
func (a *Accounting) entryOf(f *Flow) *entry {
	e := a.flows[f.identity()]
	if e != nil && e.service != nil || !f.Rewritten() { // kproxy's own connections to endpoints aren't
		return e
	}
	at, ok := a.index.find(f)
	if !ok {
		return e
	}
	// An endpoint that has left the plan still counts while its figures are kept.
	if acc := a.services[at.service.Port.Key]; endpoint(at.service, f.ReplySrc) == nil && (acc == nil || acc.endpoints[f.ReplySrc] == nil) {
		return e
	}
	if e == nil {
		return &entry{account: a.of(at.service)}
	}
	if e.account = a.of(at.service); !e.flow.Opening() {
		e.before = &Figures{BytesIn: e.flow.OrigBytes, BytesOut: e.flow.ReplyBytes}
	}
	return e
}

// Ended counts a flow that has ended.
func (a *Accounting) Ended(f Flow) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.ended != nil {
		a.ended[f.identity()] = true
	}
	if e := a.entryOf(&f); e != nil {
		e.flow = f
		a.over(e)
		delete(a.flows, f.identity())
	}
}

// over counts a flow that has ended, and tells of it.
func (a *Accounting) over(e *entry) {
	e.end()
	if a.OnEnd != nil && e.service != nil {
		a.OnEnd(e.service, &e.flow)
	}
}

// end adds a flow that has ended to the account.
func (e *entry) end() {
	if e.service == nil {
		return // its service port is gone
	}
	e.account.ended.count(&e.flow, true, e.before)
	if e.counts(e.flow.ReplySrc) {
		e.endpoint(e.flow.ReplySrc).count(&e.flow, true, e.before)
	}
}

// Refresh lists the table, protocol 0 for all, unless that was done within
// maxAge. list is [Client.List].
func (a *Accounting) Refresh(maxAge time.Duration, list func(service.Protocol) ([]Flow, error)) error {
	a.refresh.Lock()
	defer a.refresh.Unlock()
	a.mu.Lock()
	if !a.refreshed.IsZero() && time.Since(a.refreshed) < maxAge {
		a.mu.Unlock()
		return nil
	}
	a.ended = map[identity]bool{}
	a.mu.Unlock()
	began := time.Now()
	flows, err := list(0)
	a.mu.Lock()
	defer a.mu.Unlock()
	if err == nil {
		first := a.refreshed.IsZero()
		a.refreshed = time.Now()
		a.listed(flows, first)
		a.took = time.Since(began)
	}
	a.ended = nil
	return err
}

// BackgroundAge returns how old figures may be that are read all the time though no person waits for
// them: so old that lists take at most a hundredth of a processor, however many flows there are, but a minute at most.
func (a *Accounting) BackgroundAge() time.Duration {
	a.mu.Lock()
	defer a.mu.Unlock()
	return min(100*a.took, time.Minute)
}

// listed replaces the live flows. What is in the list no more goes missing,
// and comes back if it had only been overlooked: a list isn't a snapshot.
func (a *Accounting) listed(flows []Flow, first bool) {
	a.lists++
	for i := range flows {
		f := &flows[i]
		if a.ended[f.identity()] {
			continue // it ended after it was listed, and has been counted
		}
		e := a.entryOf(f)
		if e == nil {
			continue
		}
		if f.OrigPackets < e.flow.OrigPackets {
			a.over(e) // another flow with the same identity, and no event told the end of the first
			e.before = nil
		}
		if e.flow, e.list, e.gone = *f, a.lists, (time.Time{}); first && !f.Opening() {
			e.before = &Figures{BytesIn: f.OrigBytes, BytesOut: f.ReplyBytes}
		}
		a.flows[f.identity()] = e
	}
	for id, e := range a.flows {
		switch {
		case e.list == a.lists:
		case e.gone.IsZero():
			e.gone = a.refreshed
		case a.refreshed.Sub(e.gone) > endGrace:
			a.over(e)
			delete(a.flows, id)
		}
	}
	if a.peak = max(a.peak, len(a.flows)); len(a.flows) < a.peak/4 { // maps don't shrink
		a.peak = len(a.flows)
		flows := make(map[identity]*entry, a.peak)
		maps.Copy(flows, a.flows)
		a.flows = flows
	}
	a.forgetEndpoints()
}

// forgetEndpoints forgets those that are neither in the plan nor in use.
func (a *Accounting) forgetEndpoints() {
	type use struct {
		*account
		address netip.AddrPort
	}
	unused := map[use]bool{}
	for _, acc := range a.services {
		for address := range acc.endpoints {
			if endpoint(acc.service, address) == nil {
				unused[use{acc, address}] = true
			}
		}
	}
	if len(unused) == 0 {
		return
	}
	for _, e := range a.flows {
		delete(unused, use{e.account, e.flow.ReplySrc})
	}
	for u := range unused {
		delete(u.endpoints, u.address)
	}
}

// Traffic returns the figures of the service ports that have ever carried anything,
// as of the last Refresh, and what has ended since.
func (a *Accounting) Traffic() map[service.Key]Figures {
	a.mu.Lock()
	defer a.mu.Unlock()
	out := map[service.Key]Figures{}
	for key, acc := range a.services {
		if acc.ended != (Figures{}) {
			out[key] = acc.ended
		}
	}
	a.eachOpen(func(e *entry, ended bool) {
		f := out[e.service.Port.Key]
		f.count(&e.flow, ended, e.before)
		out[e.service.Port.Key] = f
	})
	return out
}

// eachOpen calls f with the flows of the plan's service ports that haven't been
// counted for good. Those that are missing have ended.
func (a *Accounting) eachOpen(f func(e *entry, ended bool)) {
	for _, e := range a.flows {
		if e.service != nil {
			f(e, !e.gone.IsZero())
		}
	}
}

// Figures returns the figures of the service ports of the plan that the kernel
// has carried anything of, as of the last Refresh, and what has ended since.
func (a *Accounting) Figures() map[service.Key]ServiceFigures {
	a.mu.Lock()
	defer a.mu.Unlock()
	out := make(map[service.Key]ServiceFigures, len(a.services))
	for key, acc := range a.services {
		s := ServiceFigures{Figures: acc.ended, Endpoints: make(map[netip.AddrPort]Figures, len(acc.endpoints))}
		for address, ended := range acc.endpoints {
			s.Endpoints[address] = *ended
		}
		out[key] = s
	}
	a.eachOpen(func(e *entry, ended bool) {
		s := out[e.service.Port.Key]
		s.count(&e.flow, ended, e.before)
		if e.counts(e.flow.ReplySrc) {
			ep := s.Endpoints[e.flow.ReplySrc]
			ep.count(&e.flow, ended, e.before)
			s.Endpoints[e.flow.ReplySrc] = ep
		}
		out[e.service.Port.Key] = s
	})
	return out
}

// Carried calls each with the flows of a service port that were in the table at the last Refresh and that the kernel
// hasn't told the end of: those that are open, and TCP connections that it remembers for a while
// after they were closed ([Flow.Lingered]). Each doesn't call the Accounting.
func (a *Accounting) Carried(k service.Key, each func(*plan.Service, *Flow)) {
	a.mu.Lock()
	defer a.mu.Unlock()
	acc := a.services[k]
	if acc == nil {
		return
	}
	for _, e := range a.flows {
		if e.account == acc && e.service != nil && e.gone.IsZero() {
			each(e.service, &e.flow)
		}
	}
}

// Connections returns the open connections that the kernel carried at the last
// Refresh and that haven't ended since, in order of service port, then client.
func (a *Accounting) Connections() []Connection {
	a.mu.Lock()
	defer a.mu.Unlock()
	out := make([]Connection, 0, len(a.flows))
	for _, e := range a.flows {
		if e.flow.Open() && e.service != nil && e.gone.IsZero() {
			out = append(out, Connection{Service: e.service.Port.Key, Flow: e.flow})
		}
	}
	slices.SortFunc(out, func(x, y Connection) int {
		return cmp.Or(
			x.Service.Compare(y.Service),
			x.Flow.OrigSrc.Compare(y.Flow.OrigSrc),
			x.Flow.OrigDst.Compare(y.Flow.OrigDst),
			cmp.Compare(x.Flow.ID, y.Flow.ID),
		)
	})
	return out
}
