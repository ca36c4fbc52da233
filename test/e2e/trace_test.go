package e2e

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"kproxy.dev/kproxy/agent/node"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/iptables"
	"kproxy.dev/kproxy/kernel/ipvs"
	"kproxy.dev/kproxy/kernel/nftables"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/source/file"
	"kproxy.dev/kproxy/test/kerneltest"
	"kproxy.dev/kproxy/trace"
)

// fates of real packets.
const (
	isAnswered = "answered"
	isRefused  = "refused"
	isSilent   = "silent" // until the client gave up
)

// fate asks target on a new connection from a client's address, and returns what became of it.
func (w *world) fate(local netip.Addr, target netip.AddrPort) string {
	return fateOf(w.askFrom(local, "tcp", target, lasting(1500*time.Millisecond)))
}

func fateOf(err error) string {
	var timeout interface{ Timeout() bool }
	switch {
	case err == nil:
		return isAnswered
	case errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, context.DeadlineExceeded), errors.As(err, &timeout) && timeout.Timeout():
		return isSilent
	}
	return isRefused
}

// traced asks the running kproxy.
func (w *world) traced(req trace.Request) trace.Result {
	w.Helper()
	if req.Protocol == 0 {
		req.Protocol = service.TCP
	}
	var r trace.Result
	w.eventually(20*time.Second, "a trace", func() (err error) { // a slow machine takes too long at times
		r, err = w.client.Trace(w.ctx, req)
		return err
	})
	return r
}

// tracedStopped traces in this process, with what the stopped kproxy knows, which
// can neither answer nor repair.
func (w *world) tracedStopped(proxy *trace.Proxy, req trace.Request) trace.Result {
	w.Helper()
	if req.Protocol == 0 {
		req.Protocol = service.TCP
	}
	var r trace.Result
	w.must(w.net.Node.Do(func() (err error) {
		r, err = trace.Run(w.ctx, req, proxy)
		return err
	}))
	return r
}

// proxyOf returns what a kproxy knows that serves w's manifests, with pref pinned for
// all services. Call it on the node.
func (w *world) proxyOf(pref service.Preference) (*trace.Proxy, error) {
	sets, err := kernel.OpenIPSets()
	if err != nil {
		return nil, err
	}
	defer sets.Close()
	host, err := steering.NewProber(sets).Probe(w.ctx)
	if err != nil {
		return nil, err
	}
	snapshot, _, err := file.Load([]string{w.manifests}, "node")
	if err != nil {
		return nil, err
	}
	policy := plan.DefaultPolicy()
	policy.Mode, policy.CloseClusterIPs = mode, true
	networks, err := kernel.ReadNetworks()
	if err != nil {
		return nil, err
	}
	policy.NodeAddresses, policy.Links, policy.BridgedLinks = networks.Addresses, networks.Links, networks.Bridged
	has := []plan.DataPlane{plan.IPTables}
	if mode == plan.ModeNFTables {
		has = []plan.DataPlane{plan.NFTables}
	} else if hasIPVS {
		has = append(has, plan.IPVS)
	}
	in := plan.Inputs{
		Now: time.Now(), Snapshot: snapshot, Policy: policy, Pins: map[service.Key]service.Preference{},
		Caps: plan.Caps{Planes: kerneltest.Planes(has...)},
	}
	for p := range snapshot.All() {
		in.Pins[p.Key] = pref
	}
	p, _ := plan.Compute(nil, in)
	in.Observed.Programmed = map[service.Key]uint64{}
	for _, s := range p.Services {
		in.Observed.Programmed[s.Port.Key] = s.KernelHash
	}
	p, _ = plan.Compute(nil, in)
	proxy := &trace.Proxy{
		Plan: p, Alive: true, Marks: kernel.DefaultMarks(), Variant: host.Variant, Missing: steering.DefaultRouting().Missing, Explainers: node.Explainers(),
	}
	if mode == plan.ModeNFTables {
		o := nftables.DefaultOptions()
		o.TCPPort, o.UDPPort, o.CatchRefusals, o.DropInvalid = 10244, 10244, true, !kernel.LiberalConntrack()
		routing := steering.DefaultRouting()
		plane, err := nftables.Open(o, &routing)
		if err == nil {
			proxy.Compare = plane.Compare
		}
		return proxy, err
	}
	rules, virtuals := steering.DefaultOptions(), steering.DefaultOptions()
	rules.Planes = []steering.Plane{iptables.InSteering, ipvs.InSteering}
	rules.TCPPort, rules.UDPPort = 10244, 10244
	rules.RandomFully, rules.SocketMatch, rules.CatchRefusals = host.RandomFully, host.SocketMatch, host.CatchRefusals
	rules.DropInvalid = !kernel.LiberalConntrack()
	virtuals.CatchRefusals = host.CatchRefusals
	proxy.Render = func(p *plan.Plan) kernel.Ruleset {
		return kernel.Merge(iptables.Render(p, rules), ipvs.Render(p, virtuals))
	}
	return proxy, nil
}

// names checks that a result has a verdict and that its culprit has words.
func names(t *testing.T, r trace.Result, verdict trace.Verdict, words ...string) {
	t.Helper()
	if r.Verdict != verdict {
		t.Errorf("verdict %q, want %q", r.Verdict, verdict)
	}
	for _, word := range words {
		if !strings.Contains(r.Culprit, word) {
			t.Errorf("culprit %q doesn't say %q", r.Culprit, word)
		}
	}
	if len(words) == 0 && r.Culprit != "" {
		t.Errorf("culprit %q, want none", r.Culprit)
	}
	if t.Failed() {
		t.Logf("the trace:\n%s", r.Text(trace.Look{}))
	}
}

// mismatched checks that a result names an object that isn't as planned.
func mismatched(t *testing.T, r trace.Result, words ...string) {
	t.Helper()
	if !slices.ContainsFunc(r.Mismatches, func(m trace.Mismatch) bool {
		text := m.Object + ": " + m.Planned + ", " + m.Kernel
		return !slices.ContainsFunc(words, func(word string) bool { return !strings.Contains(text, word) })
	}) {
		t.Errorf("mismatches %q: none says %q\n%s", r.Mismatches, words, r.Text(trace.Look{}))
	}
}

// backendsOf counts who answers n new connections.
func (w *world) backendsOf(from *lab.Namespace, target netip.AddrPort, n int) map[string]int {
	w.Helper()
	out := map[string]int{}
	for range n {
		out[w.ask(from, "tcp", target).Backend]++
	}
	return out
}

// kproxyOnNode checks whether what a command prints on the node has a word.
func (w *world) kproxyOnNode(line, word string, want bool) error {
	words := strings.Fields(line)
	out, err := w.net.Node.Output(w.ctx, words[0], words[1:]...)
	if err != nil {
		return err
	}
	if strings.Contains(string(out), word) != want {
		return errors.New(string(out))
	}
	return nil
}
