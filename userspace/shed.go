package userspace

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/plan"
)

// Where room is short, what one client or service holds beyond its share gives way, so that those
// that hold little lose nothing. Shares are compared over all loops, or all workers.

const (
	// shareParts and shareLeast keep a share from getting too small to tell greed from
	// use among many clients: it is at least this part of all, and so many.
	shareParts = 128
	shareLeast = 8 // connections or sessions
	// shedParts is which part gives way at once: finding it takes a pass over all.
	shedParts = 64
	shedLeast = 8
	// shedAgain is after how long the next victims are chosen while clients wait, and
	// shedCost how many times as long as a pass the next one is put off.
	shedAgain = 100 * time.Millisecond
	shedCost  = 10
	// overIdle is how long a connection beyond its client's or service's share has to be silent to
	// give way, until others have waited as long as urgentAfter: then those silent longest do.
	overIdle    = time.Second
	urgentAfter = time.Second
	// evenIdle is how long it has to be where no holder has more than the others and the kernel
	// can't serve new connections instead.
	evenIdle = 5 * time.Second
	// logShedEvery is how often the log tells of those that gave way.
	logShedEvery = 10 * time.Second
)

// holding is a connection or session as it counts when room is short.
type holding struct {
	client  netip.Addr
	service *serviceState // nil while that isn't known
	weight  int           // what it takes: 1, or bytes of memory; with 0 it doesn't give way
	active  int64         // when bytes last moved, in nanoseconds since epoch
	class   class         // of a session
	reset   bool          // of a connection: a peer is gone already
	flow    flow
}

// share is what a holding's client and service hold, compared with others.
type share int

const (
	within      share = iota // others hold more than their share
	even                     // none does
	serviceOver              // its service does, and no client
	clientOver
)

// shedReason is why a connection or session gave way, as plan.ShedReasons.
type shedReason int

const (
	shedReset shedReason = iota
	shedClient
	shedService
	shedIdle
	shedReasons = len(plan.ShedReasons)
)

// victim has to give way.
type victim struct {
	holding
	reason shedReason
}

// chooseVictims chooses which of hs have to give way so that want others have room: those that rank
// lowest, and the one silent longest first; none whose rank is negative. A greedy client loses
// no more than what it has beyond its share, and more than those that hold less; where no client is
// greedy, services are compared in the same way. No share is less than least.
func chooseVictims(hs []holding, want, least int, rank func(*holding, share) int) []victim {
	clients := beyondShare(hs, want, least, func(h *holding) netip.Addr { return h.client })
	var services map[*serviceState]int
	if len(clients) == 0 {
		services = beyondShare(hs, want, least, func(h *holding) *serviceState { return h.service })
	}
	type candidate struct {
		victim
		rank int
	}
	var found []candidate
	for i := range hs {
		h := &hs[i]
		if h.weight == 0 {
			continue
		}
		c, is := candidate{victim: victim{*h, shedIdle}}, within
		switch {
		case clients[h.client] > 0:
			c.reason, is = shedClient, clientOver
		case services[h.service] > 0:
			c.reason, is = shedService, serviceOver
		case len(clients)+len(services) == 0:
			is = even
		}
		if h.reset {
			c.reason = shedReset
		}
		if c.rank = rank(h, is); c.rank >= 0 {
			found = append(found, c)
		}
	}
	slices.SortFunc(found, func(a, b candidate) int { return cmp.Or(cmp.Compare(a.rank, b.rank), cmp.Compare(a.active, b.active)) })
	var out []victim
	for _, c := range found {
		if want <= 0 {
			break
		}
		switch c.reason {
		case shedClient:
			if clients[c.client] <= 0 {
				continue
			}
			clients[c.client] -= c.weight
		case shedService:
			if services[c.service] <= 0 {
				continue
			}
			services[c.service] -= c.weight
		}
		want -= c.weight
		out = append(out, c.victim)
	}
	return out
}

// beyondShare returns how much holders have beyond their share, those that have most: what
// they had to give up for want others, if they were to hold equally much then.
func beyondShare[K comparable](hs []holding, want, least int, holder func(*holding) K) map[K]int {
	held, all := map[K]int{}, 0
	for i := range hs {
		held[holder(&hs[i])] += hs[i].weight
		all += hs[i].weight
	}
	if all == 0 {
		return nil
	}
	level := max(all/len(held), all/shareParts, least)
	counts := make([]int, 0, len(held))
	for _, n := range held {
		counts = append(counts, n)
	}
	slices.SortFunc(counts, func(a, b int) int { return cmp.Compare(b, a) })
	for i, sum := 0, 0; i < len(counts); i++ {
		sum += counts[i]
		if even := (sum - want) / (i + 1); i+1 == len(counts) || even >= counts[i+1] {
			level = max(level, even)
			break
		}
	}
	for k, n := range held {
		if n > level {
			held[k] = n - level
		} else {
			delete(held, k)
		}
	}
	return held
}

// logShed logs what was taken for room, now and then.
func (s *Server) logShed(message string, victims []victim) {
	now, last := sinceEpoch(), s.shedLogged.Load()
	if last != 0 && now-last < int64(logShedEvery) || !s.shedLogged.CompareAndSwap(last, now) {
		return
	}
	v := victims[0]
	args := []any{"ended", len(victims), "reason", plan.ShedReasons[v.reason], "client", v.client}
	if v.service != nil {
		args = append(args, "service", v.service.key)
	}
	s.cfg.Logger.Warn(message, args...)
}

// askForDescriptors has connections give way, as there are no descriptors to accept with.
func (s *Server) askForDescriptors() {
	s.short[shortDescriptors].note()
	select {
	case s.wantDescriptors <- struct{}{}:
	default:
	}
}

// makeRoomForClients has connections give way while clients wait for descriptors, or while
// sockets take too much memory. It returns when accepting stops.
func (s *Server) makeRoomForClients() {
	var again <-chan time.Time
	var memory memoryWatch
	tick := time.NewTicker(memoryTick)
	defer tick.Stop()
	var first, last, next int64 // when clients began to wait, and still did; when to choose next
	for {
		asked := false
		select {
		case <-s.stopped.Done():
			return
		case <-s.wantDescriptors:
			asked = true
		case <-again:
		case <-tick.C:
			s.boundMemory(&memory)
			continue
		}
		again = nil
		since, now := s.waitingSince(asked), sinceEpoch()
		switch {
		case since == 0:
			continue
		case now < next:
			again = time.After(time.Duration(next - now))
			continue
		case now-last > int64(urgentAfter):
			first = since
		}
		last = now
		s.short[shortDescriptors].note()
		enough := s.shedConnections(now-first >= int64(urgentAfter))
		took := sinceEpoch() - now
		again = time.After(max(shedAgain, time.Duration(shedCost*took)))
		if !enough {
			next = now + (shedCost+1)*took
		}
	}
}

// waitingSince returns since when clients have waited for descriptors, in nanoseconds
// since epoch; 0 if none does. That the process had none counts only when an accept has just
// shown it: nothing shows that it has some again while no client comes.
func (s *Server) waitingSince(shown bool) int64 {
	since := s.waiting.Load()
	if since == 0 && shown {
		since = s.starved.Load()
	}
	return since
}

// shedConnections ends some of those that have to give way; false if there are fewer than
// it wanted.
func (s *Server) shedConnections(urgent bool) bool {
	hs := collect(s.loops, (*loop).holdings)
	now, fallback := sinceEpoch(), s.fallback.Load()
	want := max(len(hs)/shedParts, shedLeast)
	victims := chooseVictims(hs, want, shareLeast, func(h *holding, is share) int {
		silent := time.Duration(now - h.active)
		switch {
		case h.reset:
			return 0
		case is >= serviceOver && (urgent || silent >= overIdle), is == even && !fallback && silent >= evenIdle:
			return 1
		}
		return -1
	})
	if len(victims) == 0 {
		return false
	}
	s.endConnections(victims, urgent)
	s.logShed("file descriptors are short: ended connections", victims)
	return len(victims) == want
}

// collect returns what f says of each loop or worker.
func collect[P interface{ post(func()) bool }](ps []P, f func(P) []holding) (all []holding) {
	var mu sync.Mutex
	everyPoller(ps, func(p P) {
		hs := f(p)
		mu.Lock()
		defer mu.Unlock()
		all = append(all, hs...)
	})
	return all
}

// endConnections ends victims; those that have moved bytes since they were chosen only if busy is set.
func (s *Server) endConnections(victims []victim, busy bool) {
	everyPoller(s.loops, func(l *loop) {
		for _, v := range victims {
			x := v.flow.(*tcpConn)
			if x.loop == l && x.phase != gone && (busy || x.active == v.active) && x.killed.CompareAndSwap(false, true) {
				x.die()
				s.shed[0][v.reason].Add(1)
			}
		}
	})
}

// holdings returns the loop's connections.
func (l *loop) holdings() []holding {
	out := make([]holding, 0, len(l.conns.items)-len(l.conns.free))
	for _, x := range l.conns.items {
		if x != nil {
			out = append(out, x.holding(1))
		}
	}
	return out
}

// holding is x, which weighs so much.
func (x *tcpConn) holding(weight int) holding {
	return holding{
		client: x.client.Addr(), service: x.state, weight: weight, active: x.active, flow: x,
		reset: x.phase == leaving || x.limit == int64(resetPatience),
	}
}

// Peers that don't read have the kernel hold what was sent to them: up to net.ipv4.tcp_wmem and
// tcp_rmem for each of a connection's sockets, 36 MB with recent defaults. These grow by what a
// connection carries and how far away its ends are, so they aren't cut, which would slow down transfers; what all
// connections hold is bounded instead.

const (
	// memoryTick is how often that is looked at.
	memoryTick = time.Second
	// memoryShare is the part of net.ipv4.tcp_mem's pressure threshold, above which the kernel
	// shrinks the buffers of every socket of the host, that connections may hold.
	memoryShare = 2
	// memorySpare is the part of the bound that is free after connections have given way.
	memorySpare = 8
	// littleMemory is what isn't looked for: a connection that carried less holds no more.
	littleMemory = 16 << 10
)

// memoryWatch is what is kept between looks.
type memoryWatch struct {
	bound int   // in bytes; 0 while it isn't known
	next  int64 // when to look at connections again
}

// boundMemory has connections give way if all of them hold too much memory. It asks each
// for what it holds only when the host's TCP sockets hold more than the bound.
func (s *Server) boundMemory(w *memoryWatch) {
	if w.bound == 0 {
		w.bound = s.memoryBound()
	}
	now := sinceEpoch()
	if w.bound <= 0 || now < w.next || hostMemory() <= w.bound {
		return
	}
	hs, held := collect(s.loops, (*loop).memory), 0
	for i := range hs {
		held += hs[i].weight
	}
	w.next = now + shedCost*(sinceEpoch()-now)
	if held <= w.bound {
		return
	}
	s.short[shortMemory].note()
	victims := chooseVictims(hs, held-w.bound+w.bound/memorySpare, w.bound/shareParts, func(h *holding, is share) int {
		silent := time.Duration(now - h.active)
		switch {
		case h.reset:
			return 0
		case is >= serviceOver && silent >= overIdle:
			return 1
		case is >= serviceOver, is == even && silent >= evenIdle:
			return 2
		}
		return -1
	})
	if len(victims) > 0 {
		s.endConnections(victims, true)
		s.logShed("socket memory is short: ended connections", victims)
	}
}

// memoryBound returns how much connections may hold, in bytes; negative where that isn't known.
func (s *Server) memoryBound() int {
	if s.cfg.MaxSocketMemory > 0 {
		return s.cfg.MaxSocketMemory
	}
	var low, pressure int // pages
	text, err := os.ReadFile("/proc/sys/net/ipv4/tcp_mem")
	if err == nil {
		_, err = fmt.Sscan(string(text), &low, &pressure)
	}
	switch {
	case errors.Is(err, fs.ErrNotExist): // only the host's own network namespace has it
		s.cfg.Logger.Info("socket memory isn't bounded: this network namespace has no net.ipv4.tcp_mem")
		return -1
	case err != nil:
		s.cfg.Logger.Warn("socket memory isn't bounded: net.ipv4.tcp_mem can't be read", "error", err)
		return -1
	}
	return pressure * os.Getpagesize() / memoryShare
}

// hostMemory returns how much the TCP sockets of this host hold, in bytes.
func hostMemory() int {
	text, err := os.ReadFile("/proc/net/sockstat")
	if err != nil {
		return 0
	}
	_, tcp, _ := strings.Cut(string(text), "TCP:")
	_, mem, _ := strings.Cut(tcp, " mem ")
	var pages int
	if _, err := fmt.Sscan(mem, &pages); err != nil {
		return 0
	}
	return pages * os.Getpagesize()
}

// memory returns the loop's connections by what their sockets hold.
func (l *loop) memory() []holding {
	var out []holding
	for _, x := range l.conns.items {
		if x == nil || x.phase == dialing || !x.holdsMuch() {
			continue
		}
		n := 0
		for i := range x.sides {
			n += x.sides[i].memory()
		}
		out = append(out, x.holding(n))
	}
	return out
}

// holdsMuch reports whether x may hold more than littleMemory.
func (x *tcpConn) holdsMuch() bool {
	for d := range x.pumps {
		if x.pumps[d].pending > 0 || x.meters[d].count.Load() > littleMemory {
			return true
		}
	}
	return false
}

// memory returns how many bytes the kernel holds for the socket (SO_MEMINFO): received and not
// read, and sent and not acknowledged.
func (s *side) memory() int {
	var info [skMeminfoVars]uint32
	size := uint32(unsafe.Sizeof(info))
	if s.fd < 0 {
		return 0
	}
	if _, _, e := unix.RawSyscall6(unix.SYS_GETSOCKOPT, uintptr(s.fd), unix.SOL_SOCKET, unix.SO_MEMINFO,
		uintptr(unsafe.Pointer(&info)), uintptr(unsafe.Pointer(&size)), 0); e != 0 {
		return 0
	}
	return int(info[skMeminfoReceived]) + int(info[skMeminfoQueued])
}

// Some of enum sk_meminfo in include/uapi/linux/sock_diag.h.
const (
	skMeminfoReceived = 0 // SK_MEMINFO_RMEM_ALLOC
	skMeminfoQueued   = 5 // SK_MEMINFO_WMEM_QUEUED
	skMeminfoVars     = 9
)
