package userspace

import (
	"errors"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/userspace/handover"
)

// inherited are descriptors of another process, and which of them aren't taken yet.
type inherited []int

// take returns a descriptor by its number, once.
func (f inherited) take(number uint32) (int, error) {
	if number == 0 || int(number) > len(f) || f[number-1] < 0 {
		return -1, fmt.Errorf("descriptor %d of %d is missing", number, len(f))
	}
	fd := f[number-1]
	f[number-1] = -1
	return fd, nil
}

// closeRest closes those that weren't taken.
func (f inherited) closeRest() {
	for _, fd := range f {
		if fd >= 0 {
			unix.Close(fd)
		}
	}
}

// Inherit is Listen with another Server's listeners. It takes their descriptors, whether it fails or not. The
// other one may go on accepting. There will be as many workers as there were: the kernel gives
// each socket's clients to that socket.
func (s *Server) Inherit(listeners []handover.Listener, files []int) error {
	f := inherited(append([]int(nil), files...))
	defer f.closeRest()
	err := s.listenWith(func() error {
		for i := range listeners {
			if err := s.inherit(&listeners[i], f); err != nil {
				return err
			}
		}
		if len(s.tcp) == 0 || len(s.udp) > 0 != (s.cfg.Origin != nil) {
			return errors.New("a protocol is missing")
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("inherit listeners: %w", err)
	}
	return nil
}

// inherit takes one listener; not one that a later release may have besides.
func (s *Server) inherit(row *handover.Listener, f inherited) error {
	l, protocol := &listener{family: service.IPv4}, service.Protocol(row.Protocol)
	if int(row.Family) == familyNumbers[service.IPv6] {
		l.family = service.IPv6
	}
	port, sockets := s.cfg.TCPPort, 1
	switch protocol {
	case service.TCP:
		s.tcp = append(s.tcp, l)
	case service.UDP:
		s.udp = append(s.udp, l)
		port, sockets = s.cfg.UDPPort, len(row.Files)
		if first := s.udp[0].fds; len(first) > 0 {
			sockets = len(first)
		}
	default:
		return nil
	}
	if len(row.Files) != max(sockets, 1) {
		return fmt.Errorf("%d sockets of %s, want %d", len(row.Files), protocol, max(sockets, 1))
	}
	for _, number := range row.Files {
		fd, err := f.take(number)
		if err != nil {
			return err
		}
		l.fds = append(l.fds, fd)
		if protocol == service.UDP { // a kproxy before this one may not have asked for it
			if err := failure(tellHops(fd, l.family)); err != nil {
				return fmt.Errorf("ask for TTLs: %w", err)
			}
		}
		var local rawAddress
		if err := failure(sysLocal(fd, &local)); err != nil {
			return fmt.Errorf("get port: %w", err)
		}
		l.port = local.addrPort().Port()
	}
	if port != 0 && l.port != port {
		return fmt.Errorf("they are at %s port %d, this one's is %d", protocol, l.port, port)
	}
	return nil
}

// TakeOver takes over what another Server has handed over, whose listeners this one has inherited. It comes after
// Prepare and before Run, and moves nothing: the other one may still go on instead, after this one's Drain, which closes
// what was taken over and has no peer hear of it. TakeOver takes the descriptors, whether it fails or not; after an error there is
// only Drain.
//
// As with a plan that is new, connections live on without their service, and sessions end without
// their service or endpoint.
func (s *Server) TakeOver(state *handover.Userspace, files []int) error {
	t := takeover{server: s, files: append([]int(nil), files...), now: sinceEpoch(), clock: time.Now()}
	defer t.files.closeRest()
	if err := t.all(state); err != nil {
		s.abandon()
		return fmt.Errorf("take over userspace: %w", err)
	}
	s.tookOver = t.now
	for _, v := range t.services {
		v.retain()
		if v.state.counters.total.Load() > 0 && v.state.reached.CompareAndSwap(false, true) {
			s.cfg.OnFirst(v.state.key)
		}
	}
	return nil
}

// takeover holds what is being taken.
type takeover struct {
	server   *Server
	files    inherited
	services []*view
	now      int64
	clock    time.Time
}

// all takes everything.
func (t *takeover) all(state *handover.Userspace) error {
	s := t.server
	if slices.Contains(state.Connections, nil) || slices.Contains(state.Sessions, nil) {
		return errors.New("an element is empty")
	}
	if err := t.reserve(state); err != nil {
		return err
	}
	for i := range state.Services {
		t.service(&state.Services[i])
	}
	for i, row := range state.Connections {
		if err := t.connection(s.loops[i%len(s.loops)], row); err != nil {
			return fmt.Errorf("connection of %s: %w", handover.Unpacked(row.Flow.Client), err)
		}
	}
	for _, row := range state.Sessions {
		if err := t.session(row); err != nil {
			return fmt.Errorf("session of %s: %w", handover.Unpacked(row.Flow.Client), err)
		}
	}
	for i, sums := range [][]uint64{state.ShedConnections, state.ShedSessions} {
		for r, n := range sums[:min(len(sums), shedReasons)] {
			s.shed[i][r].Add(n)
		}
	}
	s.before.Store(rememberedOf(state.Before, t.clock))
	return t.watch()
}

// reserve takes descriptors from the budgets.
func (t *takeover) reserve(state *handover.Userspace) error {
	s, pipes := t.server, 0
	for _, c := range state.Connections {
		for _, side := range []*handover.Side{&c.Client, &c.Endpoint} {
			if side.Piped > 0 {
				pipes++
			}
		}
	}
	switch connections, sessions := len(state.Connections), len(state.Sessions); {
	case !s.tcpBudget.tryAcquire(connections * fdsPerConnection):
		return fmt.Errorf("too few file descriptors for %d connections (ulimit -n)", connections)
	case !s.udpBudget.tryAcquire(sessions * fdsPerSession):
		return fmt.Errorf("too few file descriptors for %d sessions (ulimit -n)", sessions)
	case s.pipes.room.Add(-int64(pipes)) < 0:
		return fmt.Errorf("too few file descriptors for %d pipes (ulimit -n)", pipes)
	}
	return nil
}

// service goes on with what is known of a service. One that the plan doesn't have lives as long as its connections; endpoints
// that it doesn't have are forgotten at the end (retain).
func (t *takeover) service(row *handover.Service) {
	s := t.server
	key := service.Key{Namespace: row.Namespace, Name: row.Name, Port: row.Port, Protocol: service.Protocol(row.Protocol)}
	s.mu.Lock()
	v := s.plans.views[key]
	s.mu.Unlock()
	if v == nil {
		v = newView(&plan.Service{Port: &service.Port{Key: key}}, nil)
	}
	t.services = append(t.services, v)
	v.state.counters.count(row.Counters)
	v.state.failed.Add(row.Counters.Failed)
	v.state.retried.Add(row.Counters.Retried)
	for _, r := range row.Endpoints {
		e := v.state.endpoint(handover.Unpacked(r.Address))
		e.counters.count(r.Counters)
		e.failures.Add(r.Counters.Failed)
	}
	v.state.stick(row.Affinity, t.clock)
}

// count adds what another process has counted.
func (t *traffic) count(c handover.Counters) {
	t.total.Add(c.Total)
	t.bytesIn.Add(c.BytesIn)
	t.bytesOut.Add(c.BytesOut)
}

// flow fills in what connections and sessions have in common, but for their endpoint, which it returns. The frontend
// is the plan's, if that leads to the service still.
func (t *takeover) flow(row *handover.Flow, x *described) (f front, from plan.Client, e netip.AddrPort, err error) {
	s := t.server
	x.client, x.orig, x.started = handover.Unpacked(row.Client), handover.Unpacked(row.Original), time.Unix(0, row.Started)
	e = handover.Unpacked(row.Endpoint)
	if int(row.Service) >= len(t.services) || !x.client.IsValid() || !x.orig.IsValid() || !e.IsValid() {
		return f, from, e, errors.New("service or address is missing")
	}
	v := t.services[row.Service]
	x.state = v.state
	for i, n := range [...]uint64{clientSide: row.BytesIn, endpointSide: row.BytesOut} {
		x.meters[i].count.Store(n)
		x.meters[i].settled.Store(n)
	}
	key := v.plan.Port.Key
	f, ok := s.table.lookup(key.Protocol, x.orig, s.locals.mustContain)
	if !ok || f.view.state != v.state {
		f = front{&plan.Frontend{Family: service.FamilyOf(x.orig.Addr()), Protocol: key.Protocol, Address: x.orig}, v}
	}
	return f, plan.Client{Address: x.client.Addr(), Node: s.locals.contains(x.client.Addr()), Interface: row.Interface}, e, nil
}

// begin counts a connection or session with its endpoint.
func (t *takeover) begin(f flow, x *described, e netip.AddrPort) {
	end := x.state.endpoint(e)
	end.load.Acquire()
	x.endpoint.Store(end)
	x.state.active.Add(1)
	t.server.flows.Add(1)
	t.server.live.add(f)
}

// connection goes on with a connection.
func (t *takeover) connection(l *loop, row *handover.Connection) error {
	s := t.server
	x := &tcpConn{loop: l, attempt: int(row.Attempts), until: t.now + row.SearchLeft}
	f, from, endpoint, err := t.flow(&row.Flow, &x.described)
	if err != nil {
		return err
	}
	x.taken.Store(row.Reached)
	x.front, x.from, x.source = f, from, s.table.source(f, from, endpoint.Addr())
	x.timer.owner, x.active = x, t.now-row.Flow.Silent
	if row.Searching {
		x.search = newChoice(f.group(from, s.table.rules()), x.state.affinity.Load(), from.Address)
		x.search.now = t.clock
		for _, a := range row.Tried {
			x.search.exclude(x.state.endpoint(handover.Unpacked(a)))
		}
	}
	x.sides = [2]side{{fd: -1}, {fd: -1}}
	x.slot = l.conns.add(x)
	l.assigned.Add(1)
	t.begin(x, &x.described, endpoint)
	for i, r := range []*handover.Side{&row.Client, &row.Endpoint} {
		if err := t.side(x, i, r); err != nil {
			return err
		}
	}
	return t.phase(x, row)
}

// side takes a socket, and what was read from it. Events say what can be read, calls what can't be written: as on
// the first event of all.
func (t *takeover) side(x *tcpConn, i int, row *handover.Side) (err error) {
	x.ended[i], x.dead[i] = row.Ended, row.Dead
	p := &x.pumps[i]
	p.meter, p.over = &x.meters[i], row.Over
	if row.File > 0 {
		fd, err := t.files.take(row.File)
		if err != nil {
			return err
		}
		x.sides[i] = side{fd: fd, tag: x.loop.conns.tag(), writable: true}
		if i == clientSide {
			x.hops = hopsOf(fd, service.FamilyOf(x.client.Addr()))
		}
	}
	switch {
	case len(row.Copied) > copySize:
		return fmt.Errorf("%d bytes are too many for the buffer", len(row.Copied))
	case len(row.Copied) > 0:
		p.keep(x, row.Copied)
	case row.Piped > 0:
		if p.pipe.r, err = t.files.take(row.PipeOut); err != nil {
			return err
		}
		if p.pipe.w, err = t.files.take(row.PipeIn); err != nil {
			unix.Close(p.pipe.r)
			return err
		}
		p.piped, p.bulk, p.pending = true, true, int(row.Piped)
	}
	return nil
}

// phase goes on where the connection was.
func (t *takeover) phase(x *tcpConn, row *handover.Connection) error {
	l, client, end := x.loop, &x.sides[clientSide], &x.sides[endpointSide]
	x.record = l.server.records.of(client.fd)
	if row.Phase != handover.Leaving && (client.fd < 0 || end.fd < 0) {
		return errors.New("socket is missing")
	}
	switch row.Phase {
	case handover.Dialing:
		x.phase = dialing
		x.record.accepted()
		client.readable, end.writable, end.asksOut = true, false, true
		l.timers.set(&x.timer, t.now+row.AttemptLeft)
		return nil
	case handover.Relaying:
		x.phase = relaying
		if x.pumps[clientSide].pending+x.pumps[endpointSide].pending > 0 {
			x.queued = true
			l.busy = append(l.busy, x)
		}
		x.limit, x.alive = row.SilenceLimit, t.now+int64(l.server.cfg.KeepAlive)
		x.wake()
		x.record.relaying(x)
		return nil
	case handover.Leaving:
		x.phase, x.wait, x.reset = leaving, resetWaitMin, t.now+row.ResetLeft
		l.timers.set(&x.timer, t.now)
		return nil
	}
	return fmt.Errorf("unknown phase %d", row.Phase)
}

// watch asks for the events of all connections, which takes longer than everything else: for all loops at once.
func (t *takeover) watch() error {
	var all errgroup.Group
	for _, l := range t.server.loops {
		all.Go(func() (err error) {
			for _, x := range l.conns.items {
				switch x.phase {
				case relaying:
					err = errors.Join(err, x.sides[clientSide].watch(x), x.sides[endpointSide].watch(x))
				case dialing:
					err = errors.Join(err, x.sides[endpointSide].watch(x))
				}
			}
			return err
		})
	}
	return all.Wait()
}

// session goes on with a session, unless the plan ends it.
func (t *takeover) session(row *handover.Session) error {
	s := t.server
	x := &session{
		in: int(row.Interface), first: -1, last: -1, phase: ready,
		pending: row.Pending, greeted: row.Greeted, copied: append([]byte(nil), row.Copied...), resends: int(row.Resends), errors: int(row.Errors),
		owed: math.MaxInt32, // what is to come isn't handed over: it ends by silence
	}
	f, client, endpoint, err := t.flow(&row.Flow, &x.described)
	from, to := handover.Unpacked(row.From), handover.Unpacked(append(append([]byte(nil), row.To...), 0, 0))
	switch {
	case err != nil:
		return err
	case int(row.Worker) >= len(s.workers) || !from.IsValid() || !to.IsValid():
		return errors.New("worker or address is missing")
	}
	w := s.workers[row.Worker]
	w.now = t.now
	x.worker, x.front, x.from, x.key = w, f, client, newSessionKey(from, to.Addr(), row.Zone)
	x.reply = x.key.destination()
	x.active.Store(t.now - row.Flow.Silent)
	x.timer.owner = x
	w.sessions[x.key] = x
	w.timers.set(&x.timer, x.active.Load()+int64(x.idle()))
	x.count(int(row.Asked), int(row.Answers))
	t.begin(x, &x.described, endpoint)
	fd, err := t.files.take(row.File)
	if err != nil {
		return err
	}
	source := source{transparent: row.Transparent}
	source.addr, _ = netip.AddrFromSlice(row.Source)
	u, err := w.adopt(socketKey{client.Address, source, endpoint}, fd)
	if err != nil {
		return err
	}
	x.upstream, u.session = u, x
	if level := u.key.level(); sysAskOption(fd, level, unicastHops(level), &u.hops) == 0 {
		x.hops = u.hops + 1
	}
	s.records.of(fd).session(x)
	x.follow()
	return nil
}

// Confirm has the records count, where there are some: what they tell of is this Server's from now on. It comes
// before another Server learns that it has been taken over from, or as soon as this one listens; at last with Run.
func (s *Server) Confirm() {
	if s.records.validate() {
		s.cfg.Recorded(s.records.fd)
	}
}
