package flows

import (
	"context"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"time"

	"kproxy.dev/kproxy/conntrack"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/service/wake"
	"kproxy.dev/kproxy/userspace"
)

// Repair keeps connections of userspace alive that lose their conntrack entries.
// Without its entry a redirected connection is lost as soon as its service is
// offloaded: the kernel's rules send the client's next packet to an endpoint, and the
// listener's answers have the listener's address.
//
// Entries vanish under a connection in three ways. IPVS deletes, when one of its
// connections expires, whatever entry has the addresses and ports of that
// (ip_vs_conn_drop_conntrack in ip_vs_nfct.c): that of a userspace connection,
// where a client used a source port again within the two minutes of TIME_WAIT
// and the service had been recalled between. A user deletes entries
// (conntrack -F, conntrack -D). And a half-closed connection may be silent for
// longer than its state allows.
//
// Such entries are put back. Until then the kernel's rules lead the packets of TCP
// connections to userspace that are in a set: those of services that userspace doesn't
// serve any more. Where it serves a service, every packet is redirected anyway.
//
// Safe for concurrent use.
type Repair struct {
	log         *slog.Logger
	ports       func() (tcp, udp uint16)      // of the listeners
	connections func() []userspace.Connection // of userspace
	restore     func(conntrack.Flow) error
	redirect    func(time.Duration, []kernel.Redirected) error // puts connections into the set
	plan        func() *plan.Plan                              // in force
	offloaded   chan struct{}                                  // 1 slot: services have left userspace

	mu   sync.Mutex // events come while entries are put back
	lost []conntrack.Flow
	wake chan struct{} // 1 slot: triggers coalesce
}

const (
	// redirectFor is how long a connection is in the set, and redirectEvery how often
	// it is put there again. One that has ended expires there.
	redirectFor, redirectEvery = time.Minute, 20 * time.Second
	// redirectAgain is when a connection has certainly been accepted whose first packet
	// came just before its service was offloaded.
	redirectAgain = time.Second
	// maxLost bounds the entries that wait for repair; further ones are dropped, as the
	// kernel drops events.
	maxLost = 1 << 18
)

// NewRepair returns a Repair of what s carries; p returns the plan in force.
func NewRepair(log *slog.Logger, c *conntrack.Client, steering kernel.Exceptions, s *userspace.Server, p func() *plan.Plan) *Repair {
	return &Repair{
		log: log, ports: s.Ports, connections: s.Connections, restore: c.Restore, plan: p,
		redirect: steering.KeepConnections, offloaded: make(chan struct{}, 1), wake: make(chan struct{}, 1),
	}
}

// Follow redirects the connections of services that leave userspace. It runs before
// new connections of these go elsewhere.
func (r *Repair) Follow(p *plan.Plan, d plan.Delta) {
	if !slices.ContainsFunc(d.Changes, func(c plan.Change) bool {
		return c.Was != nil && c.Key().Protocol == service.TCP && c.Was.DataPlane == plan.Userspace && (c.Is == nil || c.Is.DataPlane != plan.Userspace)
	}) {
		return
	}
	r.RedirectAll(p, redirectFor)
	wake.Up(r.offloaded)
}

// RedirectAll redirects, for d, the connections of services that userspace doesn't
// serve by p; all if p is nil.
func (r *Repair) RedirectAll(p *plan.Plan, d time.Duration) {
	var kept []kernel.Redirected
	served := map[service.Key]bool{}
	for _, c := range r.connections() {
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
			kept = append(kept, kernel.Redirected{Client: c.Client, Address: c.Address})
		}
	}
	if len(kept) == 0 {
		return
	}
	if err := r.redirect(d, kept); err != nil {
		r.log.Warn("connections in userspace break if conntrack forgets them", "error", err)
	}
}

// Run redirects connections again and again, and puts entries back, until ctx is done.
func (r *Repair) Run(ctx context.Context) error {
	again := time.NewTimer(redirectEvery)
	defer again.Stop()
	wake, rested := r.wake, (<-chan time.Time)(nil)
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-r.offloaded:
			again.Reset(redirectAgain)
		case <-again.C:
			inKernel := func(s *plan.Service) bool { return s.Port.Protocol == service.TCP && s.DataPlane != plan.Userspace }
			if p := r.plan(); p != nil && slices.ContainsFunc(p.Services, inKernel) {
				r.RedirectAll(p, redirectFor)
			}
			again.Reset(redirectEvery)
		case <-wake:
			start := time.Now()
			r.repair()
			// A repair goes through all connections. However often entries vanish, it
			// takes a fifth of a processor at most.
			wake, rested = nil, time.After(4*time.Since(start))
		case <-rested:
			wake, rested = r.wake, nil
		}
	}
}

// Ended notes a flow that has ended, if it may have to be put back. It never blocks:
// it is called for every flow that ends.
func (r *Repair) Ended(f conntrack.Flow) {
	tcp, udp := r.ports()
	switch {
	case f.Protocol == service.TCP && f.ReplySrc.Port() != tcp,
		f.Protocol == service.UDP && f.ReplySrc.Port() != udp,
		f.Zone != 0, // the listeners look in zone 0
		!f.Rewritten(), !f.CutShort():
		return
	}
	r.mu.Lock()
	if len(r.lost) < maxLost {
		r.lost = append(r.lost, f)
	}
	r.mu.Unlock()
	wake.Up(r.wake)
}

// repair puts back the entries that were lost and belong to live connections.
func (r *Repair) repair() {
	r.mu.Lock()
	lost := r.lost
	r.lost = nil
	r.mu.Unlock()
	if len(lost) == 0 {
		return
	}
	alive := liveFlows(r.connections())
	restored := 0
	for _, f := range lost {
		if !alive[flowOf(f)] {
			continue
		}
		if err := r.restore(f); err != nil {
			r.log.Warn("a connection may break: its conntrack entry was deleted and can't be put back", "flow", f, "error", err)
			continue
		}
		restored++
		r.log.Debug("put back the conntrack entry of a connection", "flow", f)
	}
	if restored > 0 {
		r.log.Info("put back conntrack entries that were deleted under connections", "entries", restored)
	}
}

// liveFlow names a connection or session of userspace as its conntrack entry does.
type liveFlow struct {
	protocol         service.Protocol
	client, original netip.AddrPort
}

func liveFlows(connections []userspace.Connection) map[liveFlow]bool {
	out := make(map[liveFlow]bool, len(connections))
	for _, c := range connections {
		out[liveFlow{c.Protocol, c.Client, c.Address}] = true
	}
	return out
}

// flowOf names f as userspace does, which knows a TCP client by the address that the
// listener sees, and a UDP client by the one that it sent from.
func flowOf(f conntrack.Flow) liveFlow {
	if f.Protocol == service.TCP {
		return liveFlow{f.Protocol, f.ReplyDst, f.OrigDst}
	}
	return liveFlow{f.Protocol, f.OrigSrc, f.OrigDst}
}
