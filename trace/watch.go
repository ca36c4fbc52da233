package trace

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/trace/netfilter"
)

// WatchRequest says what to watch: the first packets of connections to an address.
type WatchRequest struct {
	Request
	Count   int           // it ends after so many connections
	Timeout time.Duration // and at last after this
	Started func()        // is called when packets are being marked
	// Predict traces; where rules change between two of its answers, both count.
	Predict func(context.Context, Request) (Result, error)
}

// Watched holds what was seen.
type Watched struct {
	Request
	Namespace string    `json:"namespace"`
	Seconds   float64   `json:"seconds"`
	Packets   []Packet  `json:"packets"`
	Counters  []Counter `json:"counters"`
	Notes     []string  `json:"notes"`
}

// Packet is a real one, the first that was seen of its connection, and what it met beside what
// was predicted.
type Packet struct {
	Client netip.AddrPort `json:"client"`
	// State is conntrack's: "new", "established", "related", "invalid", "untracked"; empty where
	// conntrack hasn't seen it.
	State string `json:"state"`
	In    string `json:"in,omitempty"`  // the interface that it came in on; empty for this node's own
	Out   string `json:"out,omitempty"` // and that it left by
	Fate  Fate   `json:"fate"`
	// To is its destination, as it was seen last.
	To netip.AddrPort `json:"to"`
	// Where is the rule that dropped it, or the hook after which it wasn't seen any more.
	Where      string     `json:"where,omitempty"`
	Verdict    Comparison `json:"verdict"`
	Difference string     `json:"difference,omitempty"` // the first, or why nothing is predicted
	// Steps are those that it met, and those of its way that it was to meet and didn't.
	Steps []MetStep `json:"steps"`
}

// Fate says what became of a real packet on this node.
type Fate string

// The fates.
const (
	Sent      Fate = "sent"      // it left by Out
	Delivered Fate = "delivered" // to a socket of this node's, if there is one
	Stopped   Fate = "dropped"   // by a rule; also where the rule refuses it
	Lost      Fate = "lost"      // between two hooks: by routing, or a virtual server
)

// Comparison says whether a real packet fared as predicted.
type Comparison string

// The comparisons. Nothing is predicted of packets that aren't their connection's first.
const (
	AsPredicted  Comparison = "as predicted"
	Differs      Comparison = "differs"
	NotPredicted Comparison = "not predicted"
)

// MetStep is a rule or policy that a real packet met, or was to meet.
type MetStep struct {
	Hook      string `json:"hook"`
	Table     string `json:"table"`
	Chain     string `json:"chain"`
	Text      string `json:"text"`
	Met       bool   `json:"met"`
	Predicted bool   `json:"predicted"`
}

// Counter is of what the kernel doesn't tell of which packets it meets ([Step.Silent]).
type Counter struct {
	Text   string `json:"text"`
	Before uint64 `json:"before"` // packets of all clients
	After  uint64 `json:"after"`
}

// Times of a watch.
const (
	// settles is how long a packet that has met something meets the next, at most.
	settles = 500 * time.Millisecond
	// predicts is how long a prediction holds for other packets of its client.
	predicts = 3 * time.Second
)

// ErrElsewhere says that Watch is called in another network namespace than kproxy's.
var ErrElsewhere = errors.New("kproxy is in another network namespace")

// elsewhere says which, and how to get there.
func elsewhere(name string) error {
	path := "PATH"
	if strings.HasPrefix(name, "/") {
		path = name
	}
	return fmt.Errorf("%w, %s; watch there: nsenter --net=%s kproxy trace --watch …", ErrElsewhere, name, path)
}

// Watch marks the next packets that come to an address, in the network namespace of the calling
// thread, which is to be the one that Predict traces, and calls each with every one as it is
// seen. It needs CAP_NET_ADMIN and leaves nothing behind, however the process ends.
func Watch(ctx context.Context, req WatchRequest, each func(*Packet)) (Watched, error) {
	req.Every = true
	baseline, err := req.Predict(ctx, req.Request)
	if err != nil {
		return Watched{}, err
	}
	if baseline.Namespace != spaceName() {
		return Watched{}, elsewhere(baseline.Namespace)
	}
	from := req.From
	if req.Netns != "" || req.Pod != "" {
		from = baseline.From
	}
	w := &watch{req: req, out: Watched{Request: baseline.Request, Namespace: baseline.Namespace, Packets: []Packet{}, Counters: []Counter{}, Notes: []string{}},
		flights: map[uint32]*flight{}, predictions: map[netip.Addr]prediction{}, each: each}
	if w.out.Request.From = from; !from.IsValid() {
		w.out.Request.Netns, w.out.Request.Pod = "", ""
	}
	if err := w.readRules(ctx); err != nil {
		return Watched{}, err
	}
	begin := time.Now()
	if w.source, err = netfilter.Watch(req.Protocol, baseline.Address, from); err != nil {
		return Watched{}, err
	}
	req.Started()
	err = w.run(ctx, begin.Add(req.Timeout))
	w.out.Seconds = time.Since(begin).Seconds()
	if closeErr := w.source.Close(); err != nil || closeErr != nil {
		return w.out, errors.Join(err, closeErr)
	}
	return w.out, w.count(context.WithoutCancel(ctx), &baseline)
}

// watch is one that is under way.
type watch struct {
	req         WatchRequest
	out         Watched
	source      *netfilter.Watcher
	rules       *netfilter.Tables
	rereads     int
	flights     map[uint32]*flight
	predictions map[netip.Addr]prediction
	each        func(*Packet)
}

type prediction struct {
	Result
	at time.Time
}

// flight is a packet that is on its way.
type flight struct {
	Packet
	first  netip.AddrPort // destination when it came
	src    netip.AddrPort // source as it was seen last
	hook   netfilter.Hook
	chosen bool // the chains of type nat have seen it
	looped bool // it left by loopback, and is to come in again
	seen   time.Time
}

func (w *watch) readRules(ctx context.Context) (err error) {
	c := netfilter.DefaultConfig()
	c.Variant.Name = ""
	w.rules, err = netfilter.ReadNumbered(ctx, c, service.FamilyOf(w.req.Address.Addr()))
	if err != nil {
		err = fmt.Errorf("read the rules of netfilter: %w", err)
	}
	return err
}

func (w *watch) run(ctx context.Context, deadline time.Time) error {
	settled := time.Now()
	for len(w.out.Packets) < w.req.Count && ctx.Err() == nil {
		now := time.Now()
		if now.After(deadline) && len(w.flights) == 0 {
			break
		}
		s, ok, err := w.source.Next(now.Add(settles / 5))
		if err != nil {
			return err
		}
		busy := time.Now()
		if ok && (now.Before(deadline) || !s.Begins) {
			err = w.see(ctx, &s)
		}
		if err == nil && now.Sub(settled) >= settles/5 { // also while packets keep coming
			settled, err = now, w.settle(ctx)
		}
		if err != nil {
			return err
		}
		for _, f := range w.flights { // what has come meanwhile is yet to be read
			f.seen = f.seen.Add(time.Since(busy))
		}
	}
	return nil
}

// settle ends the way of packets of which nothing more comes.
func (w *watch) settle(ctx context.Context) error {
	now := time.Now()
	for _, f := range w.flights {
		if now.Sub(f.seen) < settles || len(w.out.Packets) == w.req.Count {
			continue
		}
		f.Fate, f.Where = Lost, string(f.hook)
		if f.looped {
			f.Fate, f.Where = Sent, ""
		}
		if err := w.land(ctx, f); err != nil {
			return err
		}
	}
	return nil
}

// see notes one thing that a packet has met.
func (w *watch) see(ctx context.Context, s *netfilter.Sight) error {
	f := w.flights[s.Packet]
	if f == nil || s.Begins { // what comes in again, by loopback or by a bridge, has another number
		for id, o := range w.flights {
			if s.Src.IsValid() && o.src == s.Src {
				delete(w.flights, id)
				f, o.looped = o, false
				w.flights[s.Packet] = f
			}
		}
	}
	if s.Begins && f == nil {
		f = &flight{Packet: Packet{Client: s.Src, In: s.In, Steps: []MetStep{}}, first: s.Dst}
		w.flights[s.Packet] = f
	}
	if f == nil {
		return nil
	}
	f.seen = time.Now()
	if s.Src.IsValid() {
		f.src, f.To, f.Out = s.Src, s.Dst, s.Out
	}
	if s.State != "" && f.State == "" {
		f.State = strings.ToLower(string(s.State))
	}
	if s.Hook != "" {
		f.hook = s.Hook
	}
	switch {
	case s.Ends && s.Hook == netfilter.Postrouting && f.Out == loopback:
		f.looped = true
		return nil
	case s.Ends && s.Hook == netfilter.Postrouting:
		f.Fate = Sent
		return w.land(ctx, f)
	case s.Ends:
		f.Fate = Delivered
		return w.land(ctx, f)
	case s.Chain == "":
		return nil
	}
	return w.meet(ctx, f, s)
}

// meet notes a rule.
func (w *watch) meet(ctx context.Context, f *flight, s *netfilter.Sight) error {
	const rereads = 5
	step, known := w.rules.Met(s)
	if !known && s.Handle != 0 && w.rereads < rereads {
		w.rereads++
		if err := w.readRules(ctx); err != nil {
			return err
		}
		step, known = w.rules.Met(s)
	}
	if step.Hook != "" {
		f.hook = step.Hook
	}
	f.chosen = f.chosen || w.rules.Chooses(s)
	if s.Handle == 0 && !s.Dropped {
		return nil // a chain's end, or a policy that lets it pass
	}
	if !known {
		step.Text = fmt.Sprintf("rule with handle %d, which isn't there any more", s.Handle)
	}
	f.Steps = append(f.Steps, MetStep{Hook: string(f.hook), Table: step.Table, Chain: step.Chain, Text: step.Text, Met: true})
	if !s.Dropped {
		return nil
	}
	f.Fate, f.Where = Stopped, fmt.Sprintf("%s, chain %s in table %s", step.Text, step.Chain, step.Table)
	return w.land(ctx, f)
}

// land compares a packet with what is predicted, and is done with it.
func (w *watch) land(ctx context.Context, f *flight) error {
	for id, o := range w.flights {
		if o == f {
			delete(w.flights, id)
		}
	}
	if why := f.unforeseen(w.rules); why != "" {
		f.Verdict, f.Difference = NotPredicted, why
	} else {
		met := f.Steps
		for fresh := false; ; fresh = true {
			p, made, err := w.predict(ctx, f.Client.Addr(), fresh)
			if err != nil {
				return err
			}
			if f.Steps = slices.Clone(met); f.compare(&p) || made {
				break
			}
		}
	}
	w.out.Packets = append(w.out.Packets, f.Packet)
	w.each(&f.Packet)
	return nil
}

// unforeseen says why nothing is predicted of a packet; empty if something is.
func (f *flight) unforeseen(rules *netfilter.Tables) string {
	switch {
	case f.State != "" && f.State != "new" && f.State != "untracked":
		return "conntrack's state of it is " + f.State + ": what the first packet met decided, and predictions are of first packets"
	case f.State == "new" && !f.chosen && f.Fate != Stopped && rules.Chooses(nil):
		return "its connection has an entry in conntrack already, by which it goes"
	}
	return ""
}

// predict returns what is predicted for a client, and whether it has been made just now.
func (w *watch) predict(ctx context.Context, client netip.Addr, fresh bool) (Result, bool, error) {
	if p, ok := w.predictions[client]; ok && !fresh && time.Since(p.at) < predicts {
		return p.Result, false, nil
	}
	req := w.req.Request
	req.From, req.Netns, req.Pod = client, "", ""
	r, err := w.req.Predict(ctx, req)
	if err == nil {
		w.predictions[client] = prediction{r, time.Now()}
	}
	return r, true, err
}

// compare says whether a packet fared as predicted, and marks its steps.
func (f *flight) compare(p *Result) bool {
	f.Verdict, f.Difference = AsPredicted, f.differs(p)
	if f.Difference == "" {
		f.Difference = f.strays(p)
	}
	switch {
	case f.Difference == "":
		return true
	case p.Verdict == Undetermined:
		f.Verdict, f.Difference = NotPredicted, "the prediction is undetermined: "+p.Culprit
		return true
	}
	f.Verdict = Differs
	return false
}

// foretold is a step of a prediction.
type foretold struct {
	MetStep
	sure, not bool // the packet meets it for certain; it doesn't match
}

// way returns the rules and policies that are predicted of a packet's way to where it really went.
func (f *flight) way(p *Result) (out []foretold) {
	chance, hook := false, ""
	for i := range p.Steps {
		s := &p.Steps[i]
		if s.Hook != hook {
			chance, hook = false, s.Hook
		}
		if s.Leg != "" && s.Leg != f.To.String() || s.Kind != KindRule && s.Kind != KindPolicy {
			continue
		}
		x := foretold{MetStep: MetStep{Hook: s.Hook, Table: s.Table, Chain: s.Chain, Text: s.Text, Predicted: true}, not: s.Outcome == "no match"}
		matches := strings.HasPrefix(s.Outcome, "matches: ")
		x.sure = matches && !chance && !s.Silent
		chance = chance || !matches && !x.not
		out = append(out, x)
	}
	return out
}

// differs compares step by step, and returns the first difference. It adds the steps that the
// packet was to meet. Of base chains with one priority nothing says which comes first, so the
// order doesn't count; nor does how often, as two ways may lead to one endpoint.
func (f *flight) differs(p *Result) (first string) {
	way, met := f.way(p), f.Steps
	at, used, last := make([]int, len(met)), make([]bool, len(way)), -1
	for i, s := range met {
		at[i] = -1
		for j, x := range way {
			if x.Hook == s.Hook && x.Table == s.Table && x.Chain == s.Chain && x.Text == s.Text {
				if used[j] = true; at[i] < 0 || at[i] < last {
					at[i] = j
				}
			}
		}
		last = max(last, at[i])
	}
	if f.Fate == Sent || f.Fate == Delivered {
		last = len(way)
	}
	say := func(format string, args ...any) {
		if first == "" {
			first = fmt.Sprintf(format, args...)
		}
	}
	f.Steps = nil
	next := 0
	missed := func(until int) {
		for ; next < until; next++ {
			if x := way[next]; x.sure && !used[next] {
				f.Steps = append(f.Steps, x.MetStep)
				say("it didn't meet %s of chain %s in table %s, which is predicted to match", x.Text, x.Chain, x.Table)
			}
		}
	}
	for i, s := range met {
		missed(at[i])
		switch {
		case at[i] < 0:
			say("it met %s of chain %s in table %s, which the prediction doesn't have", s.Text, s.Chain, s.Table)
		case way[at[i]].not:
			say("%s of chain %s in table %s, which is predicted not to match, did", s.Text, s.Chain, s.Table)
		default:
			s.Predicted = true
		}
		f.Steps = append(f.Steps, s)
	}
	missed(last)
	return first
}

// strays compares where the packet went with where it was to go; empty if there.
func (f *flight) strays(p *Result) string {
	var may []string
	goal, balanced := false, slices.ContainsFunc(p.Steps, func(s Step) bool { return s.Kind == KindVirtualServer })
	for _, c := range p.Candidates {
		if c.Probability > 0 || c.Usable && balanced { // the fewest connections: as of another moment
			may = append(may, c.Endpoint.String())
			goal = goal || c.Endpoint == f.To
		}
	}
	listener := slices.ContainsFunc(p.Steps, func(s Step) bool { return s.Kind == KindListener && s.Leg == "" })
	told := fmt.Sprintf("the prediction is %s", p.Verdict)
	if p.Verdict == Forwarded {
		told += " to " + strings.Join(may, " or ")
	}
	switch {
	case f.Fate == Stopped:
	case f.Fate == Lost:
		if p.Verdict != Dropped && p.Verdict != Refused && !slices.ContainsFunc(p.Findings, func(x Finding) bool {
			return x.Severity == SeverityError && strings.Contains(x.What, f.To.String())
		}) {
			return fmt.Sprintf("it wasn't seen any more after %s; %s", f.Where, told)
		}
	case goal, f.Fate == Delivered && listener, f.To == f.first && p.Verdict == NotAService:
	case f.To == f.first:
		return fmt.Sprintf("it was %s with its destination as it was; %s", f.Fate, told)
	default:
		return fmt.Sprintf("it was %s to %s; %s", f.Fate, f.To, told)
	}
	return ""
}

// estimates is what a counter of IPVS may be behind: the kernel sums them up every two seconds
// (net/netfilter/ipvs/ip_vs_est.c).
const estimates = 2500 * time.Millisecond

// count compares the counters of what doesn't say which packets it meets.
func (w *watch) count(ctx context.Context, before *Result) error {
	counted := func(s *Step) bool {
		return s.Silent && s.Packets != nil
	}
	if !slices.ContainsFunc(before.Steps, func(s Step) bool { return counted(&s) }) {
		return nil
	}
	w.out.Notes = append(w.out.Notes, "legacy rules, rules of bridges and virtual servers don't tell which packets they meet; their counters are of all clients' packets")
	if slices.ContainsFunc(before.Steps, func(s Step) bool { return s.Kind == KindVirtualServer }) {
		time.Sleep(estimates)
	}
	after, err := w.req.Predict(ctx, w.req.Request)
	if err != nil {
		return err
	}
	text := func(s *Step) string {
		words := strings.Fields(s.Text)
		if s.Kind == KindRealServer && len(words) > 2 {
			words = words[:2] // behind it are weight and connections
		}
		return strings.TrimSpace(strings.TrimSpace(s.Table+" "+s.Chain) + " " + strings.Join(words, " "))
	}
	for i := range before.Steps {
		s := &before.Steps[i]
		at := slices.IndexFunc(after.Steps, func(o Step) bool { return counted(&o) && o.Hook == s.Hook && o.Leg == s.Leg && text(&o) == text(s) })
		if !counted(s) || at < 0 || slices.ContainsFunc(w.out.Counters, func(c Counter) bool { return c.Text == text(s) }) {
			continue
		}
		w.out.Counters = append(w.out.Counters, Counter{text(s), *s.Packets, *after.Steps[at].Packets})
	}
	return nil
}
