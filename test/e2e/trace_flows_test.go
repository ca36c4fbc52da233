package e2e

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/test/flows"
	"kproxy.dev/kproxy/trace"
)

// TestTraceFlows traces every row of the flow matrix (test/flows/matrix.txtar), for
// each kind of address, client, and family, and each kind of service once: what is
// foretold must be what the matrix promises, which TestFlows finds real packets to
// do. Of some, real packets are sent here as well, and probes.
func TestTraceFlows(t *testing.T) {
	onFlowWorlds(t, func(w *flowWorld, mode plan.Mode, args []string) {
		if mode == plan.ModeUserspace {
			w.start(append(args, "--offload-after", "1h")...)
			w.settled(plan.Userspace)
		} else {
			w.start(append(args, "--offload-after", "0s", "--offload-min-connections", "0")...)
			w.settled(plan.IPTables, plan.IPVS, plan.NFTables)
		}
		w.traceAll()
	})
}

// Of those traced, every so-manieth is tried with real packets as well, which are watched, and of
// those of the node itself, so many are probed.
const (
	traceTries  = 9
	traceProbes = 7
)

// traceAll traces what stands for all attempts, some at a time.
func (w *flowWorld) traceAll() {
	w.Helper()
	start := time.Now()
	all := w.represented()
	var failures []string
	var mu sync.Mutex
	var wg sync.WaitGroup
	slots := make(chan struct{}, max(1, int(4/slow)))
	tried, probed := 0, 0
	for i, a := range all {
		probe := i%traceProbes == 0 && (a.From == flows.Node || a.From == flows.Localhost)
		try := i%traceTries == 0
		if probe {
			probed++
		}
		if try {
			tried++
		}
		wg.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			err := w.traceOne(a, probe)
			if err == nil && try {
				err = w.watched(a)
			}
			if err != nil {
				mu.Lock()
				defer mu.Unlock()
				failures = append(failures, fmt.Sprintf("%s, %s: %v", a.network, a, err))
			}
		})
	}
	wg.Wait()
	slices.Sort(failures)
	for i, f := range failures {
		if i == 10 {
			w.Errorf("and %d more", len(failures)-i)
			break
		}
		w.Error(f)
	}
	w.Logf("%d traces of %d attempts, %d tried as well, %d probed, %d failed, in %s",
		len(all), len(w.attempts()), tried, probed, len(failures), time.Since(start).Round(time.Millisecond))
}

// represented are attempts that stand for all: one for each row, kind of address
// and client, for each row, client and family, and for each kind of endpoints,
// what becomes of the packet, and client; on a slow machine, for each row and client.
// They are by TCP and by UDP in turns, where that leaves none out.
func (w *flowWorld) represented() (out []attempt) {
	seen := map[string]bool{}
	for _, anyTurn := range []bool{false, true} {
		for i, a := range w.attempts() {
			if a.Left || a.network == "sctp" { // trace is of TCP and UDP
				continue
			}
			keys := []string{
				fmt.Sprint(a.Row.Line, a.Kind, a.From, a.name != "", a.Nowhere.IsValid()),
				fmt.Sprint(a.Row.Line, a.From, a.Family, a.Nowhere.IsValid()),
				fmt.Sprint(a.Service.Endpoints.Name, a.Want.Verdict, a.From),
			}
			if slow > 1 { // a trace takes seconds there
				keys = []string{fmt.Sprint(a.Row.Line, a.From, a.name != "", a.Nowhere.IsValid())}
			}
			turn := (i/2+int(a.Family)+len(out))%2 == 0 == (a.network == "tcp")
			if !turn && !anyTurn || !slices.ContainsFunc(keys, func(k string) bool { return !seen[k] }) {
				continue
			}
			for _, k := range keys {
				seen[k] = true
			}
			out = append(out, a)
		}
	}
	return out
}

// request is the trace of an attempt.
func (a *attempt) request(w *flowWorld) trace.Request {
	req := trace.Request{Address: a.target, Protocol: service.TCP}
	if a.network == "udp" {
		req.Protocol = service.UDP
	}
	switch a.From {
	case flows.Pod:
		pod := w.pod().Addresses[a.Family]
		if a.name != "" {
			pod = w.network.Endpoints[a.name][a.Family]
		}
		req.From = pod
	case flows.Outside:
		req.From = w.network.Outside[a.Family]
	}
	return req
}

// traceOne compares one trace with what must become of the attempt.
func (w *flowWorld) traceOne(a attempt, probe bool) error {
	ctx, cancel := context.WithTimeout(w.ctx, within(30*time.Second))
	defer cancel()
	req := a.request(w)
	req.Probe = probe
	r, err := w.client.Trace(ctx, req)
	for err != nil && slow > 1 && ctx.Err() == nil {
		r, err = w.client.Trace(ctx, req) // a client gives up after a while
	}
	if err != nil {
		return fmt.Errorf("trace: %w", err)
	}
	if len(r.Mismatches) > 0 {
		err = fmt.Errorf("mismatches %q, want none", r.Mismatches)
	}
	err = errors.Join(err, w.checkVerdict(&a, &r), w.checkCandidates(&a, &r), w.checkSource(&a, &r))
	if probe {
		err = errors.Join(err, w.checkProbe(&a, &r))
	}
	if err != nil {
		return fmt.Errorf("%w; traced:\n%s", err, r.Text(trace.Look{Width: 120}))
	}
	return nil
}

func (w *flowWorld) checkVerdict(a *attempt, r *trace.Result) error {
	want := map[flows.Verdict]trace.Verdict{flows.Serve: trace.Forwarded, flows.Refuse: trace.Refused, flows.Drop: trace.Dropped}[a.Want.Verdict]
	switch {
	case r.Verdict != want:
		return fmt.Errorf("verdict %q, want %q", r.Verdict, want)
	case (r.Culprit == "") != (want == trace.Forwarded):
		return fmt.Errorf("culprit %q of a packet that is %s", r.Culprit, want)
	case !a.Nowhere.IsValid() && !strings.Contains(r.Service, a.Service.Name):
		return fmt.Errorf("service %q, want %s", r.Service, a.Service.Name)
	}
	return nil
}

// checkCandidates: those that the packet may go to are those that may serve, and
// it goes to one of them for certain.
func (w *flowWorld) checkCandidates(a *attempt, r *trace.Result) error {
	var have []string
	sum := 0.0
	for _, c := range r.Candidates {
		if c.Probability == 0 {
			continue
		}
		name := c.Endpoint.String()
		for n, addresses := range w.network.Endpoints {
			if c.Endpoint == netip.AddrPortFrom(addresses[a.Family], w.network.TargetPorts[a.Service.Target(n, a.Port)]) {
				name = n
			}
		}
		have = append(have, name)
		sum += c.Probability
	}
	var want []string
	if a.Want.Verdict == flows.Serve {
		want = slices.Sorted(slices.Values(a.Want.Endpoints))
	}
	slices.Sort(have)
	switch {
	case !slices.Equal(have, want):
		return fmt.Errorf("candidates %v, want %v", have, want)
	case len(want) > 0 && (sum < 0.999 || sum > 1.001):
		return fmt.Errorf("probabilities of %v add up to %v", have, sum)
	}
	return nil
}

// checkSource: endpoints see the node's address where the matrix says so. A pod
// that meets itself is seen as the node, on that way only.
func (w *flowWorld) checkSource(a *attempt, r *trace.Result) error {
	if a.Want.Verdict != flows.Serve {
		return nil
	}
	m := r.Masquerade
	want, itself := a.Source, a.name != "" && a.Source == flows.AsClient && slices.Contains(a.Want.Endpoints, a.name)
	switch {
	case want == flows.AsNode && m.Source.IsValid() && !w.isNodes(m.Source):
		return fmt.Errorf("endpoints see %s, want the node's address: %s", m.Source, m.Reason)
	case want == flows.AsNode && !m.Yes && a.From != flows.Node && a.From != flows.Localhost:
		return fmt.Errorf("not masqueraded: %s", m.Reason)
	case want == flows.AsClient && m.Yes && !itself:
		return fmt.Errorf("masqueraded: %s", m.Reason)
	case itself && !m.Yes:
		return errors.New("an endpoint that reaches itself isn't masqueraded")
	}
	return nil
}

func (w *flowWorld) isNodes(a netip.Addr) bool {
	return w.isNode(lab.Answer{Peer: a}) || a.IsLoopback()
}

// checkProbe: what the probe met is what was foretold.
func (w *flowWorld) checkProbe(a *attempt, r *trace.Result) error {
	if r.Probe == nil {
		return errors.New("there was no probe")
	}
	var want []string
	switch a.Want.Verdict {
	case flows.Serve:
		want = []string{"connected", "answered", "no answer"} // the endpoints' UDP answers lines only
	case flows.Refuse:
		want = []string{"refused"}
	case flows.Drop:
		want = []string{"timeout", "no answer"}
	}
	if a.network == "udp" && a.Want.Verdict != flows.Serve {
		want = append(want, "unreachable") // a host's own datagram that a filter takes: EPERM
	}
	if !slices.Contains(want, r.Probe.Outcome) {
		return fmt.Errorf("the probe was %s, want one of %v: %s", r.Probe.Outcome, want, r.Probe.Note)
	}
	return nil
}
