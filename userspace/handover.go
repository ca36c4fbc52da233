package userspace

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/userspace/handover"
)

// Handover is all that a Server has but for its listeners, for a Server in another process.
//
// Until Resume or Release the Server is frozen: it reads, writes, accepts and ends nothing, clients wait in its
// listeners, and Commit, Probe and Drain wait. Either is called, once.
type Handover struct {
	State *handover.Userspace
	// Files are the descriptors that State numbers. They are the Server's: a copy of them goes to the
	// other process (SCM_RIGHTS).
	Files []int

	server *Server
	began  int64         // the freeze, in nanoseconds since epoch
	thaw   chan struct{} // closed: loops and workers go on
}

// Listeners describes the listeners for another Server's Inherit, with their descriptors.
func (s *Server) Listeners() ([]handover.Listener, []int) {
	var out []handover.Listener
	var files []int
	add := func(l *listener, p service.Protocol) {
		row := handover.Listener{Protocol: uint32(p), Family: uint32(familyNumbers[l.family])}
		for _, fd := range l.fds {
			files = append(files, fd)
			row.Files = append(row.Files, uint32(len(files)))
		}
		out = append(out, row)
	}
	for _, l := range s.tcp {
		add(l, service.TCP)
	}
	for _, l := range s.udp {
		add(l, service.UDP)
	}
	return out, files
}

// familyNumbers are what families are called in a handover.
var familyNumbers = [...]int{service.IPv4: 4, service.IPv6: 6}

// HandOver freezes the Server, which runs, at the end of every loop's turn, and describes what it has. When ctx is
// done before all loops have come round, it goes on as before.
func (s *Server) HandOver(ctx context.Context) (*Handover, error) {
	if !s.handing.TryLock() {
		return nil, errors.New("hand over userspace: it is being handed over already")
	}
	h := &Handover{server: s, began: sinceEpoch(), thaw: make(chan struct{})}
	if err := h.freeze(ctx); err != nil {
		h.Resume()
		return nil, fmt.Errorf("hand over userspace: %w", err)
	}
	h.describe()
	return h, nil
}

// freeze has all loops and workers wait for thaw. Between two turns no byte and no datagram is in their
// buffers. What loops have accepted for each other is taken before the first of them waits.
func (h *Handover) freeze(ctx context.Context) error {
	s := h.server
	if s.isStopped() {
		return errors.New("not serving")
	}
	frozen := make(chan struct{})
	go func() {
		defer close(frozen)
		everyPoller(s.loops, func(l *loop) {
			select {
			case <-h.thaw: // and Resume's post may have been before
			default:
				l.stopAccepting()
			}
		})
		var parked sync.WaitGroup
		parked.Add(len(s.loops) + len(s.workers))
		park := func() { parked.Done(); <-h.thaw }
		for _, l := range s.loops {
			if !l.post(park) {
				parked.Done()
			}
		}
		for _, w := range s.workers {
			if !w.post(park) {
				parked.Done()
			}
		}
		parked.Wait()
	}()
	select {
	case <-frozen:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Resume goes on as if nothing had happened: no other Server takes over.
func (h *Handover) Resume() {
	s := h.server
	rest(h.began)
	close(h.thaw)
	for _, l := range s.loops {
		l.post(func() {
			for _, a := range l.acceptors {
				a.stopped = s.isStopped()
			}
			l.startAccepting()
		})
	}
	s.handing.Unlock()
}

// Release leaves everything to the Server that took over, which may Run as soon as it is certain
// that Resume isn't called. Every descriptor is closed, listeners included, of which no peer hears as the other
// process has a copy. Run ends, and Drain finds nothing to wait for.
func (h *Handover) Release() {
	s := h.server
	s.stop()
	s.abandon()
	for _, l := range s.loops {
		l.closing = true
	}
	for _, w := range s.workers {
		w.closing = true
	}
	for _, l := range slices.Concat(s.tcp, s.udp) {
		l.close()
	}
	close(h.thaw)
}

// abandon closes all connections and sessions without a word to their peers: others have copies of the
// descriptors. No loop runs meanwhile.
func (s *Server) abandon() {
	s.records.void()
	for _, l := range s.loops {
		for _, x := range l.conns.items {
			if x != nil {
				x.sides[clientSide].close()
				x.sides[endpointSide].close()
				x.end()
			}
		}
	}
	for _, w := range s.workers {
		for _, x := range w.sessions {
			x.end()
		}
	}
}

// describe fills in State and Files. No loop runs meanwhile.
func (h *Handover) describe() {
	s := h.server
	d := description{Handover: h, services: map[*serviceState]uint32{}, now: sinceEpoch(), clock: time.Now()}
	h.State = &handover.Userspace{}
	for _, f := range s.live.all() {
		f.settle()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, v := range s.plans.views {
		d.service(v.state)
	}
	for _, l := range s.loops {
		for _, x := range l.conns.items {
			if x != nil {
				h.State.Connections = append(h.State.Connections, d.connection(x))
			}
		}
	}
	for _, w := range s.workers {
		for _, x := range w.sessions {
			h.State.Sessions = append(h.State.Sessions, d.session(x))
		}
	}
	h.State.Before = s.before.Load().rows(d.clock)
	for i, sums := range []*[]uint64{&h.State.ShedConnections, &h.State.ShedSessions} {
		for r := range s.shed[i] {
			*sums = append(*sums, s.shed[i][r].Load())
		}
	}
}

// description is a Handover that is being made.
type description struct {
	*Handover
	services map[*serviceState]uint32 // their indexes
	now      int64
	clock    time.Time
}

// file gives a descriptor its number.
func (d *description) file(fd int) uint32 {
	if fd < 0 {
		return 0
	}
	d.Files = append(d.Files, fd)
	return uint32(len(d.Files))
}

// service describes a service unless there is nothing to tell.
func (d *description) service(s *serviceState) {
	out := &handover.Service{Counters: counted(&s.counters, s.failed.Load(), s.retried.Load())}
	s.mu.Lock()
	for a, e := range s.endpoints {
		row := handover.Endpoint{Address: handover.Packed(a), Counters: counted(&e.counters, e.failures.Load(), 0)}
		if row.Counters != (handover.Counters{}) {
			out.Endpoints = append(out.Endpoints, row)
		}
	}
	s.mu.Unlock()
	if a := s.affinity.Load(); a != nil {
		for e := range a.All(d.clock) {
			out.Affinity = append(out.Affinity, handover.Affine{Client: e.Client.AsSlice(), Endpoint: handover.Packed(e.Endpoint), Remaining: int64(e.Remaining)})
		}
	}
	if out.Counters != (handover.Counters{}) || out.Endpoints != nil || out.Affinity != nil {
		d.add(s, out)
	}
}

// add gives a service its index.
func (d *description) add(s *serviceState, out *handover.Service) uint32 {
	out.Namespace, out.Name, out.Port, out.Protocol = s.key.Namespace, s.key.Name, s.key.Port, uint32(s.key.Protocol)
	d.services[s] = uint32(len(d.State.Services))
	d.State.Services = append(d.State.Services, *out)
	return d.services[s]
}

func counted(t *traffic, failed, retried uint64) handover.Counters {
	return handover.Counters{Total: t.total.Load(), Failed: failed, Retried: retried, BytesIn: t.bytesIn.Load(), BytesOut: t.bytesOut.Load()}
}

// flow describes what has moved nothing since a time.
func (d *description) flow(x *described, in string, active int64) handover.Flow {
	i, ok := d.services[x.state]
	if !ok {
		i = d.add(x.state, &handover.Service{}) // no plan has it any more
	}
	f := handover.Flow{
		Service: i, Client: handover.Packed(x.client), Original: handover.Packed(x.orig), Interface: in, Started: x.started.UnixNano(),
		BytesIn: x.meters[clientSide].count.Load(), BytesOut: x.meters[endpointSide].count.Load(), Silent: d.now - active,
	}
	if e := x.endpoint.Load(); e != nil {
		f.Endpoint = handover.Packed(e.address)
	}
	return f
}

func (d *description) connection(x *tcpConn) *handover.Connection {
	c := &handover.Connection{
		Flow: d.flow(&x.described, x.from.Interface, x.active), Phase: phaseNumbers[x.phase], Client: d.side(x, clientSide), Endpoint: d.side(x, endpointSide),
		Reached: x.taken.Load(), SilenceLimit: x.limit,
	}
	if x.search != nil {
		c.Searching, c.Attempts, c.SearchLeft = true, uint32(x.attempt), x.until-d.now
		for _, i := range x.search.tried {
			c.Tried = append(c.Tried, handover.Packed(x.search.group.endpoints[i].address))
		}
	}
	switch x.phase {
	case dialing:
		c.AttemptLeft = x.timer.at - d.now
	case leaving:
		c.ResetLeft = x.reset - d.now
	}
	return c
}

var phaseNumbers = [...]handover.Phase{dialing: handover.Dialing, relaying: handover.Relaying, leaving: handover.Leaving}

func (d *description) side(x *tcpConn, i int) handover.Side {
	p := &x.pumps[i]
	out := handover.Side{File: d.file(x.sides[i].fd), Over: p.over, Ended: x.ended[i], Dead: x.dead[i]}
	switch {
	case p.pending == 0:
	case p.buf != nil:
		out.Copied = p.buf[p.offset : p.offset+p.pending]
	default:
		out.Piped, out.PipeOut, out.PipeIn = uint32(p.pending), d.file(p.pipe.r), d.file(p.pipe.w)
	}
	return out
}

func (d *description) session(x *session) *handover.Session {
	from := x.upstream.key.from
	return &handover.Session{
		Flow: d.flow(&x.described, x.from.Interface, x.active.Load()), Worker: uint32(x.worker.number),
		From: handover.Packed(netip.AddrPortFrom(x.key.address(&x.key.client, 0), x.key.port)), Zone: x.key.zone, To: x.key.address(&x.key.local, 0).AsSlice(),
		Interface: uint32(x.in), File: d.file(x.upstream.fd), Source: from.addr.AsSlice(), Transparent: from.transparent,
		Asked: uint32(x.asked), Answers: uint32(x.answers), Pending: x.pending, Greeted: x.greeted,
		Copied: x.copied, Resends: uint32(x.resends), Errors: uint32(x.errors),
	}
}
