package agent

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"net/netip"
	"path/filepath"
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
			return flows.To(a.conntrack, to)
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
	p.datagrams.List = func() ([]conntrack.Flow, error) { return a.conntrack.ListUnanswered(service.UDP) }
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
