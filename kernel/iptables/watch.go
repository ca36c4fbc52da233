package iptables

import (
	"context"
	"fmt"
	"io/fs"
	"slices"
	"sync"
	"time"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/service"
)

// Watch notices when somebody else changes what kproxy has in the kernel, so
// that the agent reads back and repairs. A check is cheap: as long as nobody
// touched the tables it costs a few system calls, whatever the number of
// services. Once somebody has, it reads the rules back. It is safe for concurrent use.
type Watch struct {
	backend *Backend
	stamps  stamper

	mu       sync.Mutex // guards what follows
	closed   bool
	expected *kernel.Ruleset
	// agreed is what the kernel held at the time of the stamp at, which is nil where
	// that isn't known.
	agreed *kernel.Ruleset
	at     stamp

	// What kproxy changes, until Expect.
	changes  int // of what is expected, since ever
	changing bool
	doubt    bool // others may have changed something too, or it isn't known what came of it
	commits  int

	compared  time.Time
	owed      bool      // the stamp followed a change of kproxy's own since then
	notBefore time.Time // when rules may be read again after a foreign change
}

// stamp is a comparable value that differs where rules may have changed.
type stamp any

// stamper takes stamps of the rules of one variant of iptables.
type stamper interface {
	stamp() (stamp, error)
	// follows reports whether nothing but so many of kproxy's commits, which led from was
	// to want, lies between two stamps; sure that it can't be otherwise.
	follows(old, now stamp, commits int, was, want *kernel.Ruleset) (follows, sure bool)
	close()
}

// Reading the rules of 10,000 services takes seconds. Programs that change their own
// rules all the time don't make kproxy do so all the time: between two readings passes
// pauseFactor times what one takes, but no more than pauseMax. Where a stamp can't be sure
// that only kproxy has changed rules, they are read after verifyAfter.
const (
	pauseFactor = 4
	pauseMax    = 5 * time.Second
	verifyAfter = time.Minute
)

// NewWatch returns a Watch over what b applies. It knows nothing to compare with before Expect. Its sockets belong to the network namespace of
// the calling thread; Close closes them.
func NewWatch(b *Backend) (*Watch, error) {
	w := &Watch{backend: b}
	var err error
	if b.env.Variant.Name == "legacy" {
		w.stamps, err = newTableSizes(b.env.Families())
	} else {
		w.stamps, err = newGeneration()
	}
	if err != nil {
		return nil, fmt.Errorf("watch rules: %w", err)
	}
	b.watch = w
	return w, nil
}

// Close releases the Watch's sockets. What the backend still does isn't compared any more.
func (w *Watch) Close() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.closed, w.expected = true, nil
	w.stamps.close()
}

// stamp takes one; their sockets may be another's once they are closed. The caller holds mu.
func (w *Watch) stamp() (stamp, error) {
	if w.closed {
		return nil, fs.ErrClosed
	}
	return w.stamps.stamp()
}

// begin stops comparing while the backend carries out ops, until Expect says what
// there is. Jumps are in foreign chains, which iptables makes where there are none yet,
// in a commit of its own.
func (w *Watch) begin(ops kernel.Ops) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.changes++
	w.expected = nil
	if !w.changing {
		now, err := w.stamp()
		w.changing, w.commits, w.doubt = true, 0, err != nil || w.at == nil || now != w.at
	}
	for f := range service.Families {
		w.doubt = w.doubt || len(ops.AddJumps[f])+len(ops.DelJumps[f]) > 0
	}
}

// committed says that the backend has done n commits; ok is false where one failed.
func (w *Watch) committed(n int, ok bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.commits += n
	w.doubt = w.doubt || !ok
}

// Expect tells what is in the kernel now: what an Apply that succeeded led to.
// If it isn't there any more, the next Check says so.
func (w *Watch) Expect(want kernel.Ruleset) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.changes++
	w.expected = &want
	if !w.changing {
		return
	}
	w.changing = false
	now, err := w.stamp()
	if err == nil && !w.doubt {
		if follows, sure := w.stamps.follows(w.at, now, w.commits, w.agreed, &want); follows {
			w.at, w.agreed, w.owed = now, &want, w.owed || !sure
			return
		}
	}
	w.at, w.agreed = nil, nil
}

// Check returns what differs from what is expected, a phrase each; nothing if
// all is well, or while a change of kproxy's own is under way.
func (w *Watch) Check(ctx context.Context) ([]string, error) {
	w.mu.Lock()
	want, changes := w.expected, w.changes
	w.mu.Unlock()
	if want == nil {
		return nil, nil
	}
	damage, err := w.checkRules(ctx, want, changes)
	if err != nil {
		return nil, fmt.Errorf("watch rules: %w", err)
	}
	sets, err := w.checkSets(want)
	if err != nil {
		return nil, fmt.Errorf("watch sets: %w", err)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.changes != changes {
		return damage, nil // kproxy has changed the sets meanwhile
	}
	return append(damage, sets...), nil
}

// checkRules reads the rules back where their stamp has changed, or isn't known.
func (w *Watch) checkRules(ctx context.Context, want *kernel.Ruleset, changes int) ([]string, error) {
	w.mu.Lock()
	now, err := w.stamp()
	quiet := w.at != nil && (now == w.at && !(w.owed && time.Since(w.compared) > verifyAfter) || time.Now().Before(w.notBefore))
	w.mu.Unlock()
	if err != nil || quiet {
		return nil, err
	}
	start := time.Now()
	var have kernel.Ruleset
	for _, f := range w.backend.env.Families() {
		if have.Chains[f], have.Jumps[f], err = w.backend.observeFamily(ctx, f); err != nil {
			return nil, err
		}
	}
	ops := kernel.Diff(have, rules(want))
	damage := describe(ops)
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.changes != changes {
		// kproxy has changed them meanwhile. What it wanted before and wants now isn't its own change: else nothing would be
		// repaired while endpoints come and go faster than rules can be read.
		if w.expected == nil {
			return nil, nil
		}
		return describe(inBoth(ops, kernel.Diff(have, rules(w.expected)))), nil
	}
	if w.at != nil { // others' change, not kproxy's
		w.notBefore = time.Now().Add(min(pauseFactor*time.Since(start), pauseMax))
	}
	if len(damage) == 0 {
		w.at, w.agreed, w.owed, w.compared = now, want, false, start
	}
	return damage, nil
}

func rules(r *kernel.Ruleset) kernel.Ruleset { return kernel.Ruleset{Chains: r.Chains, Jumps: r.Jumps} }

// inBoth returns the jumps that both add and the chains that both write alike.
func inBoth(a, b kernel.Ops) (out kernel.Ops) {
	for f := range service.Families {
		for _, j := range a.AddJumps[f] {
			if kernel.HasJump(b.AddJumps[f], j) {
				out.AddJumps[f] = append(out.AddJumps[f], j)
			}
		}
		for _, c := range a.Chains[f] {
			if i, ok := slices.BinarySearchFunc(b.Chains[f], c, kernel.CompareChains); ok && c.SameText(&b.Chains[f][i]) {
				out.Chains[f] = append(out.Chains[f], c)
			}
		}
	}
	return out
}

// checkSets compares headers: which sets there are and how many entries those
// have whose entries only kproxy changes. The entries of redirect sets are the
// business of what applies them.
func (w *Watch) checkSets(want *kernel.Ruleset) ([]string, error) {
	states, err := w.backend.env.Sets.List(nil)
	if err != nil {
		return nil, err
	}
	count := make(map[string]int, len(states))
	for _, s := range states {
		count[s.Name] = s.Count
	}
	var out []string
	for _, s := range want.Sets {
		n, ok := count[s.Name]
		switch {
		case !ok:
			out = append(out, "set "+s.Name+" is gone")
		case !s.Dynamic && n != len(s.Entries):
			out = append(out, fmt.Sprintf("set %s has %d entries, not %d", s.Name, n, len(s.Entries)))
		}
	}
	return out, nil
}

// describe says what Diff found, a phrase for each kind of object.
func describe(ops kernel.Ops) []string {
	var out []string
	for f := range service.Families {
		fam := service.Family(f).String()
		for _, j := range ops.AddJumps[f] {
			out = append(out, fmt.Sprintf("%s jump from %s %s is gone", fam, j.Table, j.From))
		}
		out = append(out, kernel.Some(fam+" chain %s was changed", chainNames(ops.Chains[f]))...)
		out = append(out, kernel.Some(fam+" chain %s came back", chainNames(ops.DelChains[f]))...)
	}
	return out
}

func chainNames(chains []kernel.Chain) []string {
	out := make([]string, len(chains))
	for i, c := range chains {
		out[i] = c.Table + " " + c.Name
	}
	return out
}
