package passive

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"time"

	"kproxy.dev/kproxy/health"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/service/wake"
)

// How an endpoint is asked. A client sends its SYN again after a second, and, on Linux since 6.5, after two: the
// verdict comes between the two.
const (
	probes     = 4                      // connects; with a fifth of packets lost, all of them fail for one endpoint in 60
	fewProbes  = 2                      // of an endpoint that no client complains of, or that is ejected
	probeGap   = 110 * time.Millisecond // between two of them
	askFor     = 560 * time.Millisecond // from the first one to the verdict
	compareFor = 400 * time.Millisecond // the same of hosts to compare with, whose silence is known before the verdict
	askDeafFor = 3 * time.Second        // the same where clients are answered and probes aren't
	// rateLimit and burst bound the connects of all probes, a second and at once.
	rateLimit = 500
	burst     = 500
	rateRetry = 50 * time.Millisecond
	// gather delays a step, for reports of the same moment: in a storm, steps are few.
	gather = 2 * time.Millisecond
)

// result says how asking an endpoint ended; early, how its first probe did.
type result struct {
	endpoint health.Endpoint
	question *question // nil of a host, which node has been asked for, or a departed endpoint
	node     string
	early    bool
	answer   Answer
	sent     int // probes
}

// purpose says why an endpoint is asked.
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

func (d *Detector) asked() (out []*record) {
	for _, r := range d.records {
		if r.asked != nil {
			out = append(out, r)
		}
	}
	return out
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
	wake.Up(d.wake)
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
