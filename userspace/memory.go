package userspace

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

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
	victims := chooseVictims(hs, held-w.bound+w.bound/memorySpare, w.bound/shareParts, func(h *holding, is greed) int {
		silent := time.Duration(now - h.active)
		switch {
		case h.reset:
			return 0
		case is >= greedyService && silent >= greedyIdle:
			return 1
		case is >= greedyService, is == even && silent >= evenIdle:
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
