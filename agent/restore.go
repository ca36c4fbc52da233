package agent

import (
	"context"
	"log/slog"
	"net/netip"
	"sync"
	"time"

	"kproxy.dev/kproxy/conntrack"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/userspace"
)

// restorer puts back conntrack entries of connections that userspace carries.
// Without its entry a redirected connection is lost as soon as the service is
// in the kernel: the client's next packet looks like one that the rules beneath
// should lead somewhere, and the listener's answers bear the listener's address.
//
// Entries vanish under a connection in three ways. IPVS deletes, when one of its
// connections expires, whatever entry has the addresses and ports of that
// (ip_vs_conn_drop_conntrack in ip_vs_nfct.c): that of a userspace connection,
// where a client used a source port again within the two minutes of TIME_WAIT
// and the service had been recalled between. Somebody may delete entries
// (conntrack -F, conntrack -D). And a connection that is half closed may keep
// still for longer than its state allows.
//
// Safe for concurrent use.
type restorer struct {
	log         *slog.Logger
	ports       func() (tcp, udp uint16)      // of the listeners
	connections func() []userspace.Connection // what userspace carries
	restore     func(conntrack.Flow) error

	mu   sync.Mutex // events come while entries are put back
	lost []conntrack.Flow
	wake chan struct{} // 1 slot: triggers coalesce
}

func newRestorer(log *slog.Logger, c *conntrack.Client, s *userspace.Server) *restorer {
	return &restorer{log: log, ports: s.Ports, connections: s.Connections, restore: c.Restore, wake: make(chan struct{}, 1)}
}

// lostMost bounds the entries that wait to be looked at; beyond it they are
// lost, like events that the kernel itself drops.
const lostMost = 1 << 18

// ended looks at a flow that has ended. It is called for every one that does,
// and doesn't wait for anything.
func (r *restorer) ended(f conntrack.Flow) {
	tcp, udp := r.ports()
	switch {
	case f.Protocol == service.TCP && f.ReplySrc.Port() != tcp,
		f.Protocol == service.UDP && f.ReplySrc.Port() != udp,
		f.Zone != 0, // where the listeners look
		!f.Rewritten(), !f.CutShort():
		return
	}
	r.mu.Lock()
	if len(r.lost) < lostMost {
		r.lost = append(r.lost, f)
	}
	r.mu.Unlock()
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// run puts entries back until ctx is done.
func (r *restorer) run(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-r.wake:
		}
		start := time.Now()
		r.look()
		// A look goes through all connections. However often entries vanish, this
		// takes a fifth of a processor at most.
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(4 * time.Since(start)):
		}
	}
}

// look puts back what was lost and is still carried.
func (r *restorer) look() {
	r.mu.Lock()
	lost := r.lost
	r.lost = nil
	r.mu.Unlock()
	if len(lost) == 0 {
		return
	}
	carried := carriedFlows(r.connections())
	restored := 0
	for _, f := range lost {
		if !carried[flowOf(f)] {
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

// carriedFlow is a connection or session as its conntrack entry tells it.
type carriedFlow struct {
	protocol         service.Protocol
	client, original netip.AddrPort
}

func carriedFlows(connections []userspace.Connection) map[carriedFlow]bool {
	out := make(map[carriedFlow]bool, len(connections))
	for _, c := range connections {
		out[carriedFlow{c.Protocol, c.Client, c.Address}] = true
	}
	return out
}

// flowOf names f as userspace does: it knows a TCP client by what the listener
// sees, and a UDP client by what that sent.
func flowOf(f conntrack.Flow) carriedFlow {
	if f.Protocol == service.TCP {
		return carriedFlow{f.Protocol, f.ReplyDst, f.OrigDst}
	}
	return carriedFlow{f.Protocol, f.OrigSrc, f.OrigDst}
}
