package ipvs

import (
	"context"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/service"
)

// Config holds what a Backend works with.
type Config struct {
	Rules kernel.Backend // puts sets, chains and jumps into the kernel
	Sets  kernel.SetStore
	Table Table
	Link  Link
	// DrainTimeout is how long a real server that isn't wanted any more keeps the
	// connections that it has, at most [MaxDrainTimeout]. With 0 it goes at once.
	DrainTimeout time.Duration
	// Now is the time; nil for time.Now.
	Now func() time.Time
}

// MaxDrainTimeout is what the lifetime of an entry of a set leaves beside
// [DrainSlack] (IPSET_MAX_TIMEOUT in include/linux/netfilter/ipset/ip_set.h is
// 2^32 milliseconds), rounded down.
const MaxDrainTimeout = 14 * 24 * time.Hour

// Backend is the [kernel.Backend] of IPVS. Sets, chains and jumps are the business
// of another Backend, which it calls before and after its own part.
//
// It knows what is kproxy's by the record in [Sets], and remembers what it read
// or made, so that a change costs as much as it changes. Observe mends the record
// when others emptied it.
type Backend struct {
	config Config

	mu sync.Mutex // guards what follows against the Watch
	// servers are kproxy's virtual servers; nil before the first Observe.
	servers map[key]*server
	// addresses are on the link, true for those that are wanted. The others go
	// with the last virtual server that drains there.
	addresses map[netip.Addr]bool
	linkDown  bool // so that none of addresses is reachable
	// doomed are sets of the record to destroy when there is nothing to record.
	doomed   []string
	expected *kernel.Ruleset // by the Watch; nil before, and while things change
	// checkAfter is when the Watch reads virtual servers again.
	checkAfter time.Time
}

var _ kernel.Backend = (*Backend)(nil)

// server is one of kproxy's virtual servers.
type server struct {
	kernel.Virtual                         // without Reals
	reals          map[netip.AddrPort]bool // in use
	// draining are those that go, each with when at the latest.
	draining map[netip.AddrPort]time.Time
	// removed: it goes with the last of draining.
	removed bool
	// foreign: only other programs' real servers are left. That these go can't be waited for.
	foreign bool
}

func newServer(v kernel.Virtual) *server {
	v.Reals = nil
	return &server{Virtual: v, reals: map[netip.AddrPort]bool{}, draining: map[netip.AddrPort]time.Time{}}
}

// New returns a Backend. It touches nothing.
func New(c Config) *Backend {
	if c.Now == nil {
		c.Now = time.Now
	}
	return &Backend{config: c, addresses: map[netip.Addr]bool{}}
}

// Apply carries out ops in order and is tolerant about what is there already, or
// not any more. A virtual server that isn't kproxy's stays as it is, and the
// service that wants its address is in Applied.Failed.
func (b *Backend) Apply(ctx context.Context, ops kernel.Ops) (kernel.Applied, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.expected = nil
	a := kernel.Applied{Failed: map[service.Key]error{}}
	if b.servers == nil {
		if _, _, err := b.read(nil); err != nil {
			return a, err
		}
	}
	before, after := b.split(ops)
	if !before.Empty() {
		applied, err := b.config.Rules.Apply(ctx, before)
		a.Add(applied)
		if err != nil {
			return a, err // what follows relies on it
		}
	}
	if slices.ContainsFunc(ops.CreateSets, isRecord) {
		if err := b.everything().insert(); err != nil {
			return a, err
		}
	}
	if err := b.applyVirtuals(ctx, ops.Virtuals, &a); err != nil {
		return a, err
	}
	if err := b.applyAddresses(ops.AddAddresses, ops.DelAddresses, &a); err != nil {
		return a, err
	}
	if len(a.Failed) > 0 {
		after.DelEntries = slices.DeleteFunc(after.DelEntries, isOfEndpoints)
	}
	if !after.Empty() {
		applied, err := b.config.Rules.Apply(ctx, after)
		a.Add(applied)
		if err != nil {
			return a, err
		}
	}
	if len(a.Failed) > 0 || len(b.doomed) == 0 || b.recording() {
		return a, nil
	}
	doomed := b.doomed
	b.doomed = nil
	return a, kernel.DestroySets(ctx, b.config.Sets, doomed, true)
}

// split returns what the rules' backend does before the virtual servers' turn
// and after it. The record's sets live as long as there is something to record.
func (b *Backend) split(ops kernel.Ops) (before, after kernel.Ops) {
	before = kernel.Ops{CreateSets: ops.CreateSets, AddEntries: ops.AddEntries, Chains: ops.Chains, AddJumps: ops.AddJumps}
	after = kernel.Ops{DelJumps: ops.DelJumps, DelEntries: slices.Clone(ops.DelEntries), DelChains: ops.DelChains}
	for _, s := range ops.CreateSets {
		b.doomed = slices.DeleteFunc(b.doomed, func(name string) bool { return name == s.Name })
	}
	for _, name := range ops.DestroySets {
		if isRecordName(name) {
			b.doomed = append(b.doomed, name)
		} else {
			after.DestroySets = append(after.DestroySets, name)
		}
	}
	return before, after
}

// isOfEndpoints: an endpoint's entry says that a real server is kproxy's, so it
// stays as long as one may be left that couldn't be changed.
func isOfEndpoints(e kernel.SetEntries) bool {
	return strings.HasPrefix(e.Set.Name, kernel.SetEndpoint+"-")
}
