package passive

import (
	"context"
	"iter"
	"log/slog"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"

	"kproxy.dev/kproxy/health"
	"kproxy.dev/kproxy/service/wake"
)

// What is remembered, at most.
const (
	maxRecords = 20_000 // endpoints
	maxClients = 64     // of one endpoint
)

// A Prober asks an endpoint, or its host, once. It returns soon after ctx ends.
type Prober interface {
	// Endpoint connects to the endpoint, or sends a UDP endpoint a datagram.
	Endpoint(ctx context.Context, e health.Endpoint) Answer
	// Host tries all that makes a host answer: a connect, which it may refuse, and an ICMP echo.
	Host(ctx context.Context, e health.Endpoint) Answer
}

// Answer says how a probe ended.
type Answer uint8

// The answers. Unknown says nothing of the endpoint: this node had no port or descriptor left, or was stopped.
const (
	Nothing Answer = iota
	Accepts
	Refuses
	Unknown
)

// Flow is a connection to an endpoint that something has come back on.
type Flow struct {
	ID       any  // comparable
	Open     bool // it can still carry data
	Received uint64
}

// Config has all that a Detector needs.
type Config struct {
	Log    *slog.Logger
	Node   string // this node's name
	Prober Prober
	// Endpoints yields the endpoints that may be ejected, each with its node, empty if unknown; some more than once.
	Endpoints func() iter.Seq2[health.Endpoint, string]
	// Flows returns the flows to some endpoints that have been answered.
	Flows func([]health.Endpoint) (map[health.Endpoint][]Flow, error)
	// Changed is called when View returns something else than before, with the endpoints that it is about.
	Changed func([]health.Endpoint)
	// Spare is told of an endpoint that refuses connections, for how long its refusals are to reach clients: it refuses
	// single clients only, or all and is ejected.
	Spare func(health.Endpoint, time.Duration)
	// Reset ends the connections to an endpoint that has left, and whose host is silent; nil keeps them.
	Reset func(health.Endpoint)
}

// Detector finds endpoints that are silent or refuse. Its methods are safe for concurrent use.
type Detector struct {
	cfg     Config
	limiter *rate.Limiter
	view    atomic.Pointer[health.Ejections]
	busy    atomic.Bool // an endpoint is being probed or ejected, so that answers to clients matter
	wake    chan struct{}

	mu       sync.Mutex // reporters and probes write, the loop takes
	reports  map[health.Endpoint]*report
	answered map[health.Endpoint]bool // to clients
	results  []result
	departed []health.Endpoint
	followed bool // there is another plan

	// What follows is the loop's own.
	records    map[health.Endpoint]*record
	departures map[health.Endpoint]*departure
	unknown    map[health.Endpoint]bool // reported, and of no service
	swept      map[string]time.Time     // nodes, when all of their endpoints were asked
	votes      map[string]*vote         // of other nodes
	compared   time.Time                // when they were asked last
	isolated   *health.Isolation
	changed    map[health.Endpoint]bool // since the last view
}

// report collects what clients met at an endpoint.
type report struct {
	refused bool // not silence
	clients map[netip.Addr]bool
	what    string // "SYNs", "datagrams"
}

// New returns a Detector that knows nothing.
func New(c Config) *Detector {
	return &Detector{
		cfg: c, limiter: rate.NewLimiter(rateLimit, burst), wake: make(chan struct{}, 1),
		reports: map[health.Endpoint]*report{}, answered: map[health.Endpoint]bool{},
		records: map[health.Endpoint]*record{}, departures: map[health.Endpoint]*departure{},
		unknown: map[health.Endpoint]bool{}, swept: map[string]time.Time{}, votes: map[string]*vote{}, changed: map[health.Endpoint]bool{},
	}
}

// View returns what is known now.
func (d *Detector) View() *health.Ejections { return d.view.Load() }

// Unanswered reports that a client's packets to an endpoint were not answered; what names them, "SYNs".
func (d *Detector) Unanswered(e health.Endpoint, client netip.Addr, what string) {
	d.report(e, client, what, false)
}

// Refused reports that an endpoint refused a client's connection.
func (d *Detector) Refused(e health.Endpoint, client netip.Addr) {
	d.report(e, client, "connects", true)
}

func (d *Detector) report(e health.Endpoint, client netip.Addr, what string, refused bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	r := d.reports[e]
	if r == nil {
		if len(d.reports) >= maxRecords {
			return
		}
		r = &report{clients: map[netip.Addr]bool{}, what: what}
		d.reports[e] = r
	}
	r.refused = r.refused || refused
	if len(r.clients) < maxClients {
		r.clients[client] = true
	}
	wake.Up(d.wake)
}

// Answered reports that an endpoint answered a client. While no endpoint is suspected or ejected it costs one atomic load.
func (d *Detector) Answered(e health.Endpoint) {
	if !d.busy.Load() {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.answered[e] = true
	wake.Up(d.wake)
}

// Departed reports endpoints that have left their API, or are neither ready nor serving: their connections are reset
// if their hosts stay silent.
func (d *Detector) Departed(endpoints []health.Endpoint) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.departed = append(d.departed, endpoints...)
	wake.Up(d.wake)
}

// Follow reports that Endpoints yields others than before. Those that aren't there any more are forgotten.
func (d *Detector) Follow() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.followed = true
	wake.Up(d.wake)
}

// Restore takes over what another process knew. It comes before Run.
func (d *Detector) Restore(known map[health.Endpoint]*health.Ejection) {
	for at, e := range known {
		d.records[at] = &record{endpoint: at, node: e.Node, ejected: e, wait: returnFirst, seen: time.Now()}
		d.changed[at] = true
	}
	d.publish()
	wake.Up(d.wake)
}

// Run judges until ctx is done. It returns when every probe has ended.
func (d *Detector) Run(ctx context.Context) error {
	var asking sync.WaitGroup
	defer asking.Wait()
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		if next := d.step(ctx, &asking); !next.IsZero() {
			timer.Reset(max(time.Until(next), time.Millisecond))
		}
		select {
		case <-ctx.Done():
			return nil
		case <-d.wake:
			time.Sleep(gather)
		case <-timer.C:
		}
	}
}

// step does what is due, and returns when to do it again; zero for when something is reported.
func (d *Detector) step(ctx context.Context, asking *sync.WaitGroup) time.Time {
	now := time.Now()
	d.mu.Lock()
	reports, answered, results, departed, followed := d.reports, d.answered, d.results, d.departed, d.followed
	d.reports, d.answered, d.results, d.departed, d.followed = map[health.Endpoint]*report{}, map[health.Endpoint]bool{}, nil, nil, false
	d.mu.Unlock()

	for at := range answered {
		if r := d.records[at]; r != nil {
			d.hasAnswered(r, now)
		}
	}
	d.take(results, now)
	d.depart(ctx, asking, departed, now)
	known := d.look(reports, followed)
	if followed {
		d.forgetGone(known)
	}
	for at, rep := range reports {
		if node, is := known[at]; is {
			d.suspect(at, node, rep, now)
		}
	}
	d.remember()
	d.widen(ctx, asking, now)
	d.judge(now)
	for _, r := range d.records {
		switch {
		case r.ejected != nil && r.asked == nil && !now.Before(r.due):
			if d.onTrial(r, now) {
				break
			}
			r.asked = &question{purpose: comeback, report: report{refused: r.ejected.Reason == health.Refused}}
		case r.ejected == nil && r.asked == nil && now.Sub(r.seen) > forgetAfter:
			delete(d.records, r.endpoint)
		}
	}
	d.begin(ctx, asking, now)
	d.publish()
	return d.next(now)
}

// next returns when something is due.
func (d *Detector) next(now time.Time) (next time.Time) {
	sooner := func(t time.Time) {
		if next.IsZero() || t.Before(next) {
			next = t
		}
	}
	for _, r := range d.records {
		switch {
		case r.asked != nil && r.asked.began.IsZero():
			sooner(now.Add(rateRetry))
		case r.asked != nil && !r.asked.done: // its end wakes
		case r.asked != nil:
			sooner(now)
		case r.ejected != nil:
			sooner(r.due)
		default:
			sooner(r.seen.Add(forgetAfter + time.Second))
		}
	}
	for _, x := range d.departures {
		if !x.asking {
			sooner(x.due)
		}
	}
	if d.isolated != nil {
		sooner(now.Add(isolatedEvery))
	}
	return next
}

// look returns the nodes of endpoints: of those reported that it hasn't seen, and, where there is another plan, of all
// that it knows. That goes through all endpoints, so what is found nowhere isn't looked for again before the next plan.
func (d *Detector) look(reports map[health.Endpoint]*report, followed bool) map[health.Endpoint]string {
	nodes := map[health.Endpoint]string{}
	if followed {
		clear(d.unknown)
	}
	search := followed && len(d.records) > 0
	if followed {
		for _, x := range d.departures {
			search = search || x.received != nil // of the others it isn't known yet whether there are connections
		}
	}
	for at := range reports {
		if r := d.records[at]; r != nil {
			nodes[at] = r.node
		} else if !d.unknown[at] && len(d.unknown) < maxRecords {
			d.unknown[at] = true
			search = true
		}
	}
	if !search {
		return nodes
	}
	for at, node := range d.cfg.Endpoints() {
		if d.unknown[at] || followed && (d.records[at] != nil || d.departures[at] != nil) {
			delete(d.unknown, at)
			nodes[at] = node
		}
	}
	return nodes
}

// forgetGone forgets the endpoints that aren't known any more, and lets departed ones be that are back.
func (d *Detector) forgetGone(known map[health.Endpoint]string) {
	for at, r := range d.records {
		node, is := known[at]
		if is {
			r.node = node
			continue
		}
		if r.ejected != nil {
			d.changed[at] = true
			if r.ejected.Reason == health.Silent { // if it departs, it has been silent since
				if x := d.departures[at]; x != nil && x.silent.IsZero() {
					x.silent = r.ejected.Since
				}
			}
		}
		delete(d.records, at)
	}
	for at := range d.departures {
		if _, is := known[at]; is {
			delete(d.departures, at)
		}
	}
}

// publish makes what is known the View, and tells of it.
func (d *Detector) publish() {
	busy := false
	for _, r := range d.records {
		busy = busy || r.asked != nil || r.ejected != nil
	}
	d.busy.Store(busy)
	if len(d.changed) == 0 {
		return
	}
	ejected := map[health.Endpoint]*health.Ejection{}
	for at, r := range d.records {
		if r.ejected != nil {
			ejected[at] = r.ejected
		}
	}
	d.view.Store(health.NewEjections(ejected, d.silentNodes(), d.isolated))
	var changed []health.Endpoint
	for at := range d.changed {
		if at.Address.IsValid() { // else this node
			changed = append(changed, at)
		}
	}
	clear(d.changed)
	d.cfg.Changed(changed)
}
