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

// conntrackRepair puts back conntrack entries of connections that userspace carries.
// Without its entry a redirected connection is lost as soon as its service is
// offloaded: the kernel's rules send the client's next packet to an endpoint, and the
// listener's answers have the listener's address. The keeper covers the moment until
// the entry is back.
//
// Entries vanish under a connection in three ways. IPVS deletes, when one of its
// connections expires, whatever entry has the addresses and ports of that
// (ip_vs_conn_drop_conntrack in ip_vs_nfct.c): that of a userspace connection,
// where a client used a source port again within the two minutes of TIME_WAIT
// and the service had been recalled between. A user deletes entries
// (conntrack -F, conntrack -D). And a half-closed connection may be silent for
// longer than its state allows.
//
// Safe for concurrent use.
type conntrackRepair struct {
	log         *slog.Logger
	ports       func() (tcp, udp uint16)      // of the listeners
	connections func() []userspace.Connection // what userspace carries
	restore     func(conntrack.Flow) error

	mu   sync.Mutex // events come while entries are put back
	lost []conntrack.Flow
	wake chan struct{} // 1 slot: triggers coalesce
}

func newConntrackRepair(log *slog.Logger, c *conntrack.Client, s *userspace.Server) *conntrackRepair {
	return &conntrackRepair{log: log, ports: s.Ports, connections: s.Connections, restore: c.Restore, wake: make(chan struct{}, 1)}
}

// maxLost bounds the entries that wait for repair; further ones are dropped, as the
// kernel drops events.
const maxLost = 1 << 18

// ended notes a flow that has ended, if it may have to be put back. It never blocks:
// it is called for every flow that ends.
func (r *conntrackRepair) ended(f conntrack.Flow) {
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
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// run puts entries back until ctx is done.
func (r *conntrackRepair) run(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-r.wake:
		}
		start := time.Now()
		r.repair()
		// A repair goes through all connections. However often entries vanish, it
		// takes a fifth of a processor at most.
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(4 * time.Since(start)):
		}
	}
}

// repair puts back the entries that were lost and belong to live connections.
func (r *conntrackRepair) repair() {
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
