package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime/debug"
	"runtime/metrics"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/plan"
)

// lockDir holds a lock file for each network namespace that kproxy ran in. Only
// root may write there, so no other user can keep kproxy from starting.
const lockDir = "/run/kproxy"

// nodeLock is the name by which a successor gets the node's lock.
const nodeLock = "lock node"

// lockNode makes sure that one kproxy programs this network namespace,
// whatever its control socket. The kernel drops the lock when the process ends,
// however it ends; [unlockNode] releases it. The file of one that
// was killed stays until the next in the namespace ends.
func lockNode() (*os.File, error) {
	path, err := lockPath()
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(lockDir, 0o755); err != nil {
		return nil, fmt.Errorf("take the node's lock: %w", err)
	}
	for {
		f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
		if err != nil {
			return nil, fmt.Errorf("take the node's lock: %w (run kproxy as root)", err)
		}
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		switch {
		case errors.Is(err, unix.EWOULDBLOCK):
			defer f.Close()
			return nil, fmt.Errorf("another kproxy%s is already running in this network namespace; stop it first, or run this one in a namespace of its own", holder(f))
		case err == nil && !isFile(f, path):
			f.Close() // its last holder has just removed it
			continue
		case err == nil:
			err = writePID(f)
		}
		if err != nil {
			f.Close()
			return nil, fmt.Errorf("take the node's lock: %w", err)
		}
		return f, nil
	}
}

// unlockNode releases the lock and removes its file.
func unlockNode(f *os.File) { os.Remove(f.Name()); f.Close() }

// lockPath is the lock file of the calling thread's network namespace.
func lockPath() (string, error) {
	ns, err := networkNamespace()
	return filepath.Join(lockDir, fmt.Sprintf("node-%d.lock", ns)), err
}

// isFile reports whether f is what path names now.
func isFile(f *os.File, path string) bool {
	mine, err := f.Stat()
	if err != nil {
		return false
	}
	now, err := os.Stat(path)
	return err == nil && os.SameFile(mine, now)
}

func writePID(f *os.File) error {
	if err := f.Truncate(0); err != nil {
		return err
	}
	_, err := f.WriteAt(fmt.Appendln(nil, os.Getpid()), 0)
	return err
}

// holder names the process that has the lock, as far as the file tells.
func holder(f *os.File) string {
	var pid int
	if _, err := fmt.Fscan(f, &pid); err != nil {
		return ""
	}
	return fmt.Sprintf(" (process %d)", pid)
}

// Between two collections the heap grows by what is alive (GOGC=100), which for
// thousands of services is far more than their changes need. So it grows by
// headroom at most; but by leastGrowth percent, because a collection goes through
// everything that is alive, and is to be paid for by what it finds. A small heap
// is collected as ever.
const (
	headroom    = 32 << 20
	leastGrowth = 30
	usualGrowth = 100
)

// growth is by how many percent a heap of which so many bytes are alive may grow
// before it is collected.
func growth(live uint64) int {
	if live <= headroom {
		return usualGrowth
	}
	return max(int(headroom*100/live), leastGrowth)
}

// growthStep is by how much growth has to be another before it is set, which
// stops the process for a moment.
const growthStep = 5

// Memory that isn't needed goes back to the system when it is more than spareMax,
// which takes a collection, once in some readings, readEvery apart, less than
// quietBytes were taken: quietStart readings at the end of a start, which leaves objects
// as they came from the API, plans and rules that were replaced, and quietLater after
// that, longer than changes pause in a rollout. The Go runtime would keep most of it
// for a heap of that size.
const (
	spareMax   = headroom / 2
	readEvery  = time.Second / 2
	quietBytes = 1 << 20
	quietStart = 2
	quietLater = 6
)

// keepSmall bounds garbage from when the kernel has all rules. A user who sets GOGC
// has decided himself by how much the heap may grow.
func (a *Agent) keepSmall(ctx context.Context) error {
	tick := time.NewTicker(readEvery)
	defer tick.Stop()
	_, decided := os.LookupEnv("GOGC")
	set, quiet, patience, taken := usualGrowth, 0, quietStart, uint64(0)
	if !decided {
		defer debug.SetGCPercent(usualGrowth)
	}
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		if a.programmer.report().lastOK.IsZero() || !collector.TryLock() {
			continue
		}
		h := readHeap()
		if want := growth(h.live); !decided && want != set && (want == usualGrowth || max(want-set, set-want) >= growthStep) {
			debug.SetGCPercent(want)
			set = want
		}
		if quiet++; h.taken-taken > quietBytes {
			quiet = 0
		}
		if taken = h.taken; quiet == patience && h.spare > spareMax {
			debug.FreeOSMemory()
			patience = quietLater
		}
		collector.Unlock()
	}
}

// collector is held by what changes how the Go runtime collects garbage.
var collector sync.Mutex

// pauseCollector keeps garbage from being collected until the function that it returns is called: while connections
// are at rest, that would take a sixth of the processor time that they wait for.
func pauseCollector() (resume func()) {
	collector.Lock()
	percent := debug.SetGCPercent(-1) // waits for the end of a collection
	return func() {
		debug.SetGCPercent(percent)
		collector.Unlock()
	}
}

// heap holds what the Go runtime tells of its heap, in bytes.
type heap struct {
	live  uint64 // by the last collection
	spare uint64 // taken from the system, and garbage or free
	taken uint64 // by allocations since the process began
}

func readHeap() heap {
	m := []metrics.Sample{
		{Name: "/gc/heap/live:bytes"}, {Name: "/memory/classes/heap/objects:bytes"},
		{Name: "/memory/classes/heap/free:bytes"}, {Name: "/gc/heap/allocs:bytes"},
	}
	metrics.Read(m)
	live, objects, free := m[0].Value.Uint64(), m[1].Value.Uint64(), m[2].Value.Uint64()
	return heap{live: live, spare: max(objects, live) - live + free, taken: m[3].Value.Uint64()}
}

// networks holds what decisions depend on of the host's links and addresses. They
// are looked up apart from plans: where every service has its address on kproxy's
// own link, listing the addresses takes longer than making a plan. Safe for
// concurrent use.
type networks struct {
	host  kernel.Facts
	blind bool // it was said that filters can't be read
	now   atomic.Pointer[networkState]
}

// networkState is never modified.
type networkState struct {
	kernel.Networks
	filtered bool // what the node sends to hosts of Bridged is, by network policies
}

// read lists them and reports whether anything has changed. What can't be
// listed is taken to be as it was; at start there is nothing to go by, and the
// error matters.
func (n *networks) read(log *slog.Logger) (changed bool, err error) {
	last := n.now.Load()
	var was networkState
	if last != nil {
		was = *last
	}
	now := was
	found, err := kernel.ReadNetworks()
	if err == nil {
		now.Networks = found
	}
	var filterErr error
	if len(now.Bridged) > 0 {
		var filtered bool
		if filtered, filterErr = kernel.SentIsFiltered(); filterErr == nil {
			now.filtered = filtered
		} else if last == nil {
			now.filtered = true // what always works
		}
	}
	if filterErr != nil && !errors.Is(filterErr, unix.EAGAIN) && !n.blind {
		n.blind = true
		log.Warn("it can't be known what filters packets that the node sends", "error", filterErr)
	}
	if err != nil {
		log.Warn("this node's networks and addresses can't be listed", "error", err)
	}
	if now.filtered != was.filtered && now.filtered {
		log.Info("network policies of kube-router filter what the node sends: while a service is in userspace, its endpoints see the node's address of clients on their own bridge")
	}
	if now.filtered == was.filtered && slices.Equal(was.Links, now.Links) && slices.Equal(was.Bridged, now.Bridged) && slices.Equal(was.Addresses, now.Addresses) {
		return false, err
	}
	n.now.Store(&now)
	if last != nil {
		log.Info("the networks of this node have changed", "networks", now.Links, "bridged", now.Bridged, "addresses", now.Addresses)
	}
	return true, err
}

// fill puts how things were when they were last looked at into p.
func (n *networks) fill(p *plan.Policy) {
	s := n.now.Load()
	if s == nil {
		return
	}
	p.Links, p.BridgedLinks, p.NodeAddresses = s.Links, s.Bridged, s.Addresses
	p.NoStandIns = s.filtered || n.host.WithoutNetmap
}

// policyNow is the policy with the host's networks as they were last seen.
func (a *Agent) policyNow() plan.Policy {
	p := a.policy
	a.networks.fill(&p)
	switch {
	case a.yielded.Load() != nil:
		p.DrainedBy = "the stop of kproxy"
	case a.drained.since.Load() != nil:
		p.DrainedBy = "kproxy drain"
	}
	return p
}

// logDetector logs how pods are told from other clients, when that changes.
func (a *Agent) logDetector(old, p *plan.Plan) {
	if old != nil && old.Policy.SameDetector(&p.Policy) {
		return
	}
	if d := p.Policy.Detector(); d.Supported {
		a.log.Info(d.Name, "pods", d.Reason)
	} else {
		a.log.Warn("no "+d.Name, "reason", d.Reason)
	}
}
