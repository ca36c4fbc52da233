package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"iter"
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/agent/flows"
	"kproxy.dev/kproxy/agent/node"
	"kproxy.dev/kproxy/conntrack"
	"kproxy.dev/kproxy/health"
	"kproxy.dev/kproxy/health/passive"
	"kproxy.dev/kproxy/health/probe"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/service/wake"
)

// passiveHealth connects the detector of endpoints that don't answer with what it learns from and acts on. Its methods
// do nothing where --passive-health is off.
type passiveHealth struct {
	*passive.Detector // nil where it is off
	datagrams         flows.Datagrams
	file              string
	save              chan struct{} // 1 slot: the file is to be written

	mu      sync.Mutex
	changed []health.Endpoint // since the last pass
	lacks   string            // what keeps the kernel from telling of unanswered packets; empty for nothing
	resets  uint64            // connections to endpoints that had left
	ejected map[string]uint64 // ejections since the start, by reason
	counted *health.Ejections // that these were counted by
}

// spareAfter is ample for rules to follow an ejection. Until then every refusal is swallowed, so that clients try again.
const spareAfter = 500 * time.Millisecond

// openPassive prepares the detector.
func (a *Agent) openPassive() {
	if !a.cfg.PassiveHealth {
		return
	}
	c := passive.Config{
		Log: a.log, Node: a.node, Prober: passive.Network{Network: probe.Network{Mark: a.marks().Own()}},
		Endpoints: a.mayBeEjected, Flows: func(to []health.Endpoint) (map[health.Endpoint][]passive.Flow, error) {
			return flows.To(a.conntrack.List, to)
		}, Changed: a.ejectionsChanged,
		Spare: func(e health.Endpoint, d time.Duration) {
			if e.Protocol != service.TCP {
				return
			}
			time.AfterFunc(spareAfter, func() {
				if err := a.steering.LetRefusals(e.Address, d); err != nil {
					a.log.Warn("refusals of an endpoint can't be let through", "endpoint", e.Address, "error", err)
				}
			})
		},
	}
	if a.cfg.ResetDeadConnections {
		c.Reset = a.resetConnections
	}
	p := &a.passive
	p.Detector = passive.New(c)
	p.datagrams.List = func() ([]conntrack.Flow, error) {
		return a.conntrack.List(conntrack.Wanted{Protocol: service.UDP, Unanswered: true})
	}
	p.file, p.save = filepath.Join(a.cfg.StateDir, node.EjectionsFile), make(chan struct{}, 1)
	if known, err := readEjections(p.file); err != nil {
		a.log.Warn("what was ejected before isn't known", "error", err)
	} else if len(known) > 0 {
		p.Restore(known)
		p.ejected = nil // the process that ejected them has counted them
	}
}

// run judges, and saves what is ejected, until ctx is done.
func (p *passiveHealth) run(ctx context.Context, log *slog.Logger, current func() *plan.Plan) error {
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return p.Run(ctx) })
	g.Go(func() error { return p.datagrams.Run(ctx, log, p.Detector, current) })
	g.Go(func() error {
		again := time.NewTicker(ejectionsAge / 10) // what stays ejected isn't old
		defer again.Stop()
		for {
			select {
			case <-ctx.Done():
				return nil
			case <-p.save:
			case <-again.C:
				if p.View().Len() == 0 {
					continue
				}
			}
			if err := p.write(); err != nil {
				log.Debug("what is ejected can't be saved", "error", err)
			}
		}
	})
	return g.Wait()
}

// lack notes what keeps the kernel from telling of packets that weren't answered; empty for nothing.
func (p *passiveHealth) lack(what string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.lacks = what
}

// followPassive tells the detector that endpoints have come, and which have departed.
func (a *Agent) followPassive(d plan.Delta) {
	if a.passive.Detector == nil {
		return
	}
	if gone := flows.Departed(d); len(gone) > 0 {
		a.passive.Departed(gone)
	}
	a.passive.Follow()
}

// userspaceFailed is called by userspace with each attempt that an endpoint didn't take.
func (p *passiveHealth) userspaceFailed(protocol service.Protocol, endpoint netip.AddrPort, client netip.Addr, err error) {
	at := health.Endpoint{Protocol: protocol, Address: endpoint}
	switch {
	case p.Detector == nil:
	case errors.Is(err, unix.ECONNREFUSED):
		p.Refused(at, client)
	case errors.Is(err, unix.ETIMEDOUT), errors.Is(err, unix.EHOSTUNREACH), errors.Is(err, unix.ENETUNREACH), errors.Is(err, unix.EHOSTDOWN):
		p.Unanswered(at, client, "connects")
	}
}

// userspaceAnswered is called by userspace with each connection and session that an endpoint takes.
func (p *passiveHealth) userspaceAnswered(protocol service.Protocol, endpoint netip.AddrPort) {
	if p.Detector != nil {
		p.Answered(health.Endpoint{Protocol: protocol, Address: endpoint})
	}
}

// flowEnded takes every flow that ends in the kernel.
func (p *passiveHealth) flowEnded(f *conntrack.Flow) {
	if p.Detector != nil && f.Rewritten() && f.Refused() {
		p.Refused(health.Endpoint{Protocol: f.Protocol, Address: f.ReplySrc}, f.OrigSrc.Addr())
	}
}

// logged takes what the kernel logs of packets to endpoints; false if it is something else.
func (p *passiveHealth) logged(r *kernel.Refusal) bool {
	switch r.Reason {
	case kernel.ReasonUnansweredSYN:
		if p.Detector != nil {
			p.Unanswered(health.Endpoint{Protocol: r.Protocol, Address: r.Address}, r.Client.Addr(), "SYNs")
		}
	case kernel.ReasonUDPSample:
		if p.Detector != nil {
			p.datagrams.Begun(r.Client, r.Address)
		}
	default:
		return false
	}
	return true
}

// kernelRefused takes what the rules log.
func (a *Agent) kernelRefused(r kernel.Refusal) {
	if a.passive.logged(&r) {
		return
	}
	k, _ := a.accounting.ServiceAt(r.Protocol, r.Address)
	a.recents.RuleRefused(k, plan.Ended{Time: time.Now(), Protocol: r.Protocol.String(), Client: r.Client, Address: r.Address, DataPlane: plan.None, Refused: r.Reason})
}

// view returns what is known; nil for nothing.
func (p *passiveHealth) view() *health.Ejections {
	if p.Detector == nil {
		return nil
	}
	return p.View()
}

// counts returns how many endpoints were ejected since the start, by reason, and connections reset.
func (p *passiveHealth) counts() (map[string]uint64, uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return maps.Clone(p.ejected), p.resets
}

// status says what is known.
func (p *passiveHealth) status() plan.PassiveHealth {
	if p.Detector == nil {
		return plan.PassiveHealth{Reason: "--passive-health is off"}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	out := plan.PassiveHealth{Enabled: true, Reason: p.lacks}
	if v := p.View(); v != nil {
		out.Ejected, out.Isolated, out.Nodes = v.Len(), v.Isolated, v.Nodes
	}
	return out
}

// ejectionsAge bounds the file's age: an older one is left unread, and its endpoints are probed anew once clients meet silence.
const ejectionsAge = 5 * time.Minute

// savedEjection is an item of the file.
type savedEjection struct {
	health.Endpoint
	health.Ejection
}

// readEjections returns nothing where there is no file, or none that is young enough.
func readEjections(path string) (map[health.Endpoint]*health.Ejection, error) {
	info, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) || err == nil && time.Since(info.ModTime()) > ejectionsAge {
		return nil, nil
	}
	raw, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var list []savedEjection
	if err := json.Unmarshal(raw, &list); err != nil {
		return nil, fmt.Errorf("read %s, which is written anew at the next ejection: %w", path, err)
	}
	out := make(map[health.Endpoint]*health.Ejection, len(list))
	for i := range list {
		out[list[i].Endpoint] = &list[i].Ejection
	}
	return out, nil
}

// ejectionsChanged is called by the detector.
func (a *Agent) ejectionsChanged(changed []health.Endpoint) {
	p := &a.passive
	p.mu.Lock()
	p.changed = append(p.changed, changed...)
	now, was := p.View(), p.counted
	if p.ejected == nil {
		p.ejected = map[string]uint64{}
	}
	for _, at := range changed {
		if e := now.Of(at); e != nil && e != was.Of(at) {
			p.ejected[e.Reason]++
		}
	}
	p.counted = now
	p.mu.Unlock()
	a.announceNodes(was, now)
	a.kick()
	wake.Up(p.save)
}

// announceNodes tells of nodes that have fallen silent or are back, this one's isolation included.
func (a *Agent) announceNodes(was, now *health.Ejections) {
	var events []plan.Event
	add := func(warning bool, reason, action, message string) {
		events = append(events, plan.Event{Time: time.Now(), Kind: "health", Message: message})
		if a.record != nil {
			a.record.Event("", "", warning, reason, action, message)
		}
	}
	before, _ := was.Silences()
	after, isolated := now.Silences()
	for _, name := range slices.Sorted(maps.Keys(after)) {
		if _, known := before[name]; !known {
			add(true, "NodeSilent", "Eject", after[name]+" to this node")
		}
	}
	for _, name := range slices.Sorted(maps.Keys(before)) {
		if _, still := after[name]; !still {
			add(false, "NodeAnswers", "Uneject", "node "+name+" answers this node again")
		}
	}
	switch _, wasIsolated := was.Silences(); {
	case isolated != "" && wasIsolated == "":
		add(true, "NodeIsolated", "EjectNothing", isolated)
	case isolated == "" && wasIsolated != "":
		add(false, "NodeIsolated", "Eject", "other nodes' endpoints answer this node again")
	}
	a.events.publish(events)
}

// write writes the file.
func (p *passiveHealth) write() error {
	list, view := []savedEjection{}, p.View()
	for _, at := range view.All() {
		list = append(list, savedEjection{at, *view.Of(at)})
	}
	raw, err := json.Marshal(list)
	if err != nil {
		return err
	}
	return node.ReplaceFile(p.file, raw)
}

// ejections returns what is ejected, and marks the service ports that have an endpoint which wasn't, or isn't any more.
func (a *Agent) ejections(p *plan.Plan) *health.Ejections {
	if a.passive.Detector == nil {
		return nil
	}
	h := &a.passive
	h.mu.Lock()
	changed := h.changed
	h.changed = nil
	view := h.View() // has what the changes are about
	h.mu.Unlock()
	if len(changed) == 0 || p == nil {
		return view
	}
	is := make(map[health.Endpoint]bool, len(changed))
	for _, at := range changed {
		is[at] = true
	}
	for _, s := range p.Services {
		for i := range s.Endpoints {
			if is[health.Endpoint{Protocol: s.Port.Protocol, Address: s.Endpoints[i].Address}] {
				a.dirty[s.Port.Key] = true
				break
			}
		}
	}
	return view
}

// mayBeEjected yields the endpoints of the plan that may be.
func (a *Agent) mayBeEjected() iter.Seq2[health.Endpoint, string] {
	return func(yield func(health.Endpoint, string) bool) {
		p := a.current.Load()
		if p == nil {
			return
		}
		for _, s := range p.Services {
			for i := range s.Endpoints {
				e := &s.Endpoints[i]
				if s.MayBeEjected(e) && !yield(health.Endpoint{Protocol: s.Port.Protocol, Address: e.Address}, e.Node) {
					return
				}
			}
		}
	}
}

// When clients are challenged whose connections conntrack has forgotten: more than once, as packets are lost, IPVS drops
// the first one of a connection whose real server is gone, and Linux answers twice a second at most.
var challenges = []time.Duration{0, 700 * time.Millisecond, 1500 * time.Millisecond, 3 * time.Second}

// resetConnections ends the TCP connections to an endpoint that is gone. In the kernel, they are forgotten: the client's next
// packet goes to an endpoint that knows nothing of the connection and resets it, or is refused where there is none. So
// that clients needn't wait for the next time they would send, minutes later perhaps, they are challenged.
func (a *Agent) resetConnections(at health.Endpoint) {
	if a.hasEndpoint(at) { // for a service that is to be left alone
		return
	}
	n := a.userspace.Reset(at.Address)
	flows, err := a.conntrack.List(conntrack.Wanted{Protocol: at.Protocol, From: at.Address})
	var forgotten []conntrack.Flow
	if severer, ok := a.programmer.plane.(kernel.Severer); ok {
		severer.Sever(at.Protocol, at.Address)
	}
	for _, f := range flows {
		if f.Rewritten() && f.Open() && err == nil {
			err = a.conntrack.Delete(f)
			a.figures.forgot(&f)
			forgotten = append(forgotten, f)
		}
	}
	if err != nil {
		a.log.Warn("connections to an endpoint that is gone can't be ended", "endpoint", at.Address, "error", err)
	}
	a.passive.mu.Lock()
	a.passive.resets += uint64(n + len(forgotten))
	a.passive.mu.Unlock()
	for _, after := range challenges {
		time.AfterFunc(after, func() {
			for _, f := range forgotten {
				if err := kernel.Challenge(f.OrigDst, f.OrigSrc); err != nil {
					a.log.Debug("a client isn't told that its endpoint is gone before it sends", "error", err)
					return
				}
			}
		})
	}
}

// hasEndpoint reports whether a service of the plan has an endpoint that is ready, or drains.
func (a *Agent) hasEndpoint(at health.Endpoint) bool {
	for _, s := range a.current.Load().Services {
		if s.Port.Protocol == at.Protocol && slices.ContainsFunc(s.Endpoints, func(e plan.Endpoint) bool { return e.Address == at.Address && (e.Ready || e.Serving) }) {
			return true
		}
	}
	return false
}
