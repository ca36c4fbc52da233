package conntrack

import (
	"net/netip"
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

func (f *Figures) add(flow *Flow) {
	if flow.Opening() {
		return
	}
	f.addEnded(flow)
	if flow.Open() && !flow.Failed() {
		f.Active++
	}
}

func (f *Figures) addEnded(flow *Flow) {
	if flow.Failed() {
		f.Failed++
	} else {
		f.Total++
	}
	f.BytesIn += flow.OrigBytes
	f.BytesOut += flow.ReplyBytes
}

// subtract takes away what of a flow was there before counting began; nil for nothing.
func (f *Figures) subtract(flow *Flow, before *Figures) {
	if before == nil {
		return
	}
	if flow.Failed() {
		f.Failed--
	} else {
		f.Total--
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
	refresh sync.Mutex // held while listing: an older list must not replace a newer

	mu        sync.Mutex // guards what follows: three goroutines meet here (events, plans, readers)
	plan      *plan.Plan
	index     *index // of all protocols
	services  map[service.Key]*account
	live      map[identity]entry // as of the last list
	missing   map[identity]entry // gone from the list, end not yet told
	ended     map[identity]bool  // ends told while a list is under way; else nil
	refreshed time.Time
	ports     [1 << 16 / 64]uint64 // that an endpoint of any plan has had, a bit each
}

// endGrace is how long after a flow has gone from the list its end, which
// brings the final figures, may still be told. Then the last known figures are
// final: the kernel doesn't tell the end of flows that began before anybody
// listened, nor of those for which the event buffer was too small.
const endGrace = 2 * time.Second

// account is what Accounting holds of one service port that the kernel has carried
// something of: most do nothing most of the time.
type account struct {
	ended     Figures
	endpoints map[netip.AddrPort]*Figures // ended; those that carried something, or have left the plan
}

// entry is a flow with the service port it belongs to, which is found once:
// the flow may outlive both its endpoint and its frontend.
type entry struct {
	key  service.Key
	flow Flow
	gone time.Time // when it went missing
	// before is what of the flow isn't counted, as it was there before the first
	// list; nil for nothing.
	before *Figures
}

// NewAccounting returns an Accounting without a plan, which counts nothing.
// local reports whether an address is one of this node's.
func NewAccounting(local func(netip.Addr) bool) *Accounting {
	return &Accounting{
		index:    &index{fronts: map[place]front{}, local: local},
		services: map[service.Key]*account{}, live: map[identity]entry{}, missing: map[identity]entry{},
	}
}

// SetPlan makes the Accounting count for the service ports of p. Figures of
// service ports that p doesn't hold are forgotten. Those of an endpoint that p
// doesn't hold are counted on until it has no more flows; the service port's
// own figures keep what it carried.
func (a *Accounting) SetPlan(p *plan.Plan) {
	a.mu.Lock()
	defer a.mu.Unlock()
	// Out with the old before the new: an address may have changed hands.
	plan.Changes(a.plan, p, func(was, is *plan.Service) bool {
		if was != nil {
			a.index.remove(was)
			if is == nil {
				delete(a.services, was.Port.Key)
			}
		}
		return true
	})
	plan.Changes(a.plan, p, func(was, is *plan.Service) bool {
		if is != nil {
			a.index.add(is)
			a.keep(was, is)
			for i := range is.Endpoints {
				port := is.Endpoints[i].Address.Port()
				a.ports[port/64] |= 1 << (port % 64)
			}
		}
		return true
	})
	a.plan = p
}

// HadEndpointAt reports whether an endpoint of any plan so far has had a port.
func (a *Accounting) HadEndpointAt(port uint16) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.ports[port/64]>>(port%64)&1 != 0
}

// keep goes on counting for endpoints that leave a service port, until they have
// no more flows.
func (a *Accounting) keep(was, is *plan.Service) {
	if was == nil {
		return
	}
	for i := range was.Endpoints {
		if address := was.Endpoints[i].Address; endpoint(is, address) == nil {
			a.of(is.Port.Key).endpoint(address)
		}
	}
}

// of returns the account of a service port of the plan.
func (a *Accounting) of(k service.Key) *account {
	acc := a.services[k]
	if acc == nil {
		acc = &account{endpoints: map[netip.AddrPort]*Figures{}}
		a.services[k] = acc
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

// classify returns the service port whose kernel data plane carries f. An
// endpoint that has left the plan still counts while its figures are kept.
func (a *Accounting) classify(f *Flow) (service.Key, bool) {
	if !f.Rewritten() {
		return service.Key{}, false // also kproxy's own connections to endpoints
	}
	at, ok := a.index.find(f)
	if !ok {
		return service.Key{}, false
	}
	key := at.service.Port.Key
	if endpoint(at.service, f.ReplySrc) != nil {
		return key, true
	}
	acc := a.services[key]
	return key, acc != nil && acc.endpoints[f.ReplySrc] != nil
}

// Ended counts a flow that has ended.
func (a *Accounting) Ended(f Flow) {
	a.mu.Lock()
	defer a.mu.Unlock()
	id := f.identity()
	if a.ended != nil {
		a.ended[id] = true
	}
	e, known := a.live[id]
	if !known {
		e, known = a.missing[id]
	}
	delete(a.live, id)
	delete(a.missing, id)
	if !known {
		if e.key, known = a.classify(&f); !known {
			return
		}
	}
	e.flow = f
	a.count(e)
}

// count adds an ended flow for good.
func (a *Accounting) count(e entry) {
	s := a.plan.Find(e.key)
	if s == nil {
		return // its service port is gone
	}
	acc := a.of(e.key)
	acc.ended.addEnded(&e.flow)
	acc.ended.subtract(&e.flow, e.before)
	if endpoint(s, e.flow.ReplySrc) != nil || acc.endpoints[e.flow.ReplySrc] != nil {
		ep := acc.endpoint(e.flow.ReplySrc)
		ep.addEnded(&e.flow)
		ep.subtract(&e.flow, e.before)
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
	flows, err := list(0)
	a.mu.Lock()
	defer a.mu.Unlock()
	if err == nil {
		first := a.refreshed.IsZero()
		a.refreshed = time.Now()
		a.listed(flows, a.refreshed)
		if first {
			a.begin()
		}
	}
	a.ended = nil
	return err
}

// begin makes what is live now what was there before.
func (a *Accounting) begin() {
	for id, e := range a.live {
		if !e.flow.Opening() {
			e.before = &Figures{BytesIn: e.flow.OrigBytes, BytesOut: e.flow.ReplyBytes}
			a.live[id] = e
		}
	}
}

// listed replaces the live flows. What is in the list no more goes missing,
// and comes back if it had only been overlooked: a list isn't a snapshot.
func (a *Accounting) listed(flows []Flow, now time.Time) {
	live := make(map[identity]entry, len(a.live))
	for i := range flows {
		f := &flows[i]
		id := f.identity()
		if a.ended[id] {
			continue // it ended after it was listed, and has been counted
		}
		e, known := a.live[id]
		if !known {
			e, known = a.missing[id]
		}
		if !known {
			if e.key, known = a.classify(f); !known {
				continue
			}
		}
		if f.OrigPackets < e.flow.OrigPackets {
			a.count(e) // another flow with the same identity, and nobody told the end of the first
			e.before = nil
		}
		live[id] = entry{key: e.key, flow: *f, before: e.before}
		delete(a.live, id)
		delete(a.missing, id)
	}
	for id, e := range a.missing {
		if now.Sub(e.gone) > endGrace {
			a.count(e)
			delete(a.missing, id)
		}
	}
	for id, e := range a.live {
		e.gone = now
		a.missing[id] = e
	}
	a.live = live
	a.forgetEndpoints()
}

// forgetEndpoints forgets those that are neither in the plan nor in use.
func (a *Accounting) forgetEndpoints() {
	type use struct {
		key     service.Key
		address netip.AddrPort
	}
	used := map[use]bool{}
	for _, m := range []map[identity]entry{a.live, a.missing} {
		for _, e := range m {
			used[use{e.key, e.flow.ReplySrc}] = true
		}
	}
	for key, acc := range a.services {
		s := a.plan.Find(key)
		for address := range acc.endpoints {
			if (s == nil || endpoint(s, address) == nil) && !used[use{key, address}] {
				delete(acc.endpoints, address)
			}
		}
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
	find := a.finder()
	merge := func(m map[identity]entry, add func(*Figures, *Flow)) {
		for _, e := range m {
			if find(e.key) == nil {
				continue
			}
			f := out[e.key]
			add(&f, &e.flow)
			f.subtract(&e.flow, e.before)
			out[e.key] = f
		}
	}
	merge(a.live, (*Figures).add)
	merge(a.missing, (*Figures).addEnded)
	return out
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
	find := a.finder()
	merge := func(m map[identity]entry, add func(*Figures, *Flow)) {
		for _, e := range m {
			is := find(e.key)
			if is == nil {
				continue
			}
			s := out[e.key]
			add(&s.Figures, &e.flow)
			s.subtract(&e.flow, e.before)
			ep, kept := s.Endpoints[e.flow.ReplySrc]
			if kept || endpoint(is, e.flow.ReplySrc) != nil {
				if s.Endpoints == nil {
					s.Endpoints = map[netip.AddrPort]Figures{}
				}
				add(&ep, &e.flow)
				ep.subtract(&e.flow, e.before)
				s.Endpoints[e.flow.ReplySrc] = ep
			}
			out[e.key] = s
		}
	}
	merge(a.live, (*Figures).add)
	merge(a.missing, (*Figures).addEnded)
	return out
}

// finder returns a function that finds service ports of the plan, and those it has
// found before faster.
func (a *Accounting) finder() func(service.Key) *plan.Service {
	found := map[service.Key]*plan.Service{}
	return func(k service.Key) *plan.Service {
		s, known := found[k]
		if !known {
			s = a.plan.Find(k)
			found[k] = s
		}
		return s
	}
}
