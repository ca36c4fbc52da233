package agent

import (
	"context"
	"log/slog"
	"slices"
	"time"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/userspace"
)

// keeper tells the kernel which connections userspace carries of services that
// it doesn't serve any more, so that they go on there until their conntrack
// entry is back, should that vanish (see conntrackRepair). Where userspace serves a
// service, the portal leads every packet there anyway.
type keeper struct {
	log         *slog.Logger
	connections func() []userspace.Connection
	hold        func(time.Duration, []steering.Held) error
	plan        func() *plan.Plan // in force
	moved       chan struct{}     // 1 slot: triggers coalesce
}

const (
	// heldFor is how long the kernel holds a connection, and heldEvery how often it
	// is told again. A connection that has ended is forgotten by itself.
	heldFor, heldEvery = time.Minute, 20 * time.Second
	// heldAgain is when a connection has certainly been accepted whose first packet
	// came just before a move.
	heldAgain = time.Second
)

func newKeeper(log *slog.Logger, sets kernel.SetStore, s *userspace.Server, p func() *plan.Plan) *keeper {
	return &keeper{
		log: log, connections: s.Connections, plan: p, moved: make(chan struct{}, 1),
		hold: func(d time.Duration, held []steering.Held) error { return steering.HoldConnections(sets, d, held) },
	}
}

// follow holds the connections of services that leave userspace. It runs before
// the portal follows the plan.
func (k *keeper) follow(p *plan.Plan, d plan.Delta) {
	if !slices.ContainsFunc(d.Changes, func(c plan.Change) bool {
		return c.Was != nil && c.Key().Protocol == service.TCP && c.Was.DataPlane == plan.Userspace && (c.Is == nil || c.Is.DataPlane != plan.Userspace)
	}) {
		return
	}
	k.keep(p, heldFor)
	select {
	case k.moved <- struct{}{}:
	default:
	}
}

// run goes on holding them until ctx is done.
func (k *keeper) run(ctx context.Context) error {
	again := time.NewTimer(heldEvery)
	defer again.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-k.moved:
			again.Reset(heldAgain)
			continue
		case <-again.C:
		}
		if p := k.plan(); p != nil && !servesAll(p) {
			k.keep(p, heldFor)
		}
		again.Reset(heldEvery)
	}
}

// keep holds what userspace carries of services that it doesn't serve by p; all
// of it if p is nil.
func (k *keeper) keep(p *plan.Plan, d time.Duration) {
	var held []steering.Held
	served := map[service.Key]bool{}
	for _, c := range k.connections() {
		if c.Protocol != service.TCP {
			continue
		}
		in, known := served[c.Service]
		if !known && p != nil {
			s := p.Find(c.Service)
			in = s != nil && s.DataPlane == plan.Userspace
			served[c.Service] = in
		}
		if !in {
			held = append(held, steering.Held{Client: c.Client, Address: c.Address})
		}
	}
	if len(held) == 0 {
		return
	}
	if err := k.hold(d, held); err != nil {
		k.log.Warn("connections in userspace break if conntrack forgets them", "error", err)
	}
}

// servesAll reports whether userspace serves all that p serves.
func servesAll(p *plan.Plan) bool {
	for _, s := range p.Services {
		if s.Port.Protocol == service.TCP && s.DataPlane != plan.Userspace {
			return false
		}
	}
	return true
}
