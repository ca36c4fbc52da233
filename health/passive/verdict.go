package passive

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"time"

	"kproxy.dev/kproxy/health"
	"kproxy.dev/kproxy/service"
)

// How often an endpoint is asked again.
const (
	returnFirst = time.Second     // after it was ejected, doubling
	returnMax   = 8 * time.Second // with jitter, less than ten
	returnFor   = 900 * time.Millisecond
	relapseSoon = time.Minute // one ejected again this soon waits twice as long as the last time
	// refutedFirst bounds how long a client isn't believed after the endpoint it complained of has answered,
	// doubling.
	refutedFirst = time.Second
	refutedMax   = 30 * time.Second
	// trialFirst is when an endpoint that has never answered a probe gets connections again, as it may be this node
	// that it doesn't answer, doubling.
	trialFirst = 5 * time.Minute
	trialMax   = 10 * time.Minute
	// forgetAfter bounds how long an endpoint is remembered that no client complains of any more.
	forgetAfter = 10 * time.Minute
)

// record holds what is known of one endpoint.
type record struct {
	endpoint health.Endpoint
	node     string
	asked    *question // nil while it isn't
	ejected  *health.Ejection
	due      time.Time     // of the next probe, while it is ejected
	wait     time.Duration // until that
	accepted bool          // it has answered a probe of this node
	deaf     bool          // it answered clients when it didn't answer probes
	trials   int
	returned time.Time // when it was ejected last until
	relapses int

	refuted map[complaint]time.Time // what isn't believed, until when
	pause   time.Duration           // the last such wait
	seen    time.Time               // when a client complained last
	heard   time.Time               // when it was asked last
	silent  bool                    // and said nothing
}

// complaint is a client's, of silence or of a refusal: that the one was wrong says nothing about the other.
type complaint struct {
	client  netip.Addr
	refused bool
}

// suspect asks an endpoint, unless those who complain aren't believed.
func (d *Detector) suspect(at health.Endpoint, node string, rep *report, now time.Time) {
	r := d.records[at]
	if r == nil {
		if len(d.records) >= maxRecords {
			return
		}
		r = &record{endpoint: at, node: node, refuted: map[complaint]time.Time{}}
		d.records[at] = r
	}
	r.seen = now
	for c := range rep.clients {
		if now.Before(r.refuted[complaint{c, rep.refused}]) {
			delete(rep.clients, c)
		}
	}
	if len(rep.clients) == 0 || r.ejected != nil {
		return
	}
	if q := r.asked; q != nil {
		for c := range rep.clients {
			if q.report.clients != nil && len(q.report.clients) < maxClients {
				q.report.clients[c] = true
			}
		}
		if q.purpose != suspect { // now a client complains of it
			q.purpose, q.report = suspect, *rep
		}
		return
	}
	r.asked = &question{purpose: suspect, report: *rep}
}

// hasAnswered takes it that an endpoint has answered a client.
func (d *Detector) hasAnswered(r *record, now time.Time) {
	if r.ejected != nil {
		d.restore(r, now, "it answered a client")
	} else if r.asked != nil {
		d.alive(r, now)
	}
}

// judge decides about those who have been asked.
func (d *Detector) judge(now time.Time) {
	var candidates []*record
	for _, r := range d.asked() {
		q := r.asked
		if !q.done {
			continue
		}
		r.heard, r.silent = now, q.answer == Nothing
		r.accepted = r.accepted || q.answer == Accepts || q.answer == Refuses
		switch {
		case q.purpose == comeback:
			r.asked = nil
			d.cameBack(r, q, now)
		case q.answer == Nothing:
			candidates = append(candidates, r)
		case q.answer == Refuses && q.report.refused: // there is no need to wait for others: they would be refused
			d.eject(r, now)
		default:
			d.alive(r, now)
		}
	}
	d.judgeIsolation(now)
	if len(candidates) == 0 {
		return
	}
	candidates = d.unanswered(candidates, now)
	for _, r := range candidates {
		q := r.asked
		switch {
		case d.isolated != nil && d.remote(r):
			r.asked = nil
		case q.purpose == sweep && !d.nodeIsSilent(r.node, now):
			r.asked = nil // it lets no one of this node in, and serves others for all that is known
		case r.deaf && now.Sub(q.first) < askDeafFor:
			r.asked = &question{purpose: q.purpose, report: q.report, before: q.before, first: q.first}
		default:
			d.eject(r, now)
		}
	}
}

// unanswered returns those of the candidates of whose clients none was answered since they were asked.
func (d *Detector) unanswered(candidates []*record, now time.Time) []*record {
	ask := make([]health.Endpoint, len(candidates))
	for i, r := range candidates {
		ask[i] = r.endpoint
	}
	flows, err := d.cfg.Flows(ask)
	if err != nil { // without it, no endpoint can be called dead
		d.cfg.Log.Warn("passive health has no verdict: connections can't be listed", "error", err)
	}
	return slices.DeleteFunc(candidates, func(r *record) bool {
		q := r.asked
		if err == nil && q.before != nil && !slices.ContainsFunc(flows[r.endpoint], func(f Flow) bool { return !q.before[f.ID] }) {
			return false
		}
		r.deaf = r.deaf || err == nil
		d.alive(r, now)
		return true
	})
}

// alive ends a suspicion. Those who complained aren't believed for a while.
func (d *Detector) alive(r *record, now time.Time) {
	q := r.asked
	r.asked = nil
	r.silent = false
	if q.purpose != suspect {
		return
	}
	if now.Sub(r.seen) > refutedMax*2 {
		r.pause = 0
	}
	r.pause = min(max(2*r.pause, refutedFirst), refutedMax)
	if r.refuted == nil || len(r.refuted) >= maxClients {
		r.refuted = map[complaint]time.Time{}
	}
	for c := range q.report.clients {
		r.refuted[complaint{c, q.report.refused}] = now.Add(r.pause)
	}
	if q.report.refused {
		d.cfg.Spare(r.endpoint, 2*refutedMax)
	}
	d.cfg.Log.Debug("an endpoint that a client complained of is alive", "endpoint", r.endpoint.Address, "evidence", q.report.text(), "answered", q.answer == Accepts || q.answer == Refuses)
}

func (rep *report) text() string {
	did, n := "unanswered", len(rep.clients)
	if rep.refused {
		did = "refused"
	}
	if n == 1 {
		return fmt.Sprintf("%s %s of 1 client", did, rep.what)
	}
	return fmt.Sprintf("%s %s of %d clients", did, rep.what, n)
}

// eject takes an endpoint out.
func (d *Detector) eject(r *record, now time.Time) {
	q := r.asked
	r.asked = nil
	e := &health.Ejection{Since: now, Reason: health.Silent, Evidence: q.report.text(), Probes: q.sent, Node: r.node}
	if q.answer == Refuses {
		e.Reason = health.Refused
		d.cfg.Spare(r.endpoint, 2*returnMax)
	}
	if q.purpose == sweep {
		e.Evidence = "silence of its node " + r.node
	}
	if now.Sub(r.returned) > relapseSoon {
		r.relapses = 0
	}
	r.ejected, r.wait = e, min(returnFirst<<min(r.relapses, 10), returnMax)
	r.due = now.Add(r.wait)
	d.changed[r.endpoint] = true
	d.cfg.Log.Warn("endpoint ejected", "endpoint", r.endpoint.Address, "protocol", r.endpoint.Protocol, "node", r.node, "reason", e.Reason, "probes", e.Probes, "evidence", e.Evidence)
}

// cameBack takes what an ejected endpoint answered.
func (d *Detector) cameBack(r *record, q *question, now time.Time) {
	if r.ejected == nil {
		return
	}
	switch {
	case q.answer == Accepts, q.answer == Refuses && r.endpoint.Protocol != service.TCP && r.ejected.Reason == health.Silent:
		d.restore(r, now, "it answers probes")
		return
	case q.answer == Refuses: // the host is back, the program isn't
		if r.ejected.Reason == health.Silent {
			e := *r.ejected
			e.Reason = health.Refused
			r.ejected = &e
			d.changed[r.endpoint] = true
		}
		d.cfg.Spare(r.endpoint, 2*returnMax)
	}
	r.wait = min(2*r.wait, returnMax)
	r.due = now.Add(time.Duration(float64(r.wait) * (0.8 + 0.3*rand.Float64())))
}

// restore gives an endpoint connections again.
func (d *Detector) restore(r *record, now time.Time, why string) {
	d.cfg.Log.Info("endpoint is back", "endpoint", r.endpoint.Address, "protocol", r.endpoint.Protocol, "after", now.Sub(r.ejected.Since).Round(time.Millisecond), "because", why)
	r.ejected, r.asked, r.silent = nil, nil, false
	r.returned, r.relapses = now, r.relapses+1
	d.changed[r.endpoint] = true
}

// onTrial lets clients try an endpoint that has never answered this node, after minutes.
func (d *Detector) onTrial(r *record, now time.Time) bool {
	if r.accepted || now.Sub(r.ejected.Since) < min(trialFirst<<min(r.trials, 10), trialMax) {
		return false
	}
	r.trials++
	d.restore(r, now, "it has never answered this node, and may answer clients")
	return true
}
