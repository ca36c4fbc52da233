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
	Endpoints []EndpointFigures // in no order
}

// EndpointFigures are the figures of an endpoint of a service port.
type EndpointFigures struct {
	Address netip.AddrPort
	Figures
}

// endpoint returns where in Endpoints an endpoint is, which it adds if it isn't there.
func (s *ServiceFigures) endpoint(a netip.AddrPort) int {
	i := slices.IndexFunc(s.Endpoints, func(e EndpointFigures) bool { return e.Address == a })
	if i < 0 {
		i, s.Endpoints = len(s.Endpoints), append(s.Endpoints, EndpointFigures{Address: a})
	}
	return i
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
	made      int                 // how many there ever were
	stale     map[*account]bool   // whose figures may not be those of now
	left      map[endpointOf]bool // that have left the plan
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
	service   *plan.Service  // nil once the plan doesn't hold it
	now       ServiceFigures // with what is open; replaced, never changed, once it was read
	ended     Figures
	endpoints map[netip.AddrPort]*Figures // ended; those that carried something, or have left the plan
}

// endpointOf is an endpoint of an account.
type endpointOf struct {
	*account
	address netip.AddrPort
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
		index:    &index{fronts: map[plan.Binding]front{}, local: local},
		services: map[service.Key]*account{}, stale: map[*account]bool{}, left: map[endpointOf]bool{}, flows: map[identity]*entry{},
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
			delete(a.stale, acc)
		}
	}
	for _, c := range d.Changes {
		if c.Is == nil {
			continue
		}
		a.index.add(c.Is)
		if acc := a.services[c.Key()]; acc != nil {
			acc.service = c.Is
			a.stale[acc] = true // other endpoints count
		}
		if c.Was != nil {
			for i := range c.Was.Endpoints {
				if address := c.Was.Endpoints[i].Address; c.Is.EndpointAt(address) == nil {
					acc := a.of(c.Is)
					acc.endpoint(address)
					a.left[endpointOf{acc, address}] = true // counted on, until it has no more flows
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
		for _, e := range is.Endpoints {
			if e.Active = 0; s.EndpointAt(e.Address) != nil {
				*acc.endpoint(e.Address) = e.Figures
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

// of returns the account of a service port of the plan, to change it.
func (a *Accounting) of(s *plan.Service) *account {
	acc := a.services[s.Port.Key]
	if acc == nil {
		acc = &account{service: s, endpoints: map[netip.AddrPort]*Figures{}}
		a.services[s.Port.Key] = acc
		a.made++
	}
	a.stale[acc] = true
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
	return acc.endpoints[address] != nil || acc.service != nil && acc.service.EndpointAt(address) != nil
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
	if acc := a.services[at.service.Port.Key]; at.service.EndpointAt(f.ReplySrc) == nil && (acc == nil || acc.endpoints[f.ReplySrc] == nil) {
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
	a.changed(e)
	if a.OnEnd != nil && e.service != nil {
		a.OnEnd(e.service, &e.flow)
	}
}

// changed marks the account of a flow, if the plan has its service port.
func (a *Accounting) changed(e *entry) {
	if e.service != nil {
		a.stale[e.account] = true
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

// Refresh lists the table unless that was done within maxAge. list is [Client.List].
func (a *Accounting) Refresh(maxAge time.Duration, list func(...Wanted) ([]Flow, error)) error {
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
	flows, err := list()
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
		a.changed(e)
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
			a.changed(e)
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
	if len(a.left) == 0 {
		return
	}
	unused := maps.Clone(a.left)
	for _, e := range a.flows {
		delete(unused, endpointOf{e.account, e.flow.ReplySrc})
	}
	for u := range unused {
		if u.service != nil && u.service.EndpointAt(u.address) == nil {
			delete(u.endpoints, u.address)
			a.stale[u.account] = true
		}
		delete(a.left, u)
	}
}

// Figures returns the figures of the service ports of the plan that the kernel
// has carried anything of, as of the last Refresh, and what has ended since.
func (a *Accounting) Figures() map[service.Key]ServiceFigures {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.recount()
	out := make(map[service.Key]ServiceFigures, len(a.services))
	for key, acc := range a.services {
		out[key] = acc.now
	}
	return out
}

// Settle counts what live flows have carried, and what has ended, for meters: once for all that are read together, as it looks
// at every flow.
func (a *Accounting) Settle() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.recount()
}

// Meter reads the figures of a service port; also after the plan has lost it, as those who read may have begun before.
type Meter struct {
	of      *Accounting
	key     service.Key
	account *account // nil before there is one
	looked  int      // how many accounts there were when it was looked for
}

// Meter returns the meter of a service port that the plan holds.
func (a *Accounting) Meter(k service.Key) *Meter { return &Meter{of: a, key: k, looked: -1} }

// Figures returns what Figures of Accounting has, as of the last Settle. The caller doesn't change Endpoints.
func (m *Meter) Figures() ServiceFigures {
	m.of.mu.Lock()
	defer m.of.mu.Unlock()
	if m.account == nil && m.looked != m.of.made { // most never get one
		m.account, m.looked = m.of.services[m.key], m.of.made
	}
	if m.account == nil {
		return ServiceFigures{}
	}
	return m.account.now
}

// recount brings now of each account up to date. Flows that are missing have ended.
func (a *Accounting) recount() {
	if len(a.stale) == 0 {
		return
	}
	for acc := range a.stale {
		acc.now = ServiceFigures{Figures: acc.ended}
		for address, ended := range acc.endpoints {
			acc.now.Endpoints = append(acc.now.Endpoints, EndpointFigures{address, *ended})
		}
	}
	found := map[endpointOf]int{} // each is looked for once, however many flows it has
	for _, e := range a.flows {
		if !a.stale[e.account] {
			continue
		}
		e.now.count(&e.flow, !e.gone.IsZero(), e.before)
		if e.counts(e.flow.ReplySrc) {
			k := endpointOf{e.account, e.flow.ReplySrc}
			i, ok := found[k]
			if !ok {
				i = e.now.endpoint(k.address)
				found[k] = i
			}
			e.now.Endpoints[i].count(&e.flow, !e.gone.IsZero(), e.before)
		}
	}
	clear(a.stale)
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
