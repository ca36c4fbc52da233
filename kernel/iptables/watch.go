package iptables

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/service"
)

// Watch notices when somebody else changes what kproxy has in the kernel, so
// that the agent reads back and repairs. A check is cheap: as long as nobody
// touched the tables it costs a few system calls, whatever the number of
// services. It is safe for concurrent use.
type Watch struct {
	backend *Backend
	routing steering.Routing
	rules   ruleWatch

	mu       sync.Mutex // guards what follows; a check waits for Expect and the other way round
	expected *kernel.Ruleset
}

// ruleWatch notices changes of chains in one variant. While the backend changes
// rules itself, it is told of what it does, so that it need not look at all
// rules afterwards.
type ruleWatch interface {
	// changing: the backend is about to carry out ops.
	changing(ops kernel.Ops)
	// committed: it has done so many commits; ok is false where one failed.
	committed(n int, ok bool)
	// expect: what is in the kernel now should be want.
	expect(want *kernel.Ruleset)
	// check says how the kernel's rules differ from want. Where it doesn't know
	// them any more it compares with want itself, else with how things were.
	check(ctx context.Context, want *kernel.Ruleset) ([]string, error)
	close()
}

// NewWatch returns a Watch over what b applies and over r. It knows nothing to
// compare with before Expect. Its sockets belong to the network namespace of
// the calling thread; Close closes them.
func NewWatch(b *Backend, r steering.Routing) (*Watch, error) {
	w := &Watch{backend: b, routing: r}
	var err error
	if b.config.Variant.Name == "legacy" {
		w.rules, err = newLegacyWatch(b)
	} else {
		w.rules, err = newNFTWatch(b.families())
	}
	if err != nil {
		return nil, fmt.Errorf("watch rules: %w", err)
	}
	b.watch = w
	return w, nil
}

// Close releases the Watch's sockets.
func (w *Watch) Close() {
	w.backend.watch = nil
	w.rules.close()
}

// changing stops comparing while the backend changes the rules itself, until
// Expect says what there is.
func (w *Watch) changing(ops kernel.Ops) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.expected = nil
	w.rules.changing(ops)
}

func (w *Watch) committed(n int, ok bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.rules.committed(n, ok)
}

// Expect tells what is in the kernel now: what an Apply that succeeded led to.
// If it isn't there any more, the next Check says so.
func (w *Watch) Expect(want kernel.Ruleset) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.expected = &want
	w.rules.expect(&want)
}

// Check returns what differs from what is expected, a phrase each; nothing if
// all is well, or while a change of kproxy's own is under way.
func (w *Watch) Check(ctx context.Context) ([]string, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.expected == nil {
		return nil, nil
	}
	damage, err := w.rules.check(ctx, w.expected)
	if err != nil {
		return nil, fmt.Errorf("watch rules: %w", err)
	}
	sets, err := w.checkSets()
	if err != nil {
		return nil, fmt.Errorf("watch sets: %w", err)
	}
	routes, err := w.routing.Missing()
	if err != nil {
		return nil, fmt.Errorf("watch routes: %w", err)
	}
	for i := range routes {
		routes[i] += " is gone"
	}
	return slices.Concat(damage, sets, routes), nil
}

// checkSets compares headers: which sets there are and how many entries those
// have whose entries only kproxy changes. The entries of redirect sets are the
// business of whoever applies it.
func (w *Watch) checkSets() ([]string, error) {
	states, err := w.backend.config.Sets.List(nil)
	if err != nil {
		return nil, err
	}
	count := make(map[string]int, len(states))
	for _, s := range states {
		count[s.Name] = s.Count
	}
	var out []string
	for _, s := range w.expected.Sets {
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
		out = append(out, some(fam+" chain %s was changed", chainNames(ops.Chains[f]))...)
		out = append(out, some(fam+" chain %s came back", chainNames(ops.DelChains[f]))...)
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

// someNames is how many names a message lists before it only counts.
const someNames = 3

func some(format string, names []string) []string {
	if len(names) == 0 {
		return nil
	}
	text := strings.Join(names[:min(len(names), someNames)], ", ")
	if more := len(names) - someNames; more > 0 {
		text += fmt.Sprintf(" and %d more", more)
	}
	return []string{fmt.Sprintf(format, text)}
}

var errInterrupted = errors.New("rules changed while they were read")
