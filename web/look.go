package web

import (
	"net/netip"
	"strings"
	"time"

	"kproxy.dev/kproxy/plan"
)

// look reads the status and tells the streams what has changed. Only looks that
// keep go into the history; the others come when something has just happened.
func (r *Recorder) look(now time.Time, keep bool) {
	r.looking.Lock()
	defer r.looking.Unlock()
	if !keep && r.lookedSince(now) {
		return // somebody else did, while this one waited
	}
	st := r.cfg.Source.Status()
	r.mu.Lock()
	r.looks++
	r.looked, r.dozing, r.glanced = now, false, nil
	k := keeping{at: r.samples}
	if keep {
		k = r.keeping(now)
	}
	d := delta{Time: now.UTC(), Alive: st.Alive, Exhausted: listed(st.Exhausted), Changed: []*Row{}}
	services := make([]*record, len(st.Services))
	for i := range st.Services {
		s := &st.Services[i]
		rec := r.recordOf(i, s)
		services[i] = rec
		rec.at, rec.seen = i, r.looks
		was := rec.row
		rec.row = newRow(was, s, r.keepCounts(rec, s.Connections, k), now)
		if rec.row != was {
			d.Changed = append(d.Changed, rec.row.since(was))
		}
		rec.followHealth(s.Endpoints, now)
	}
	d.Removed = r.forget(len(services))
	d.news = len(d.Changed) > 0 || len(d.Removed) > 0 || st.Health() != r.status.Health()
	r.status, r.services = st, services
	if keep {
		r.keptAt(now, k)
	}
	r.mu.Unlock()
	r.hub.publish(&d)
	if keep {
		r.hub.publishNode(r.Node)
	}
}

// lookedSince reports whether what is known is newer than at.
func (r *Recorder) lookedSince(at time.Time) bool {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return r.looked.After(at)
}

// recordOf returns the record of the service at a place in the status. Mostly
// it is where it was the last time.
func (r *Recorder) recordOf(at int, s *plan.ServiceStatus) *record {
	if at < len(r.services) {
		if was := r.services[at]; was.row.Namespace == s.Namespace && was.row.Name == s.Name && was.row.Port == s.Port {
			return was
		}
	}
	key := rowKey(s)
	if rec := r.byKey[key]; rec != nil {
		return rec
	}
	return r.newRecord(key)
}

func (r *Recorder) newRecord(key string) *record {
	rec := &record{key: strings.Clone(key), at: -1, seen: r.looks, events: eventRing{limit: r.cfg.ServiceEvents}}
	r.byKey[rec.key] = rec
	return rec
}

// keeping says how a look goes into the history: into several places if it comes
// several intervals after the last that did.
type keeping struct {
	at, slots int // no slots: it doesn't
	took      time.Duration
}

// keeping is how what is found now goes into the history.
func (r *Recorder) keeping(now time.Time) keeping {
	k := keeping{at: r.samples, slots: 1}
	if !r.kept.IsZero() {
		k.took = now.Sub(r.kept)
		k.slots = min(max(int((k.took+r.cfg.Interval/2)/r.cfg.Interval), 1), r.cfg.Samples)
	}
	return k
}

// keptAt notes that the history has a sample of now.
func (r *Recorder) keptAt(now time.Time, k keeping) {
	r.kept = now
	r.samples += k.slots
}

// keepCounts writes the history and returns the rates to show. The first
// reading of a service is where its rates begin.
func (r *Recorder) keepCounts(rec *record, c plan.Connections, k keeping) Rates {
	if !rec.begun {
		rec.counted, rec.begun = c, true
	}
	if k.slots == 0 {
		if rec.row == nil {
			return Rates{}
		}
		return rec.row.Rates
	}
	now := rates(rec.counted, c, k.took)
	rec.counted = c
	for i, v := range [seriesCount]float64{
		seriesActive: float64(c.Active), seriesConnections: now.Connections,
		seriesBytesIn: now.BytesIn, seriesBytesOut: now.BytesOut,
		seriesFailed: now.Failed, seriesRetried: now.Retried,
	} {
		for slot := range k.slots {
			rec.rings[i].put((k.at+slot)%r.cfg.Samples, r.cfg.Samples, v)
		}
	}
	return now
}

// followHealth keeps what has changed of the endpoints' health, and forgets
// those that have gone.
func (rec *record) followHealth(endpoints []plan.EndpointStatus, now time.Time) {
	if rec.health == nil {
		rec.health = make(map[netip.AddrPort]healthLog, len(endpoints))
	}
	for i := range endpoints {
		e := &endpoints[i]
		if log := rec.health[e.Address]; log.lacks(e) {
			rec.health[e.Address] = log.add(e, now)
		}
	}
	if len(rec.health) == len(endpoints) {
		return
	}
	has := make(map[netip.AddrPort]bool, len(endpoints))
	for i := range endpoints {
		has[endpoints[i].Address] = true
	}
	for a := range rec.health {
		if !has[a] {
			delete(rec.health, a)
		}
	}
}

// forget drops the records of the services that this look didn't find, and
// returns their keys. A record that an event made waits for the next look: the
// service may have come after this one began.
func (r *Recorder) forget(found int) []string {
	removed := []string{}
	if len(r.byKey) == found {
		return removed
	}
	for key, rec := range r.byKey {
		if rec.seen == r.looks || rec.row == nil && rec.seen == r.looks-1 {
			continue
		}
		delete(r.byKey, key)
		if rec.row != nil {
			removed = append(removed, key)
		}
	}
	return removed
}
