package flows

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"kproxy.dev/kproxy/conntrack"
	"kproxy.dev/kproxy/health"
	"kproxy.dev/kproxy/health/passive"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/userspace"
)

// How much is remembered of connections that are over: at most some 20 MB.
const (
	recentServices = 1000 // service ports; of more, one that has been quiet for long makes room
	recentEnds     = 16   // of each, connections that ended, and as many that were refused
	recentTalks    = 40   // of each, pairs of client and endpoint
	recentRefused  = 100  // connections refused, of all service ports
	recentShown    = 50   // connections of a service port in one answer, those that the kernel remembers included
	recentPairs    = 4096 // pairs that are told apart while an answer is made; of more, the connections count as others'
	talkIdle       = 10 * time.Minute
)

// A connection without an answer is shown after its third SYN, which Linux sends three seconds after the first, or
// where the kernel doesn't count packets, when the last one was as long ago.
const (
	unansweredPackets = 3
	unansweredAfter   = 3 * time.Second
)

// Recents remembers connections that are over, who talked to whom, and who was refused, as userspace's
// connections and the kernel's flows end. Safe for concurrent use; the zero value is ready. It is on the path of
// every connection's end.
type Recents struct {
	mu       sync.Mutex
	services map[service.Key]*recent
	refused  lastEnds
}

// recent is a service port's.
type recent struct {
	last           time.Time
	ended, refused lastEnds
	talks          []plan.Talk
	others         uint64 // connections of pairs that made room
}

// lastEnds are the last ends, in a ring.
type lastEnds struct {
	list []plan.Ended
	next int
}

func (l *lastEnds) add(e plan.Ended, most int) {
	if len(l.list) < most {
		l.list = append(l.list, e)
		return
	}
	l.list[l.next] = e
	l.next = (l.next + 1) % most
}

// again gives a connection that was refused, and is there, the time of e.
func (l *lastEnds) again(e *plan.Ended) (there bool) {
	for i := range l.list {
		if x := &l.list[i]; x.Protocol == e.Protocol && x.Client == e.Client && x.Address == e.Address && x.Refused == e.Refused {
			x.Time, there = e.Time, true
		}
	}
	return there
}

// add remembers a connection of a service port that is over.
func (r *Recents) add(k service.Key, e plan.Ended) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if e.Refused != "" {
		if k != (service.Key{}) {
			e.Service = k.String()
		}
		r.refused.add(e, recentRefused)
	}
	if k == (service.Key{}) {
		return
	}
	s := r.services[k]
	if s == nil {
		s = &recent{}
		r.makeRoom()
		r.services[k] = s
	}
	s.last = e.Time
	if e.Refused != "" {
		s.refused.add(e, recentEnds)
	} else {
		s.ended.add(e, recentEnds)
	}
	s.talked(talkOf(e))
}

// RuleRefused remembers a client that a rule of the kernel's refused or dropped. One whose packets are dropped
// sends them again and again: that is one connection.
func (r *Recents) RuleRefused(k service.Key, e plan.Ended) {
	r.mu.Lock()
	there := r.refused.again(&e)
	if s := r.services[k]; s != nil {
		there = s.refused.again(&e) || there
	}
	r.mu.Unlock()
	if !there {
		r.add(k, e)
	}
}

// makeRoom forgets a service port, if there are too many: of a few, the one that has been quiet for longest.
func (r *Recents) makeRoom() {
	if r.services == nil {
		r.services = map[service.Key]*recent{}
	}
	if len(r.services) < recentServices {
		return
	}
	const few = 8 // Go begins to go through a map anywhere
	var oldest service.Key
	n := 0
	for k, s := range r.services {
		if n == 0 || s.last.Before(r.services[oldest].last) {
			oldest = k
		}
		if n++; n == few {
			break
		}
	}
	delete(r.services, oldest)
}

// talkOf returns what a connection that is over adds to what a client had with an endpoint.
func talkOf(e plan.Ended) plan.Talk {
	t := plan.Talk{Client: e.Client.Addr(), Endpoint: e.Endpoint, Connections: 1, BytesIn: e.BytesIn, BytesOut: e.BytesOut, Last: e.Time}
	if e.Refused != "" {
		t.Connections, t.Refused = 0, 1
	}
	return t
}

func addTalk(to *plan.Talk, t plan.Talk) {
	to.Connections += t.Connections
	to.Refused += t.Refused
	to.BytesIn += t.BytesIn
	to.BytesOut += t.BytesOut
	if t.Last.After(to.Last) {
		to.Last = t.Last
	}
}

// talked adds to what a client had with an endpoint. A new pair takes the place of one that has been silent for
// long, else of one that had least.
func (s *recent) talked(t plan.Talk) {
	for i := range s.talks {
		if x := &s.talks[i]; x.Client == t.Client && x.Endpoint == t.Endpoint {
			addTalk(x, t)
			return
		}
	}
	if len(s.talks) < recentTalks {
		s.talks = append(s.talks, t)
		return
	}
	worth := func(x *plan.Talk) uint64 {
		if t.Last.Sub(x.Last) > talkIdle {
			return 0
		}
		return x.Connections + x.Refused
	}
	least := 0
	for i := range s.talks {
		a, b := &s.talks[i], &s.talks[least]
		if cmp.Or(cmp.Compare(worth(a), worth(b)), a.Last.Compare(b.Last)) < 0 {
			least = i
		}
	}
	s.others += s.talks[least].Connections + s.talks[least].Refused
	s.talks[least] = t
}

// Follow forgets the service ports that d removes.
func (r *Recents) Follow(d plan.Delta) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, c := range d.Changes {
		if c.Is == nil {
			delete(r.services, c.Key())
		}
	}
}

// remembered returns what is remembered of a service port.
func (r *Recents) remembered(k service.Key) plan.Recent {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := r.services[k]
	if s == nil {
		s = &recent{}
	}
	return plan.Recent{Ended: slices.Clone(s.ended.list), Refused: slices.Clone(s.refused.list), Talks: slices.Clone(s.talks), Others: s.others}
}

// Refused returns the last connections that no endpoint took, of all service ports, newest first. Of those that the
// kernel's rules refuse or drop it knows what [kernel.RefusalLog] tells.
func (r *Recents) Refused() []plan.Ended {
	r.mu.Lock()
	out := append([]plan.Ended{}, r.refused.list...)
	r.mu.Unlock()
	return newestFirst(out)
}

// keepNewest adds to what newestFirst will get, without keeping all of it.
func keepNewest(list []plan.Ended, e plan.Ended) []plan.Ended {
	if list = append(list, e); len(list) >= 8*recentShown {
		return newestFirst(list)
	}
	return list
}

// talkSum sums up what clients had with endpoints.
type talkSum struct {
	pairs  map[pair]*plan.Talk
	others uint64 // connections of pairs too many
}

type pair struct {
	client   netip.Addr
	endpoint netip.AddrPort
}

func (s *talkSum) add(t plan.Talk) {
	at := pair{t.Client, t.Endpoint}
	to := s.pairs[at]
	switch {
	case to != nil:
		addTalk(to, t)
	case len(s.pairs) >= recentPairs:
		s.others += t.Connections + t.Refused
	default:
		if s.pairs == nil {
			s.pairs = map[pair]*plan.Talk{}
		}
		s.pairs[at] = &t
	}
}

// most returns the n pairs that had most, and how many connections the others had.
func (s *talkSum) most(n int) (out []plan.Talk, others uint64) {
	all := slices.SortedFunc(maps.Values(s.pairs), func(x, y *plan.Talk) int {
		return cmp.Or(cmp.Compare(y.Connections+y.Refused, x.Connections+x.Refused), x.Client.Compare(y.Client), x.Endpoint.Compare(y.Endpoint))
	})
	out, others = make([]plan.Talk, 0, min(n, len(all))), s.others
	for i, t := range all {
		if i < n {
			out = append(out, *t)
		} else {
			others += t.Connections + t.Refused
		}
	}
	return out, others
}

func newestFirst(list []plan.Ended) []plan.Ended {
	slices.SortStableFunc(list, func(a, b plan.Ended) int { return b.Time.Compare(a.Time) })
	return append([]plan.Ended{}, list[:min(len(list), recentShown)]...)
}

// UserspaceEnded takes each of userspace's connections and sessions as it ends.
func (r *Recents) UserspaceEnded(x userspace.End) {
	now := time.Now()
	e := plan.Ended{
		Time: now, Protocol: x.Protocol.String(), Client: x.Client, Address: x.Address, Endpoint: x.Endpoint, DataPlane: plan.Userspace,
		LastedSeconds: now.Sub(x.Started).Seconds(), BytesIn: x.BytesIn, BytesOut: x.BytesOut, Reset: x.Reset,
	}
	if x.Refused != nil {
		e.Refused, e.Reset = x.Refused.Error(), false
	}
	r.add(x.Service, e)
}

// KernelEnded takes each of the kernel's flows as it ends.
func (r *Recents) KernelEnded(s *plan.Service, f *conntrack.Flow) {
	r.add(s.Port.Key, endOf(s, f, time.Now()))
}

// endOf is the end of a flow of the kernel's, as far as it tells. Service is left to who shows it: flows are many.
func endOf(s *plan.Service, f *conntrack.Flow, now time.Time) plan.Ended {
	e := plan.Ended{
		Time: now.Add(-f.Lingered()), Protocol: f.Protocol.String(), Client: f.OrigSrc, Address: f.OrigDst, Endpoint: f.ReplySrc,
		DataPlane: s.Kernel, BytesIn: f.OrigBytes, BytesOut: f.ReplyBytes, Reset: f.Reset(),
	}
	if !f.Start.IsZero() {
		e.LastedSeconds = e.Time.Sub(f.Start).Seconds()
	}
	switch {
	case f.Refused():
		e.Refused, e.Reset = "the endpoint refused it", false
	case f.Failed():
		e.Refused, e.Reset = "the endpoint didn't answer", false
	}
	return e
}

// Of returns what is remembered of a service port's clients, and what the kernel and userspace carry
// for them now.
func (r *Recents) Of(k service.Key, kernel *conntrack.Accounting, user *userspace.Server) plan.Recent {
	out := r.remembered(k)
	now := time.Now()
	var talks talkSum
	for _, t := range out.Talks {
		talks.add(t)
	}
	kernel.Carried(k, func(s *plan.Service, f *conntrack.Flow) {
		e := endOf(s, f, now)
		t := talkOf(e)
		switch {
		case f.Opening():
			if f.Answered() || f.OrigPackets < unansweredPackets && f.Lingered() < unansweredAfter {
				return
			}
			e.Refused = "the endpoint didn't answer"
			t = talkOf(e)
			out.Refused = keepNewest(out.Refused, e)
		case f.Open():
			t.Last = time.Time{}
		case e.Refused != "":
			out.Refused = keepNewest(out.Refused, e)
		default:
			out.Ended = keepNewest(out.Ended, e)
		}
		talks.add(t)
	})
	for _, c := range user.Connections() {
		if c.Service == k && c.Endpoint.IsValid() {
			talks.add(plan.Talk{Client: c.Client.Addr(), Endpoint: c.Endpoint, Connections: 1, BytesIn: c.BytesIn, BytesOut: c.BytesOut})
		}
	}
	out.Ended, out.Refused = newestFirst(out.Ended), newestFirst(out.Refused)
	for _, list := range [][]plan.Ended{out.Ended, out.Refused} {
		for i := range list { // not as each ends: they are many
			list[i].Service = k.String()
		}
	}
	var others uint64
	out.Talks, others = talks.most(recentTalks)
	out.Others += others
	out.Connects = user.ConnectTimes(k)
	return out
}

// Rows returns what userspace carries, and what the kernel does with its data planes, sorted.
func Rows(user []userspace.Connection, kernel []conntrack.Connection, planes []plan.Abilities) []plan.ConnectionStatus {
	rows := []plan.ConnectionStatus{}
	now := time.Now()
	for _, c := range user {
		rows = append(rows, plan.ConnectionStatus{
			Protocol: c.Protocol.String(), Client: c.Client, Service: c.Service.String(), Address: c.Address, Endpoint: c.Endpoint,
			DataPlane: plan.Userspace, AgeSeconds: now.Sub(c.Started).Seconds(), BytesIn: c.BytesIn, BytesOut: c.BytesOut,
		})
	}
	for _, c := range kernel {
		f := &c.Flow
		row := plan.ConnectionStatus{
			Protocol: f.Protocol.String(), Client: f.OrigSrc, Service: c.Service.String(), Address: f.OrigDst, Endpoint: f.ReplySrc,
			DataPlane: plan.None, BytesIn: f.OrigBytes, BytesOut: f.ReplyBytes,
		}
		carries := func(a plan.Abilities) bool { return a.DestinationNAT == f.DestinationNAT() }
		if i := slices.IndexFunc(planes, carries); i >= 0 {
			row.DataPlane = planes[i].Plane
		}
		if !f.Start.IsZero() {
			row.AgeSeconds = now.Sub(f.Start).Seconds()
		}
		rows = append(rows, row)
	}
	slices.SortStableFunc(rows, func(x, y plan.ConnectionStatus) int {
		return cmp.Or(
			strings.Compare(x.Service, y.Service), strings.Compare(x.Protocol, y.Protocol),
			x.Client.Compare(y.Client), x.Address.Compare(y.Address),
		)
	})
	return rows
}

// listEach is for how many endpoints a list asks by name; for more, one of everything is cheaper.
const listEach = 8

// Departed returns the TCP endpoints that are gone, or neither ready nor serving any more, but for those of services that
// are to be left alone.
func Departed(d plan.Delta) (out []health.Endpoint) {
	for _, c := range d.Changes {
		if c.Was == nil || c.Was.Port.Protocol != service.TCP {
			continue
		}
		serves := map[netip.AddrPort]bool{}
		if c.Is != nil {
			for i := range c.Is.Endpoints {
				e := &c.Is.Endpoints[i]
				serves[e.Address] = e.Ready || e.Serving
			}
		}
		for i := range c.Was.Endpoints {
			if e := &c.Was.Endpoints[i]; c.Was.MayBeEjected(e) && !serves[e.Address] {
				out = append(out, health.Endpoint{Protocol: service.TCP, Address: e.Address})
			}
		}
	}
	return out
}

// To returns the flows to endpoints that have been answered, userspace's among them: the kernel tracks its connections, too.
func To(list func(...conntrack.Wanted) ([]conntrack.Flow, error), endpoints []health.Endpoint) (map[health.Endpoint][]passive.Flow, error) {
	asked := make(map[health.Endpoint]bool, len(endpoints))
	var which []conntrack.Wanted
	for _, at := range endpoints {
		asked[at] = true
		which = append(which, conntrack.Wanted{Protocol: at.Protocol, From: at.Address})
	}
	if len(which) > listEach {
		which = nil
	}
	flows, err := list(which...)
	if err != nil {
		return nil, err
	}
	out := make(map[health.Endpoint][]passive.Flow, len(endpoints))
	for i := range flows {
		f := &flows[i]
		if at := (health.Endpoint{Protocol: f.Protocol, Address: f.ReplySrc}); asked[at] && f.Answered() && !f.Refused() {
			out[at] = append(out[at], passive.Flow{ID: f.Key(), Open: f.Open(), Received: f.ReplyBytes})
		}
	}
	return out, nil
}
