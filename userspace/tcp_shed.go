package userspace

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/service"
)

// askForDescriptors requests that connections are ended, as there are no descriptors to accept with.
func (s *Server) askForDescriptors() {
	s.short[shortDescriptors].note()
	select {
	case s.wantDescriptors <- struct{}{}:
	default:
	}
}

// makeRoomForClients ends connections while clients wait for descriptors, or while
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
	hs := s.connections(func(*tcpConn) int { return 1 })
	now, fallback := sinceEpoch(), s.fallback.Load()
	want := max(len(hs)/shedParts, shedLeast)
	victims := chooseVictims(hs, want, shareLeast, true, func(h *holding, is share) int {
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

// connections returns the connections of all loops, but those of negative weight.
func (s *Server) connections(weight func(*tcpConn) int) (all []holding) {
	var mu sync.Mutex
	everyPoller(s.loops, func(l *loop) {
		var hs []holding
		for _, x := range l.conns.items {
			if x == nil {
				continue
			}
			if n := weight(x); n >= 0 {
				hs = append(hs, holding{
					client: x.client.Addr(), service: x.state, weight: n, active: x.active, flow: x,
					reset: x.phase == leaving || x.limit == int64(resetPatience),
				})
			}
		}
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

// Peers that don't read have the kernel hold what was sent to them: up to net.ipv4.tcp_wmem and
// tcp_rmem for each of a connection's sockets, 36 MB with recent defaults. These grow by what a
// connection carries and how far away its ends are, so they aren't cut, which would slow down transfers; what all
// connections hold is bounded instead.

const (
	// memoryTick is how often that is checked.
	memoryTick = time.Second
	// memoryShare is the part of net.ipv4.tcp_mem's pressure threshold, above which the kernel
	// shrinks the buffers of every socket of the host, that connections may hold.
	memoryShare = 2
	// memorySpare is the part of the bound that is free after connections have given way.
	memorySpare = 8
	// littleMemory isn't asked for: a connection that carried less holds no more.
	littleMemory = 16 << 10
)

// memoryWatch is the state between checks.
type memoryWatch struct {
	bound int   // in bytes; 0 while it isn't known
	next  int64 // when to ask for connections' memory again
}

// boundMemory ends connections if all of them hold too much memory. It asks each
// for what it holds only when the host's TCP sockets hold more than the bound.
func (s *Server) boundMemory(w *memoryWatch) {
	if w.bound == 0 {
		w.bound = s.memoryBound()
	}
	now := sinceEpoch()
	if w.bound <= 0 || now < w.next || s.Budget(service.TCP).Used == 0 || hostMemory() <= w.bound {
		return
	}
	hs, held := s.connections((*tcpConn).memory), 0
	for i := range hs {
		held += hs[i].weight
	}
	w.next = now + shedCost*(sinceEpoch()-now)
	if held <= w.bound {
		return
	}
	s.short[shortMemory].note()
	victims := chooseVictims(hs, held-w.bound+w.bound/memorySpare, w.bound/shareParts, true, func(h *holding, is share) int {
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
	switch {
	case err == nil:
		_, err = fmt.Sscan(string(text), &low, &pressure)
	case errors.Is(err, fs.ErrNotExist): // only the host's own network namespace has it
		var host unix.Sysinfo_t
		err = unix.Sysinfo(&host)
		pressure = int(uint64(host.Totalram)*uint64(host.Unit)) / os.Getpagesize() / 16 // as tcp_init_mem of net/ipv4/tcp.c sets it
	}
	if err != nil {
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

// memory returns how many bytes the kernel holds for x; -1 where that can't be more than littleMemory.
func (x *tcpConn) memory() int {
	for d := range x.pumps {
		if x.phase != dialing && (x.pumps[d].pending > 0 || x.meters[d].count.Load() > littleMemory) {
			return x.sides[clientSide].memory() + x.sides[endpointSide].memory()
		}
	}
	return -1
}

// memory returns how many bytes the kernel holds for the socket (SO_MEMINFO): received and not
// read, and sent and not acknowledged.
func (s *side) memory() int {
	var info [unix.SK_MEMINFO_VARS]uint32
	if s.fd < 0 || sysAskOption(s.fd, unix.SOL_SOCKET, unix.SO_MEMINFO, &info) != 0 {
		return 0
	}
	return int(info[unix.SK_MEMINFO_RMEM_ALLOC]) + int(info[unix.SK_MEMINFO_WMEM_QUEUED])
}
