package web

import (
	"net/netip"
	"time"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// sample gives the history what it keeps of now: by a look, or by a glance while
// nobody wants to know more.
func (r *Recorder) sample(now time.Time) {
	if r.mayDoze(now) {
		r.glance(now)
	} else {
		r.look(now, true)
	}
}

// mayDoze reports whether nobody has watched for a while.
func (r *Recorder) mayDoze(now time.Time) bool {
	if r.cfg.Glance == nil {
		return false
	}
	watched := r.hub.anybody()
	r.mu.Lock()
	defer r.mu.Unlock()
	if watched {
		r.asked = now
	}
	return r.asked.IsZero() || now.Sub(r.asked) >= r.cfg.Awake
}

// glance keeps the traffic and the changes of health since the last time.
func (r *Recorder) glance(now time.Time) {
	r.looking.Lock()
	defer r.looking.Unlock()
	type reading struct {
		key string
		plan.Connections
	}
	var traffic []reading
	p := r.cfg.Glance(func(k service.Key, c plan.Connections) { traffic = append(traffic, reading{k.String(), c}) })
	r.mu.Lock()
	defer r.mu.Unlock()
	r.looks++
	r.doze(p, now)
	k := r.keeping(now)
	for _, c := range traffic {
		rec := r.byKey[c.key]
		if rec == nil {
			rec = r.newRecord(c.key)
		}
		rec.begun = rec.begun || r.samples > 0 // it had carried nothing when there was the last sample
		rec.carried = r.looks
		r.keepCounts(rec, c.Connections, k)
	}
	for _, rec := range r.byKey {
		if rec.begun && rec.carried != r.looks {
			r.keepCounts(rec, plan.Connections{}, k)
		}
	}
	r.keptAt(now, k)
	if r.glanced != nil {
		plan.Changes(r.glanced, p, func(was, is *plan.Service) bool {
			r.changed(was, is, now)
			return true
		})
	}
	r.glanced = p
	r.forgetLoose(p)
}

// doze lets go of what only those who watch need.
func (r *Recorder) doze(p *plan.Plan, now time.Time) {
	if r.dozing {
		return
	}
	r.followPlan(p, now)
	r.dozing = true
	r.looked = time.Time{} // whoever asks waits for a look
	r.status.Services, r.services = nil, nil
	for key, rec := range r.byKey {
		rec.row = nil
		for a, log := range rec.health {
			if len(log) == 1 { // the status says as much
				delete(rec.health, a)
			}
		}
		if len(rec.health) == 0 {
			rec.health = nil
		}
		if rec.idle() {
			delete(r.byKey, key)
		}
	}
}

// followPlan keeps what has changed of health since the last look.
func (r *Recorder) followPlan(p *plan.Plan, now time.Time) {
	if p == nil {
		return
	}
	for _, s := range p.Services {
		rec := r.byKey[s.Port.Key.String()]
		if rec == nil || len(rec.health) == 0 {
			continue
		}
		endpoints := make([]plan.EndpointStatus, len(s.Endpoints))
		for i := range s.Endpoints {
			endpoints[i] = healthOf(&s.Endpoints[i])
		}
		rec.followHealth(endpoints, now)
	}
}

// healthOf is an endpoint's status as far as its health is concerned.
func healthOf(e *plan.Endpoint) plan.EndpointStatus {
	return plan.EndpointStatus{Address: e.Address, Health: e.Health, Since: e.Since, LastError: e.Error}
}

// idle reports whether nothing of rec has to be kept: it is as if it were new.
func (rec *record) idle() bool {
	for i := range rec.rings {
		if rec.rings[i].samples != nil {
			return false
		}
	}
	return rec.health == nil && len(rec.events.events) == 0 && rec.counted == plan.Connections{}
}

// changed keeps what a change of plan says about the health of endpoints.
func (r *Recorder) changed(was, is *plan.Service, now time.Time) {
	switch {
	case is == nil:
		r.loose = true
		return
	case was == nil:
		return
	}
	before := make(map[netip.AddrPort]*plan.Endpoint, len(was.Endpoints))
	for i := range was.Endpoints {
		before[was.Endpoints[i].Address] = &was.Endpoints[i]
	}
	key := is.Port.Key.String()
	for i := range is.Endpoints {
		e := &is.Endpoints[i]
		if old := before[e.Address]; old != nil && old.Health != e.Health {
			rec := r.byKey[key]
			if rec == nil {
				rec = r.newRecord(key)
			}
			rec.healthChanged(old, e, now)
		}
	}
}

// healthChanged adds to an endpoint's log, which begins with how it was before.
func (rec *record) healthChanged(was, is *plan.Endpoint, now time.Time) {
	if rec.health == nil {
		rec.health = map[netip.AddrPort]healthLog{}
	}
	log := rec.health[is.Address]
	for _, e := range []*plan.Endpoint{was, is} {
		if s := healthOf(e); log.lacks(&s) {
			log = log.add(&s, now)
		}
	}
	rec.health[is.Address] = log
}

// forgetLoose drops the records of service ports that p doesn't have. One that an
// event has just made waits: its service may be newer than p.
func (r *Recorder) forgetLoose(p *plan.Plan) {
	if !r.loose || p == nil {
		return
	}
	for _, s := range p.Services {
		if rec := r.byKey[s.Port.Key.String()]; rec != nil {
			rec.seen = r.looks
		}
	}
	r.loose = false
	for key, rec := range r.byKey {
		switch {
		case rec.seen < r.looks-1:
			delete(r.byKey, key)
		case rec.seen < r.looks:
			r.loose = true
		}
	}
}
