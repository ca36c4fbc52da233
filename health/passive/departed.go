package passive

import (
	"context"
	"slices"
	"sync"
	"time"

	"kproxy.dev/kproxy/health"
)

// Connections to an endpoint that has left are reset when its host has been silent this long: a partition of a few
// seconds breaks nothing.
const (
	departedSilence = 5 * time.Second
	departedGather  = 5 * time.Second // whose connections are looked for together: that is most of what a change costs
	departedEvery   = time.Second
	departedMax     = 30 * time.Second // between two questions where the host answers, as that of a pod that drains
	maxDeparted     = 10_000
)

// departure is an endpoint that has left, and to which there may be connections.
type departure struct {
	due      time.Time
	wait     time.Duration
	asking   bool
	began    time.Time      // of the last question
	silent   time.Time      // since when nothing has come back; zero if something has
	received map[any]uint64 // by each connection; nil until some are found
}

// depart asks the hosts of endpoints that have left for as long as there are connections to them.
func (d *Detector) depart(ctx context.Context, asking *sync.WaitGroup, departed []health.Endpoint, now time.Time) {
	if d.cfg.Reset == nil {
		return
	}
	for _, at := range departed {
		if d.departures[at] != nil || len(d.departures) >= maxDeparted {
			continue
		}
		x := &departure{due: now.Add(departedGather - time.Duration(now.UnixNano())%departedGather), wait: departedEvery}
		if r := d.records[at]; r != nil && r.ejected != nil && r.ejected.Reason == health.Silent {
			x.silent, x.due = r.ejected.Since, now
		}
		d.departures[at] = x
	}
	var due []health.Endpoint
	for at, x := range d.departures {
		if !x.asking && !now.Before(x.due) {
			due = append(due, at)
		}
	}
	if len(due) == 0 {
		return
	}
	flows, err := d.cfg.Flows(due)
	if err != nil {
		d.cfg.Log.Warn("connections to endpoints that have left can't be listed", "error", err)
	}
	for _, at := range due {
		x := d.departures[at]
		switch {
		case err != nil:
			x.due = now.Add(departedEvery)
			continue
		case !slices.ContainsFunc(flows[at], func(f Flow) bool { return f.Open }):
			delete(d.departures, at)
			continue
		}
		if x.received == nil {
			d.Follow() // it may have come back
		}
		if x.progress(flows[at]) {
			x.silent = time.Time{}
		}
		if !d.limiter.AllowN(now, fewProbes) {
			x.due = now.Add(rateRetry)
			continue
		}
		x.asking, x.began = true, now
		asking.Go(func() {
			d.tell(d.probe(ctx, at, fewProbes, askFor, d.cfg.Prober.Host, func() {}))
		})
	}
}

// progress notes what connections have received, and reports whether one has got more than when it was looked at last.
func (x *departure) progress(flows []Flow) (is bool) {
	received := make(map[any]uint64, len(flows))
	for _, f := range flows {
		was, known := x.received[f.ID]
		is = is || known && f.Received > was
		received[f.ID] = f.Received
	}
	x.received = received
	return is
}

// hostAnswered takes what a departed endpoint's host has said.
func (d *Detector) hostAnswered(res result, now time.Time) {
	x := d.departures[res.endpoint]
	if x == nil {
		return
	}
	x.asking = false
	if res.answer != Nothing {
		x.silent, x.wait = time.Time{}, min(2*x.wait, departedMax)
		x.due = now.Add(x.wait)
		return
	}
	if x.silent.IsZero() {
		x.silent = x.began
	}
	x.wait, x.due = departedEvery, x.began.Add(departedEvery)
	if now.Sub(x.silent) < departedSilence || d.isolated != nil {
		return
	}
	d.cfg.Log.Warn("connections to an endpoint that has left are reset: its host is silent", "endpoint", res.endpoint.Address, "silent", now.Sub(x.silent).Round(time.Second))
	d.cfg.Reset(res.endpoint)
	delete(d.departures, res.endpoint)
}
