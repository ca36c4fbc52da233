package kerneltest

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"

	"kproxy.dev/kproxy/kernel"
)

// ErrInjected is what an injected fault is, besides what it pretends to be.
var ErrInjected = errors.New("injected fault")

// Faults decides which calls fail. The zero value lets none fail. It is safe
// for concurrent use.
type Faults struct {
	mu   sync.Mutex
	rng  *rand.Rand
	rate float64
	// Count is the number of faults so far.
	count int
}

// NewFaults returns faults of calls at random, with the given rate, once they
// are switched on.
func NewFaults(seed uint64, rate float64) *Faults {
	return &Faults{rng: rand.New(rand.NewPCG(seed, 0)), rate: rate}
}

// Stop lets no further call fail.
func (f *Faults) Stop() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.rate = 0
}

// Count returns the number of faults so far.
func (f *Faults) Count() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.count
}

// verdict says whether a call fails, and whether it takes effect all the same,
// as when a program is killed after it committed.
func (f *Faults) verdict() (fails, late bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.rng == nil || f.rng.Float64() >= f.rate {
		return false, false
	}
	f.count++
	return true, f.rng.Float64() < 0.3
}

// pretend is what the fault looks like to the caller.
func (f *Faults) pretend() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	kinds := []error{kernel.ErrLocked, kernel.ErrSyntax, kernel.ErrPermission, kernel.ErrNotFound, nil}
	return &kernel.ExecError{Program: "faulty", Status: 4, Stderr: ErrInjected.Error(), Kind: kinds[f.rng.IntN(len(kinds))]}
}

// do carries out call, or not.
func (f *Faults) do(call func() error) error {
	fails, late := f.verdict()
	if !fails {
		return call()
	}
	if late {
		_ = call()
	}
	return f.pretend()
}

// Runner puts faults in front of r.
func (f *Faults) Runner(r kernel.Runner) kernel.Runner { return faultyRunner{f, r} }

type faultyRunner struct {
	faults *Faults
	next   kernel.Runner
}

func (r faultyRunner) Run(ctx context.Context, stdin []byte, program string, args ...string) (out []byte, err error) {
	err = r.faults.do(func() error {
		out, err = r.next.Run(ctx, stdin, program, args...)
		return err
	})
	return out, err
}

// Sets puts faults in front of s.
func (f *Faults) Sets(s kernel.SetStore) kernel.SetStore { return faultySets{f, s} }

type faultySets struct {
	faults *Faults
	next   kernel.SetStore
}

func (s faultySets) Create(set kernel.Set) error {
	return s.faults.do(func() error { return s.next.Create(set) })
}

func (s faultySets) Destroy(name string) error {
	return s.faults.do(func() error { return s.next.Destroy(name) })
}

func (s faultySets) Add(set kernel.Set, timeout uint32, entries ...string) error {
	return s.faults.do(func() error { return s.next.Add(set, timeout, entries...) })
}

func (s faultySets) Delete(set kernel.Set, entries ...string) error {
	return s.faults.do(func() error { return s.next.Delete(set, entries...) })
}

func (s faultySets) List(entries func(string) bool) (out []kernel.SetState, err error) {
	err = s.faults.do(func() error {
		out, err = s.next.List(entries)
		return err
	})
	if err != nil {
		return nil, err
	}
	return out, nil
}
