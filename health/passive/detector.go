package passive

import (
	"cmp"
	"context"
	"fmt"
	"iter"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"

	"kproxy.dev/kproxy/health"
	"kproxy.dev/kproxy/service"
)

// How an endpoint is asked. A client sends its SYN again after a second, and, on Linux since 6.5, after two: the
// verdict comes between the two.
const (
	probes     = 4                      // connects; with a fifth of packets lost, all of them fail for one endpoint in 60
	fewProbes  = 2                      // of an endpoint that nobody complains of, or that is ejected
	probeGap   = 150 * time.Millisecond // between two of them
	askFor     = 700 * time.Millisecond // from the first one to the verdict
	compareFor = 500 * time.Millisecond // the same of hosts to compare with, whose silence is known before the verdict
	askDeafFor = 3 * time.Second        // the same where clients are answered and probes aren't
	// rateLimit and burst bound the connects of all probes, a second and at once.
	rateLimit = 500
	burst     = 500
	rateRetry = 50 * time.Millisecond
	// gather is how long what is reported at one moment is gathered: in a storm, steps are few.
	gather = 2 * time.Millisecond
)

// How often an endpoint is asked again.
const (
	returnFirst = time.Second     // after it was ejected, doubling
	returnMax   = 8 * time.Second // with jitter, less than ten
	returnFor   = 900 * time.Millisecond
	relapseSoon = time.Minute // one ejected again this soon waits twice as long as the last time
	// refutedFirst is how long a client isn't believed after an endpoint has answered that this client complained of,
	// doubling.
	refutedFirst = time.Second
	refutedMax   = 30 * time.Second
	// trialFirst is when an endpoint that has never answered a probe gets connections again, as it may be this node
	// that it doesn't answer, doubling.
	trialFirst = 5 * time.Minute
	trialMax   = 10 * time.Minute
	// forgetAfter is how long an endpoint is remembered that nobody complains of any more.
	forgetAfter = 10 * time.Minute
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

// Answer is what became of a probe.
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

// Config is what a Detector works with.
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
	busy    atomic.Bool // it asks or has ejected somebody, so that answers to clients matter
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

// report is what clients met at an endpoint.
type report struct {
	refused bool // not silence
	clients map[netip.Addr]bool
	what    string // "SYNs", "datagrams"
}

// result is what came of asking an endpoint; early of the first probe alone.
type result struct {
	endpoint health.Endpoint
	question *question // nil of a host, which node has been asked for, or a departed endpoint
	node     string
	early    bool
	answer   Answer
	sent     int // probes
}

// purpose is why an endpoint is asked.
type purpose uint8

const (
	suspect purpose = iota // clients complain
	sweep                  // its node seems to be dead
	comeback
)

// question is an endpoint being asked.
type question struct {
	purpose purpose
	report  report       // of a suspect
	began   time.Time    // zero until it is
	first   time.Time    // began, of one that is asked for longer
	early   bool         // the first probe is over, and nothing has come back
	before  map[any]bool // flows that had been answered then
	done    bool
	answer  Answer
	sent    int
}

// record is what is known of one endpoint.
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

	refuted map[netip.Addr]time.Time // clients who aren't believed, until when
	pause   time.Duration            // the last such wait
	seen    time.Time                // when somebody complained last
	heard   time.Time                // when it was asked last
	silent  bool                     // and said nothing
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
	d.signal()
}

// Answered reports that an endpoint answered a client. While nobody is suspected it costs one atomic load.
func (d *Detector) Answered(e health.Endpoint) {
	if !d.busy.Load() {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.answered[e] = true
	d.signal()
}

// Departed reports endpoints that have left their API, or are neither ready nor serving: their connections are reset
// if their hosts stay silent.
func (d *Detector) Departed(endpoints []health.Endpoint) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.departed = append(d.departed, endpoints...)
	d.followed = true // others may have them still
	d.signal()
}

// Follow reports that Endpoints yields others than before. Those that aren't there any more are forgotten.
func (d *Detector) Follow() {
	if !d.busy.Load() {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.followed = true
	d.signal()
}

// Restore takes over what another process knew. It comes before Run.
func (d *Detector) Restore(known map[health.Endpoint]*health.Ejection) {
	for at, e := range known {
		d.records[at] = &record{endpoint: at, node: e.Node, ejected: e, wait: returnFirst, seen: time.Now()}
		d.changed[at] = true
	}
	d.publish()
	d.signal()
}

func (d *Detector) signal() {
	select {
	case d.wake <- struct{}{}:
	default:
	}
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

// begin asks those who are to be asked, clients' suspects first, as far as the rate lets it.
func (d *Detector) begin(ctx context.Context, asking *sync.WaitGroup, now time.Time) {
	waiting := slices.DeleteFunc(d.asked(), func(r *record) bool { return !r.asked.began.IsZero() })
	slices.SortFunc(waiting, func(a, b *record) int { return cmp.Compare(a.asked.purpose, b.asked.purpose) })
	for _, r := range waiting {
		q, n, bound := r.asked, probes, askFor
		switch q.purpose {
		case comeback:
			n, bound = fewProbes, returnFor
		case sweep:
			n = fewProbes
		}
		if !d.limiter.AllowN(now, n) {
			return
		}
		q.began = now
		if q.first.IsZero() {
			q.first = now
		}
		ask := d.proberOf(r.endpoint, q)
		asking.Go(func() {
			out := d.probe(ctx, r.endpoint, n, bound, ask, func() { d.tell(result{endpoint: r.endpoint, question: q, early: true}) })
			out.question = q
			d.tell(out)
		})
	}
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
	search := followed
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

func (d *Detector) asked() (out []*record) {
	for _, r := range d.records {
		if r.asked != nil {
			out = append(out, r)
		}
	}
	return out
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

// suspect asks an endpoint, unless those who complain aren't believed.
func (d *Detector) suspect(at health.Endpoint, node string, rep *report, now time.Time) {
	r := d.records[at]
	if r == nil {
		if len(d.records) >= maxRecords {
			return
		}
		r = &record{endpoint: at, node: node, refuted: map[netip.Addr]time.Time{}}
		d.records[at] = r
	}
	r.seen = now
	for c := range rep.clients {
		if now.Before(r.refuted[c]) {
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
		if q.purpose != suspect { // now somebody complains of it
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

// proberOf returns what an endpoint is asked. A UDP endpoint needn't say anything, so its host is asked, unless the
// endpoint was found to refuse.
func (d *Detector) proberOf(at health.Endpoint, q *question) func(context.Context, health.Endpoint) Answer {
	if at.Protocol == service.TCP || q.report.refused {
		return d.cfg.Prober.Endpoint
	}
	return d.cfg.Prober.Host
}

// probe sends n probes until one is answered or bound is over. It calls early when the first one has had its time.
func (d *Detector) probe(ctx context.Context, at health.Endpoint, n int, bound time.Duration, ask func(context.Context, health.Endpoint) Answer, early func()) result {
	ctx, cancel := context.WithTimeout(ctx, bound)
	defer cancel()
	answers := make(chan Answer, n)
	out := result{endpoint: at}
	next := time.NewTimer(0)
	defer next.Stop()
	for over := 0; over < n; {
		select {
		case <-next.C:
			out.sent++
			go func() { answers <- ask(ctx, at) }()
			if out.sent < n {
				next.Reset(probeGap)
			}
			if out.sent == 2 {
				early()
			}
		case out.answer = <-answers:
			if over++; out.answer != Nothing {
				return out
			}
		case <-ctx.Done():
			return out
		}
	}
	<-ctx.Done() // others may be answered until then
	return out
}

func (d *Detector) tell(r result) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.results = append(d.results, r)
	d.signal()
}

// take notes what came of questions.
func (d *Detector) take(results []result, now time.Time) {
	for _, res := range results {
		if res.node != "" {
			d.votes[res.node] = &vote{asked: now, silent: res.answer == Nothing}
			continue
		}
		if res.question == nil {
			d.hostAnswered(res, now)
			continue
		}
		r := d.records[res.endpoint]
		switch {
		case r == nil || r.asked != res.question: // an answer to a client came first
		case res.early:
			r.asked.early = true
		default:
			r.asked.done, r.asked.answer, r.asked.sent = true, res.answer, res.sent
		}
	}
}

// remember notes which flows of those that are silent so far have been answered, to tell who is answered after.
func (d *Detector) remember() {
	var ask []health.Endpoint
	for _, r := range d.asked() {
		if q := r.asked; q.before == nil && q.purpose != comeback && q.early {
			ask = append(ask, r.endpoint)
		}
	}
	if len(ask) == 0 {
		return
	}
	flows, err := d.cfg.Flows(ask)
	if err != nil {
		d.cfg.Log.Debug("which clients are answered isn't known", "error", err)
	}
	for _, at := range ask {
		before := map[any]bool{}
		for _, f := range flows[at] {
			before[f.ID] = true
		}
		d.records[at].asked.before = before
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
		case q.purpose == sweep && !d.nodeIsSilent(r.node):
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
	if err != nil { // without it, nobody can be called dead
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
		r.refuted = map[netip.Addr]time.Time{}
	}
	for c := range q.report.clients {
		r.refuted[c] = now.Add(r.pause)
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

// publish makes what is known the View, and tells of it.
func (d *Detector) publish() {
	d.busy.Store(len(d.records)+len(d.departures)+len(d.unknown) > 0)
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
