package kerneltest

import (
	"context"
	"errors"
	"math/rand/v2"
	"net/netip"
	"sync"

	"golang.org/x/sys/unix"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/ipvs"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/service"
)

// ErrInjected is what an injected fault is, besides what it pretends to be.
var ErrInjected = errors.New("injected fault")

// Faults decides which calls fail. The zero value lets none fail. It is safe
// for concurrent use.
type Faults struct {
	mu    sync.Mutex
	rng   *rand.Rand
	rate  float64
	at    int // the call that fails, from 1; 0 for none
	kind  FaultKind
	calls int
	count int // of faults
	dead  bool
}

// FaultKind says what becomes of a call that fails.
type FaultKind int

// The kinds of faults.
const (
	Refused FaultKind = iota // it has no effect
	Late                     // it takes effect all the same, as when a program is killed after it committed
	Death                    // it has no effect, and nothing after it either: kproxy is killed
	faultKinds
)

func (k FaultKind) String() string { return [...]string{"refused", "late", "death"}[k] }

// NewFaults returns faults of calls at random, with the given rate. A few of
// them are deaths.
func NewFaults(seed uint64, rate float64) *Faults {
	return &Faults{rng: rand.New(rand.NewPCG(seed, 0)), rate: rate}
}

// FaultAt returns one fault: the n-th call fails, from 1.
func FaultAt(n int, kind FaultKind) *Faults {
	return &Faults{rng: rand.New(rand.NewPCG(uint64(n), 0)), at: n, kind: kind}
}

// Stop lets no further call fail.
func (f *Faults) Stop() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.rate, f.at, f.dead = 0, 0, false
}

// Count returns the number of faults so far.
func (f *Faults) Count() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.count
}

// Calls returns the number of calls so far, failed or not.
func (f *Faults) Calls() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.calls
}

// Died reports whether kproxy has been killed. If so, another one starts: calls
// have effects again.
func (f *Faults) Died() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	dead := f.dead
	f.dead = false
	return dead
}

// verdict says whether a call fails, and how.
func (f *Faults) verdict() (fails bool, kind FaultKind) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.calls++
	switch {
	case f.dead:
		return true, Death
	case f.at > 0 && f.calls == f.at:
		kind = f.kind
	case f.rate > 0 && f.rng.Float64() < f.rate:
		switch x := f.rng.Float64(); {
		case x < 0.3:
			kind = Late
		case x < 0.4:
			kind = Death
		}
	default:
		return false, 0
	}
	f.count++
	f.dead = kind == Death
	return true, kind
}

// one picks what a fault pretends to be.
func (f *Faults) one(kinds ...error) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return kinds[f.rng.IntN(len(kinds))]
}

// program carries out call, or not. A fault is one of a program, or one that
// the boundary to the kernel has classified.
func (f *Faults) program(call func() error) error {
	return f.do(call, func() error {
		kind := f.one(kernel.ErrLocked, kernel.ErrSyntax, kernel.ErrPermission, kernel.ErrNotFound, nil)
		return &kernel.ExecError{Program: "faulty", Status: 4, Stderr: ErrInjected.Error(), Kind: kind}
	})
}

// Netlink carries out call, or not. A fault is an error of the kernel, but none that
// says something about an object which isn't true: the kernel doesn't lie.
func (f *Faults) Netlink(call func() error) error {
	return f.do(call, func() error {
		return errors.Join(ErrInjected, f.one(unix.ENOBUFS, unix.ENOMEM, unix.EINTR, kernel.ErrPermission, unix.ETIMEDOUT, unix.EAGAIN))
	})
}

func (f *Faults) do(call, pretend func() error) error {
	fails, kind := f.verdict()
	if !fails {
		return call()
	}
	if kind == Late {
		_ = call()
	}
	return pretend()
}

// reading is a call with a result, of which a failed one has none.
func reading[T any](fault func(func() error) error, call func() (T, error)) (out T, err error) {
	var none T
	err = fault(func() error {
		out, err = call()
		return err
	})
	if err != nil {
		return none, err
	}
	return out, nil
}

// Runner puts faults in front of r.
func (f *Faults) Runner(r kernel.Runner) kernel.Runner { return faultyRunner{f, r} }

type faultyRunner struct {
	faults *Faults
	next   kernel.Runner
}

func (r faultyRunner) Run(ctx context.Context, stdin []byte, program string, args ...string) (out []byte, err error) {
	err = r.faults.program(func() error {
		out, err = r.next.Run(ctx, stdin, program, args...)
		return err
	})
	return out, err
}

// Rules puts faults in front of what open opens.
func (f *Faults) Rules(open func(kernel.Variant, service.Family) (steering.SingleRules, error)) func(kernel.Variant, service.Family) (steering.SingleRules, error) {
	return func(v kernel.Variant, family service.Family) (steering.SingleRules, error) {
		next, err := open(v, family)
		return faultyRules{next, f}, err
	}
}

type faultyRules struct {
	steering.SingleRules
	faults *Faults
}

func (r faultyRules) InsertUnique(table, chain string, position int, rule ...string) error {
	return r.faults.program(func() error { return r.SingleRules.InsertUnique(table, chain, position, rule...) })
}

func (r faultyRules) AppendUnique(table, chain string, rule ...string) error {
	return r.faults.program(func() error { return r.SingleRules.AppendUnique(table, chain, rule...) })
}

func (r faultyRules) DeleteIfExists(table, chain string, rule ...string) error {
	return r.faults.program(func() error { return r.SingleRules.DeleteIfExists(table, chain, rule...) })
}

func (r faultyRules) List(table, chain string) ([]string, error) {
	return reading(r.faults.program, func() ([]string, error) { return r.SingleRules.List(table, chain) })
}

// Sets puts faults in front of s.
func (f *Faults) Sets(s kernel.SetStore) kernel.SetStore { return faultySets{f, s} }

type faultySets struct {
	faults *Faults
	next   kernel.SetStore
}

func (s faultySets) Create(set kernel.Set) error {
	return s.faults.program(func() error { return s.next.Create(set) })
}

func (s faultySets) Destroy(name string) error {
	return s.faults.program(func() error { return s.next.Destroy(name) })
}

func (s faultySets) Add(set kernel.Set, timeout uint32, entries ...string) error {
	return s.faults.program(func() error { return s.next.Add(set, timeout, entries...) })
}

func (s faultySets) Delete(set kernel.Set, entries ...string) error {
	return s.faults.program(func() error { return s.next.Delete(set, entries...) })
}

func (s faultySets) List(entries func(string) bool) ([]kernel.SetState, error) {
	return reading(s.faults.program, func() ([]kernel.SetState, error) { return s.next.List(entries) })
}

// Table puts faults in front of t.
func (f *Faults) Table(t ipvs.Table) ipvs.Table { return faultyTable{f, t} }

type faultyTable struct {
	faults *Faults
	next   ipvs.Table
}

func (t faultyTable) List(of ...kernel.Virtual) ([]ipvs.Server, error) {
	return reading(t.faults.Netlink, func() ([]ipvs.Server, error) { return t.next.List(of...) })
}

// Change lets some requests fail, carried out or not, and hands the others over together.
func (t faultyTable) Change(requests ...ipvs.Request) []error {
	errs := make([]error, len(requests))
	var carried []ipvs.Request
	var of []int
	for i, r := range requests {
		errs[i] = t.faults.Netlink(func() error {
			carried, of = append(carried, r), append(of, i)
			return nil
		})
	}
	for k, err := range t.next.Change(carried...) {
		if i := of[k]; errs[i] == nil {
			errs[i] = err
		}
	}
	return errs
}

// Link puts faults in front of l.
func (f *Faults) Link(l ipvs.Link) ipvs.Link { return faultyLink{f, l} }

type faultyLink struct {
	faults *Faults
	next   ipvs.Link
}

func (l faultyLink) State() (ipvs.LinkState, error) { return reading(l.faults.Netlink, l.next.State) }

func (l faultyLink) Ensure() error {
	if m, ok := l.next.(modelLink); ok { // it may stay down
		if err := l.faults.Netlink(m.create); err != nil {
			return err
		}
		return l.faults.Netlink(m.setUp)
	}
	return l.faults.Netlink(l.next.Ensure)
}

func (l faultyLink) Add(addresses ...netip.Addr) (map[netip.Addr]error, error) {
	return l.each(addresses, l.next.Add)
}

func (l faultyLink) Delete(addresses ...netip.Addr) (map[netip.Addr]error, error) {
	return l.each(addresses, l.next.Delete)
}

// each lets some addresses fail, and others not.
func (l faultyLink) each(addresses []netip.Addr, do func(...netip.Addr) (map[netip.Addr]error, error)) (map[netip.Addr]error, error) {
	failed := map[netip.Addr]error{}
	for _, a := range addresses {
		var one map[netip.Addr]error
		var all error
		err := l.faults.Netlink(func() error {
			one, all = do(a)
			return all
		})
		switch {
		case all != nil:
			return nil, all
		case err != nil:
			failed[a] = err
		case one[a] != nil:
			failed[a] = one[a]
		}
	}
	return failed, nil
}

func (l faultyLink) Remove() error { return l.faults.Netlink(l.next.Remove) }
