package flows

import (
	"context"
	"log/slog"
	"net/netip"
	"sync"
	"time"

	"kproxy.dev/kproxy/conntrack"
	"kproxy.dev/kproxy/health"
	"kproxy.dev/kproxy/health/passive"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// A client sends no datagram twice that TCP's SYN could be compared with, and an endpoint owes no answer. So a few of
// the flows that begin are looked at again when an answer is due: an endpoint of which none was answered, while others
// of its service answered, is suspected.
const (
	answerDue = 2 * time.Second
	// datagramWindow bounds how long what an endpoint did counts.
	datagramWindow = 5 * time.Second
	// unansweredFlows are so many as suspect an endpoint; where the client has sent again, one does.
	unansweredFlows = 3
	maxBegun        = 1000
)

// Datagrams looks at UDP flows that have begun. Begun is safe for concurrent use.
type Datagrams struct {
	List func() ([]conntrack.Flow, error) // that haven't been answered

	mu    sync.Mutex
	flows []begunFlow

	seen map[netip.AddrPort]*answers // by endpoint; run's own
}

// begunFlow is a flow's first datagram.
type begunFlow struct {
	client, endpoint netip.AddrPort
	at               time.Time
}

// answers counts an endpoint's answers of the last datagramWindow.
type answers struct {
	answered   time.Time
	unanswered map[netip.AddrPort]time.Time // by client
	again      time.Time                    // when one of these was found to have sent again; zero for never
}

// Begun takes a flow's first datagram.
func (d *Datagrams) Begun(client, endpoint netip.AddrPort) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.flows) < maxBegun {
		d.flows = append(d.flows, begunFlow{client, endpoint, time.Now()})
	}
}

// due returns the flows whose answers are.
func (d *Datagrams) due(now time.Time) []begunFlow {
	d.mu.Lock()
	defer d.mu.Unlock()
	n := 0
	for n < len(d.flows) && now.Sub(d.flows[n].at) >= answerDue {
		n++
	}
	out := d.flows[:n:n]
	d.flows = d.flows[n:]
	return out
}

// Run looks at them until ctx is done. While none begins, it does nothing.
func (d *Datagrams) Run(ctx context.Context, log *slog.Logger, detector *passive.Detector, current func() *plan.Plan) error {
	tick := time.NewTicker(answerDue / 2)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case now := <-tick.C:
			due := d.due(now)
			if len(due) == 0 {
				continue
			}
			flows, err := d.List()
			if err != nil {
				log.Debug("unanswered UDP flows can't be listed", "error", err)
				continue
			}
			d.look(due, flows, now)
			for _, s := range d.suspects(current(), now) {
				for client := range d.seen[s].unanswered {
					detector.Unanswered(health.Endpoint{Protocol: service.UDP, Address: s}, client.Addr(), "datagrams")
				}
			}
		}
	}
}

// look notes which of the flows that are due were answered: those that aren't among the unanswered.
func (d *Datagrams) look(due []begunFlow, unanswered []conntrack.Flow, now time.Time) {
	type pair struct{ client, endpoint netip.AddrPort }
	silent := make(map[pair]uint64, len(unanswered))
	for i := range unanswered {
		f := &unanswered[i]
		silent[pair{f.OrigSrc, f.ReplySrc}] = f.OrigPackets
	}
	if d.seen == nil {
		d.seen = map[netip.AddrPort]*answers{}
	}
	for _, b := range due {
		a := d.seen[b.endpoint]
		if a == nil {
			a = &answers{unanswered: map[netip.AddrPort]time.Time{}}
			d.seen[b.endpoint] = a
		}
		if packets, is := silent[pair{b.client, b.endpoint}]; is {
			a.unanswered[b.client] = now
			if packets > 1 {
				a.again = now
			}
		} else {
			*a = answers{answered: now, unanswered: map[netip.AddrPort]time.Time{}}
		}
	}
	for at, a := range d.seen {
		for client, when := range a.unanswered {
			if now.Sub(when) > datagramWindow {
				delete(a.unanswered, client)
			}
		}
		if len(a.unanswered) == 0 && now.Sub(a.answered) > datagramWindow {
			delete(d.seen, at)
		}
	}
}

// suspects returns endpoints none of whose flows was answered of late, though another endpoint of a service of theirs answers.
func (d *Datagrams) suspects(p *plan.Plan, now time.Time) (out []netip.AddrPort) {
	if p == nil {
		return nil
	}
	for _, s := range p.Services {
		if s.Port.Protocol != service.UDP {
			continue
		}
		answers := false
		var silent []netip.AddrPort
		for i := range s.Endpoints {
			at := s.Endpoints[i].Address
			switch a := d.seen[at]; {
			case a == nil:
			case len(a.unanswered) == 0:
				answers = true
			case !a.again.IsZero() && now.Sub(a.again) <= datagramWindow || len(a.unanswered) >= unansweredFlows:
				silent = append(silent, at)
			}
		}
		if answers {
			out = append(out, silent...)
		}
	}
	return out
}
