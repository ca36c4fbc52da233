package userspace

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/userspace/handover"
)

// Remains holds what a Server whose process crashed has left, in descriptors of this process.
type Remains struct {
	listeners []handover.Listener
	ports     []int // descriptors of listeners

	state    *handover.Userspace
	files    []int // of state; all but those of listeners
	accepted []int // of clients that had no endpoint

	// Broken is how many connections were reset, as bytes of theirs were on their way through the process.
	Broken int
}

// Salvage takes everything that the records, whose descriptor was memory, tell of: a Server of the same program
// wrote them (Config.Recorded). The connections wait until a Server recovers them.
func Salvage(from *handover.Kept, memory int) (*Remains, error) {
	if _, err := raiseFDs(); err != nil {
		return nil, err
	}
	fds, err := from.Take(memory)
	if err != nil {
		return nil, err
	}
	records, err := mapRecords(fds[0], 0)
	if err != nil {
		handover.CloseFiles(fds)
		return nil, err
	}
	defer records.close()
	switch records.head.layout {
	case layoutOf():
	case [64]byte{}: // nothing was that process's, not yet or no more
		return nil, nil
	default:
		return nil, errors.New("recover connections: another program recorded them")
	}
	numbers := records.descriptors()
	if fds, err = from.Take(numbers...); err != nil {
		return nil, err
	}
	x := salvage{Remains: Remains{state: &handover.Userspace{}}, own: make(map[int32]int, len(fds)), moving: map[int32]bool{}}
	for i, n := range numbers {
		x.own[int32(n)] = fds[i]
	}
	if x.takeListeners(records.head); slices.Contains(x.ports, -1) {
		x.Close()
		return nil, errors.New("recover connections: a listener is missing")
	}
	for i := range records.head.moving {
		x.moving[records.head.moving[i].Load()] = true
	}
	for n := range records.used() {
		x.take(int32(n), records.of(n))
	}
	if x.moving[accepting] {
		x.takeStrays(from)
	}
	return &x.Remains, nil
}

// used are the numbers that may have a record.
func (r *records) used() int { return min(int(r.head.highest.Load())+1, len(r.number)) }

// descriptors are all that the records name.
func (r *records) descriptors() (numbers []int) {
	add := func(fds ...int32) {
		for _, fd := range fds {
			if fd > 0 {
				numbers = append(numbers, int(fd))
			}
		}
	}
	add(r.head.tcp[:]...)
	for f := range r.head.udp {
		add(r.head.udp[f][:]...)
	}
	for n := range r.used() {
		switch c := r.of(n); c.state() {
		case recordAccepted, recordSession:
			add(int32(n))
		case recordRelaying:
			add(int32(n), c.endpoint)
			for _, p := range c.pipes {
				if p.pending > 0 {
					add(p.r, p.w)
				}
			}
		}
	}
	return numbers
}

// salvage makes Remains.
type salvage struct {
	Remains
	own    map[int32]int // this process's descriptors by their numbers there; -1 for one that isn't there
	moving map[int32]bool
}

func (x *salvage) takeListeners(head *recordsHead) {
	add := func(p service.Protocol, f int, numbers []int32) {
		row := handover.Listener{Protocol: uint32(p), Family: uint32(familyNumbers[f])}
		for _, n := range numbers {
			if n > 0 {
				x.ports = append(x.ports, x.own[n])
				row.Files = append(row.Files, uint32(len(x.ports)))
			}
		}
		if len(row.Files) > 0 {
			x.listeners = append(x.listeners, row)
		}
	}
	for f := range head.tcp {
		add(service.TCP, f, head.tcp[f:f+1])
		add(service.UDP, f, head.udp[f][:])
	}
}

// takeStrays takes the clients that were accepted and have no record yet. Where /proc doesn't show them, they end with the keeper.
func (x *salvage) takeStrays(from *handover.Kept) {
	place := fmt.Sprintf("/proc/%d/fd", from.Keeper)
	entries, _ := os.ReadDir(place)
	for _, e := range entries {
		n, err := strconv.Atoi(e.Name())
		if _, known := x.own[int32(n)]; known || err != nil {
			continue
		}
		if is, _ := os.Readlink(place + "/" + e.Name()); !strings.HasPrefix(is, "socket:") {
			continue
		}
		fds, err := from.Take(n)
		switch {
		case err != nil:
		case x.untouched(fds[0]):
			x.accepted = append(x.accepted, fds[0])
		default:
			unix.Close(fds[0])
		}
	}
}

// untouched reports whether fd is of a client that came to a listener, and that nothing has been read from or sent to. Of one
// whose record was invalid because it was about to be closed, the beginning would be missing.
func (x *salvage) untouched(fd int) bool {
	info, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
	if err != nil || info.State != unix.BPF_TCP_ESTABLISHED && info.State != unix.BPF_TCP_CLOSE_WAIT {
		return false
	}
	unread, err := unix.IoctlGetInt(fd, unix.SIOCINQ)
	if info.State == unix.BPF_TCP_CLOSE_WAIT {
		unread++ // the client's FIN, which counts as received
	}
	var local, listener rawAddress
	return err == nil && info.Bytes_sent == 0 && info.Bytes_received == uint64(unread) && sysLocal(fd, &local) == 0 &&
		slices.ContainsFunc(x.ports, func(l int) bool {
			return sysLocal(l, &listener) == 0 && listener.addrPort().Port() == local.addrPort().Port()
		})
}

// take takes what a record tells of, the connection or session of the descriptor n.
func (x *salvage) take(n int32, r *record) {
	first, whole := len(x.files), true
	file := func(n int32) uint32 {
		fd := x.own[n]
		whole = whole && fd >= 0
		x.files = append(x.files, fd)
		return uint32(len(x.files))
	}
	switch r.state() {
	case recordAccepted:
		if fd := x.own[n]; fd >= 0 {
			x.accepted = append(x.accepted, fd)
		}
	case recordRelaying:
		c := &handover.Connection{
			Flow: r.flow(), Phase: handover.Relaying, Reached: true,
			Client: handover.Side{File: file(n)}, Endpoint: handover.Side{File: file(r.endpoint)},
		}
		for d, side := range []*handover.Side{&c.Client, &c.Endpoint} {
			side.Ended, side.Dead, side.Over = r.ended[d], r.dead[d], r.ended[d] || r.dead[1-d]
			if p := r.pipes[d]; p.pending > 0 {
				side.Piped, side.PipeOut, side.PipeIn = uint32(p.pending), file(p.r), file(p.w)
			}
		}
		if !whole || r.buffered || x.moving[n] {
			x.Broken++
			x.reset(first)
			return
		}
		x.state.Connections = append(x.state.Connections, c)
	case recordSession:
		s := &handover.Session{
			Flow: r.flow(), Worker: uint32(r.worker), From: handover.Packed(r.key.clientAddress()), Zone: r.key.zone, To: r.key.address(&r.key.local, 0).AsSlice(),
			Interface: uint32(r.in), File: file(n), Source: r.source.addrPort().Addr().AsSlice(), Transparent: r.transparent,
			Asked: 2, Answers: 2, Greeted: true, // not recorded; so it isn't the first to make room
		}
		if whole {
			x.state.Sessions = append(x.state.Sessions, s)
		} else {
			x.files = x.files[:first]
		}
	}
}

func (r *record) flow() handover.Flow {
	return handover.Flow{
		Client: handover.Packed(r.client.addrPort()), Original: handover.Packed(r.orig.addrPort()), Endpoint: handover.Packed(r.to.addrPort()),
		Started: r.started, BytesIn: r.bytes[clientSide], BytesOut: r.bytes[endpointSide],
	}
}

// reset has what was taken from a number on closed by a reset, once the keeper has closed it as well.
func (x *salvage) reset(first int) {
	for _, fd := range x.files[first:] {
		if fd >= 0 {
			unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}) // pipes refuse it
			unix.Close(fd)
		}
	}
	x.files = x.files[:first]
}

// Close gives up what no Server has recovered.
func (r *Remains) Close() {
	handover.CloseFiles(slices.Concat(r.ports, r.files, r.accepted)) // those that are -1 as well, to no effect
	*r = Remains{Broken: r.Broken}
}

// Listeners are for Inherit.
func (r *Remains) Listeners() ([]handover.Listener, []int) {
	files := r.ports
	r.ports = nil
	return r.listeners, files
}

// Recover takes over what Salvage found, whose listeners this Server has inherited. It comes after Prepare and before
// Run. The connections of services that the plan doesn't have are reset: the records don't name them.
func (s *Server) Recover(r *Remains) error {
	defer r.Close()
	services := map[service.Key]uint32{}
	find := func(p service.Protocol, row *handover.Flow) *service.Port {
		f, known := s.table.lookup(p, handover.Unpacked(row.Original), s.locals.mustContain)
		if !known {
			return nil
		}
		port := f.view.plan.Port
		key := port.Key
		if _, ok := services[key]; !ok {
			services[key] = uint32(len(r.state.Services))
			r.state.Services = append(r.state.Services, handover.Service{Namespace: key.Namespace, Name: key.Name, Port: key.Port, Protocol: uint32(key.Protocol)})
		}
		row.Service = services[key]
		client := handover.Unpacked(row.Client)
		c, _ := s.admit(f, client.Addr(), func() string { return "" })
		row.Interface = c.Interface
		return port
	}
	r.state.Connections = slices.DeleteFunc(r.state.Connections, func(c *handover.Connection) bool {
		if port := find(service.TCP, &c.Flow); port != nil {
			c.SilenceLimit = int64(port.IdleTimeout)
			if half := int64(s.cfg.HalfCloseTimeout); (c.Client.Ended || c.Endpoint.Ended || c.Client.Dead || c.Endpoint.Dead) && (c.SilenceLimit == 0 || half < c.SilenceLimit) {
				c.SilenceLimit = half
			}
			return false
		}
		r.Broken++
		for _, side := range []*handover.Side{&c.Client, &c.Endpoint} { // TakeOver closes them
			unix.SetsockoptLinger(r.files[side.File-1], unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
		}
		return true
	})
	r.state.Sessions = slices.DeleteFunc(r.state.Sessions, func(x *handover.Session) bool { return find(service.UDP, &x.Flow) == nil })
	files := r.files
	r.files = nil
	if err := s.TakeOver(r.state, files); err != nil {
		return err
	}
	for i, fd := range r.accepted {
		if !s.readmit(s.loops[i%len(s.loops)], fd) {
			r.Broken++
		}
	}
	r.accepted = nil
	return nil
}

// readmit serves a client from the beginning, or resets it.
func (s *Server) readmit(l *loop, fd int) bool {
	var local, client rawAddress
	if sysLocal(fd, &local) != 0 || sysPeer(fd, &client) != 0 || !s.tcpBudget.tryAcquire(fdsPerConnection) {
		(&side{fd: fd}).abort()
		return false
	}
	family := service.FamilyOf(local.addrPort().Addr())
	for _, t := range s.tcp {
		if t.family == family {
			s.records.of(fd).accepted()
			l.assigned.Add(1)
			l.post(func() { l.admit(t, fd, client.addrPort()) })
			return true
		}
	}
	(&side{fd: fd}).abort() // this process listens for the other family only
	s.tcpBudget.release(fdsPerConnection)
	return false
}
