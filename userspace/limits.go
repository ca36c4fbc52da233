package userspace

import (
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// What one connection and one session cost in file descriptors. The pipes that
// splice needs are shared (see pipes) and budgeted apart.
const (
	fdsPerConnection = 2
	fdsPerSession    = 1
)

// minFDs is the least number of file descriptors that leaves some to forward with.
const minFDs = 128

// limits says how a process's file descriptors are divided.
type limits struct {
	tcp   int // for connections
	udp   int // for sessions
	pipes int // pipes, two descriptors each
}

// Reserved says how many of the process's file descriptors are kept for what others
// make it open, so that neither this nor forwarding can take the other's.
type Reserved struct {
	HTTP   int // connections to the HTTP listeners
	Probes int // health checks under way
}

// Reserve raises the limit on file descriptors and returns what is reserved of them.
func Reserve() (Reserved, error) {
	max, err := raiseFDs()
	return reserved(max), err
}

func reserved(max int) Reserved {
	return Reserved{HTTP: min(max/16, 256), Probes: min(max/16, 1024)}
}

// others is for listeners, netlink, files and the control socket.
const others = 64

// divide splits max file descriptors: a reserve for everything that isn't
// forwarding, pipes, and a share each for TCP and UDP, so that neither can starve
// the other.
func divide(max int) limits {
	r := reserved(max)
	reserve := others + r.HTTP + r.Probes
	pipes := min(max/16, 512)
	left := max - reserve - 2*pipes
	udp := left / 4
	return limits{tcp: left - udp, udp: udp, pipes: pipes}
}

// raiseFDs raises the soft limit on file descriptors to the hard one and
// returns it.
func raiseFDs() (int, error) {
	var l unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &l); err != nil {
		return 0, fmt.Errorf("get file descriptor limit: %w", err)
	}
	if l.Cur < l.Max {
		raised := unix.Rlimit{Cur: l.Max, Max: l.Max}
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &raised); err == nil {
			l = raised
		}
	}
	return int(min(l.Cur, 1<<24)), nil
}

// roomAtOnce is how many descriptors the process's table is made to hold at the
// start, at 8 bytes each.
const roomAtOnce = 1 << 16

// makeRoomForFDs has the kernel make the table of descriptors large before there are
// many. It doubles it whenever it is full, and has every thread that opens one
// wait meanwhile: for a grace period, 10 to 20 ms, as the process has several threads
// (expand_fdtable in fs/file.c). A table that can't be made now is made as it fills.
func makeRoomForFDs(fd, limit int) {
	last, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, min(limit, roomAtOnce)-1)
	if err == nil {
		unix.Close(last)
	}
}

// sessionReserve is the part of the budget that sessions leave free, if others can give way.
const sessionReserve = 16

// budget counts file descriptors.
type budget struct {
	size    int
	notify  func() // there are some again; may be nil
	mu      sync.Mutex
	free    int
	waiting int
}

func newBudget(n int) *budget { return &budget{size: n, free: n} }

// tryAcquire takes n if there are as many.
func (b *budget) tryAcquire(n int) bool { return b.take(n, 0) }

// tryOrWait is tryAcquire after which notify is called, if it failed, when there
// are some again.
func (b *budget) tryOrWait(n int) bool { return b.take(n, 1) }

func (b *budget) take(n, waiting int) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.free < n {
		b.waiting += waiting
		return false
	}
	b.free -= n
	return true
}

// low reports whether so few are free that some are to be given back.
func (b *budget) low() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.free < max(b.size/sessionReserve, min(4*shedLeast, b.size/4))
}

func (b *budget) release(n int) {
	b.mu.Lock()
	b.free += n
	tell := b.waiting > 0 && b.notify != nil
	b.waiting = 0
	b.mu.Unlock()
	if tell {
		b.notify()
	}
}

// BudgetUse says how many of the file descriptors for forwarding one protocol uses.
type BudgetUse struct {
	Used, Limit int
	Waiting     int // listeners that accept no client until one is free
}

// Budget returns that of TCP or UDP; zero before Listen.
func (s *Server) Budget(p service.Protocol) BudgetUse {
	b := s.tcpBudget
	if p == service.UDP {
		b = s.udpBudget
	}
	if b == nil {
		return BudgetUse{}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return BudgetUse{Used: b.size - b.free, Limit: b.size, Waiting: b.waiting}
}

// What can be short.
const (
	shortDescriptors = iota
	shortSessions
	shortMemory
	shortages
)

var shortageNames = [shortages]plan.Resource{plan.Descriptors, plan.Sessions, plan.Memory}

// shortageLasts is for how long something counts as short after no room was found.
const shortageLasts = 10 * time.Second

// shortage remembers when no room was last found.
type shortage struct{ last atomic.Int64 } // in nanoseconds since epoch; 0 for never

func (x *shortage) note() { x.last.Store(sinceEpoch()) }

// Exhausted names what is short: clients wait or are refused for it, or others
// have given way in the last 10 s. It is empty where nothing is.
func (s *Server) Exhausted() []plan.Resource {
	var out []plan.Resource
	for i := range s.short {
		if last := s.short[i].last.Load(); last != 0 && time.Duration(sinceEpoch()-last) < shortageLasts {
			out = append(out, shortageNames[i])
		}
	}
	return out
}

// Shed returns how many connections or sessions had to make room for others, by
// [plan.ShedReasons].
func (s *Server) Shed(p service.Protocol) (out [shedReasons]uint64) {
	i := 0
	if p == service.UDP {
		i = 1
	}
	for r := range out {
		out[r] = s.shed[i][r].Load()
	}
	return out
}
