package steering

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// RulesetPlane is a data plane whose objects are a [kernel.Ruleset]. Planes that have rules in the
// tables of iptables, and entries in ipsets, are layers of one [Stack] with steering: its
// chains lead to theirs, the set of endpoints is all of theirs, and one iptables-restore
// takes as long as many where a table is replaced as a whole. A layer includes the one
// below it: it adds to what that renders, observes, applies, and remembers of clients.
type RulesetPlane interface {
	kernel.Backend
	kernel.Renderer
	kernel.Counter
	kernel.AffinityKeeper
	Watch
	// Programmed returns the KernelHash of the services of p whose rules in have are
	// those in want, which was rendered of p.
	Programmed(have, want kernel.Ruleset, p *plan.Plan) map[service.Key]uint64
	// Adopted returns the service ports of s that the kernel served when have was read.
	Adopted(have kernel.Ruleset, s *service.Snapshot) map[service.Key]bool
}

// Watch notices when somebody else changes what kproxy has in the kernel. Its methods may
// be called by several goroutines at once.
type Watch interface {
	// Expect tells what is in the kernel now.
	Expect(kernel.Ruleset)
	// Check returns what differs from that, a phrase each.
	Check(context.Context) ([]string, error)
	Close()
}

// Stack is the [kernel.Plane] of a layer and those below it.
type Stack struct {
	RulesetPlane
	routes  RoutingWatch
	routed  atomic.Bool    // they are there
	plan    *plan.Plan     // that was rendered last
	want    kernel.Ruleset // what it wants
	have    kernel.Ruleset
	known   bool            // have is what the kernel holds
	damaged atomic.Bool     // somebody else has changed it
	steered bool            // rules that lead to userspace are in the kernel
	failing *kernel.Ruleset // what the last Sync wanted, if it failed
}

// NewStack returns a Stack that knows nothing of the kernel. It sees to the routes, unless
// they are nil.
func NewStack(top RulesetPlane, routes *Routing) *Stack {
	return &Stack{RulesetPlane: top, routes: RoutingWatch{Routing: routes}}
}

var (
	_ kernel.Plane          = (*Stack)(nil)
	_ kernel.Drainer        = (*Stack)(nil)
	_ kernel.Severer        = (*Stack)(nil)
	_ kernel.Counter        = (*Stack)(nil)
	_ kernel.AffinityKeeper = (*Stack)(nil)
	_ kernel.Renderer       = (*Stack)(nil)
)

// Adopt implements [kernel.Plane].
func (s *Stack) Adopt(ctx context.Context, snapshot *service.Snapshot) (map[service.Key]bool, error) {
	if err := s.read(ctx); err != nil {
		return nil, fmt.Errorf("read what is programmed: %w", err)
	}
	return s.RulesetPlane.Adopted(s.have, snapshot), nil
}

func (s *Stack) read(ctx context.Context) error {
	s.known = false
	s.damaged.Store(false)
	have, err := s.Observe(ctx)
	if err != nil {
		return err
	}
	s.have, s.known = have, true
	return nil
}

// Want implements [kernel.Plane].
func (s *Stack) Want(p *plan.Plan, d plan.Delta) bool {
	s.plan, s.want = p, s.Render(p, d)
	return s.failing == nil || !kernel.Diff(*s.failing, s.want).Empty()
}

// Programmed implements [kernel.Plane].
func (s *Stack) Programmed() map[service.Key]uint64 {
	if !s.known {
		return map[service.Key]uint64{}
	}
	return s.RulesetPlane.Programmed(s.have, s.want, s.plan)
}

// Sync implements [kernel.Plane].
func (s *Stack) Sync(ctx context.Context, steered func()) kernel.Result {
	r := s.sync(ctx, steered)
	if s.failing = nil; !r.OK() {
		want := s.want
		s.failing = &want
	}
	return r
}

func (s *Stack) sync(ctx context.Context, steered func()) kernel.Result {
	r := kernel.Result{Full: !s.known || s.damaged.Load()}
	if s.routes.Routing != nil && (r.Full || !s.steered) {
		if r.Err = s.routes.Ensure(); r.Err != nil {
			return r
		}
		s.routed.Store(true)
	}
	if r.Full {
		if r.Err = s.read(ctx); r.Err != nil {
			return r
		}
	}
	if !s.steered {
		if r.Err = s.steer(ctx, &r); r.Err != nil {
			return r
		}
		s.steered = true
		steered()
	}
	ops := kernel.Diff(s.have, s.want)
	if ops.Empty() {
		s.done(&r)
		return r
	}
	r.Tried = true
	applied, err := s.Apply(ctx, ops)
	r.Applied.Add(applied)
	if r.Failed, r.Err = applied.Failed, err; r.OK() {
		s.done(&r)
		for f := range r.Written {
			r.Written[f] = countRules(ops.Chains[f], ops.AddJumps[f])
		}
		return r
	}
	// What took effect is known only by looking.
	if err := s.read(ctx); err != nil {
		r.Failed, r.Err = nil, errors.Join(r.Err, err)
		return r
	}
	r.Holds = s.count()
	s.Expect(asWanted(s.have, s.want)) // what else is damaged doesn't wait for the retry
	return r
}

// done notes that the kernel holds what is wanted.
func (s *Stack) done(r *kernel.Result) {
	s.have = s.want
	s.Expect(s.want)
	r.Holds = s.count()
}

// steer writes what all services share, and leaves what services have.
func (s *Stack) steer(ctx context.Context, r *kernel.Result) error {
	p := s.plan
	// Fresh, as Render would forget the services, and find all of them new with the next plan.
	want := withShared(s.have, s.Fresh(p.Empty()))
	if ops := kernel.Diff(s.have, want); !ops.Empty() {
		r.Steered = true
		applied, err := s.Apply(ctx, ops)
		r.Applied.Add(applied)
		if err != nil {
			s.known = false
			return fmt.Errorf("lead connections to userspace: %w", err)
		}
	}
	s.have = want
	return nil
}

// Check implements [kernel.Plane].
func (s *Stack) Check(ctx context.Context) ([]string, error) {
	found, err := s.RulesetPlane.Check(ctx)
	if err == nil && s.routed.Load() {
		var gone []string
		if gone, err = s.routes.Missing(); err != nil {
			err = fmt.Errorf("watch routes: %w", err)
		}
		for _, what := range gone {
			found = append(found, what+" is gone")
		}
	}
	if len(found) > 0 {
		s.damaged.Store(true)
	}
	return found, err
}

// Sever implements [kernel.Severer].
func (s *Stack) Sever(p service.Protocol, endpoint netip.AddrPort) {
	if severer, ok := s.RulesetPlane.(kernel.Severer); ok {
		severer.Sever(p, endpoint)
	}
}

// Drain implements [kernel.Drainer].
func (s *Stack) Drain(ctx context.Context) (left int, err error) {
	if d, ok := s.RulesetPlane.(kernel.Drainer); ok {
		return d.Drain(ctx)
	}
	return 0, nil
}

// count counts what have has.
func (s *Stack) count() *kernel.Objects {
	have := s.have
	var o kernel.Objects
	for f := range service.Families {
		o.Rules[f] = countRules(have.Chains[f], have.Jumps[f])
	}
	for i := range have.Virtuals {
		f := service.FamilyOf(have.Virtuals[i].Address.Addr())
		o.Virtuals[f]++
		o.Reals[f] += len(have.Virtuals[i].Reals)
	}
	return &o
}

func countRules(chains []kernel.Chain, jumps []kernel.Jump) map[string]int {
	out := map[string]int{"filter": 0, "mangle": 0, "nat": 0}
	for len(chains) > 0 { // they are sorted by table
		table, n, i := chains[0].Table, 0, 0
		for ; i < len(chains) && chains[i].Table == table; i++ {
			n += chains[i].Len()
		}
		out[table] += n
		chains = chains[i:]
	}
	for i := range jumps {
		out[jumps[i].Table]++
	}
	return out
}

// withShared returns have with the sets, chains and jumps that all services
// share. A chain that is empty in shared is one that services fill: if there is
// one, an earlier kproxy filled it, and it stays. So do the virtual servers and
// addresses, all of which are services', and the rules that lead to chains which
// shared doesn't have: those of a data plane that an earlier kproxy used, whose
// services this one will program another way.
func withShared(have, shared kernel.Ruleset) kernel.Ruleset {
	out := kernel.Ruleset{Sets: slices.Clone(have.Sets), Virtuals: have.Virtuals, Addresses: have.Addresses}
	for _, s := range shared.Sets {
		if !slices.ContainsFunc(have.Sets, func(h kernel.Set) bool { return h.Name == s.Name }) {
			out.Sets = append(out.Sets, s)
		}
	}
	slices.SortFunc(out.Sets, kernel.CompareSets)
	for f := range service.Families {
		chains := slices.Clone(have.Chains[f])
		for _, c := range shared.Chains[f] {
			i := slices.IndexFunc(chains, sameChain(c))
			switch {
			case i < 0:
				chains = append(chains, c)
			case c.Len() > 0:
				former := waysOut(chains[i], have.Chains[f], shared.Chains[f])
				chains[i] = c
				chains[i].Rules = slices.Concat(c.Text(), former)
			}
		}
		slices.SortFunc(chains, kernel.CompareChains)
		out.Chains[f] = chains
		out.Jumps[f] = slices.Clone(have.Jumps[f])
		for _, j := range shared.Jumps[f] {
			if !slices.Contains(out.Jumps[f], j) {
				out.Jumps[f] = append(out.Jumps[f], j)
			}
		}
	}
	return out
}

// waysOut are the rules of c that lead to a chain which have has and shared
// doesn't.
func waysOut(c kernel.Chain, have, shared []kernel.Chain) []string {
	var out []string
	for _, r := range c.Text() {
		words := kernel.Words(r)
		if len(words) < 2 || words[len(words)-2] != "-j" {
			continue
		}
		to := sameChain(kernel.Chain{Table: c.Table, Name: words[len(words)-1]})
		if slices.ContainsFunc(have, to) && !slices.ContainsFunc(shared, to) {
			out = append(out, r)
		}
	}
	return out
}

// sameChain returns a test for chains of c's name.
func sameChain(c kernel.Chain) func(kernel.Chain) bool {
	return func(o kernel.Chain) bool { return o.Table == c.Table && o.Name == c.Name }
}

// asWanted returns what was read back, with the entries of sets left out of
// account that want leaves out as well.
func asWanted(have, want kernel.Ruleset) kernel.Ruleset {
	out := have
	out.Sets = slices.Clone(have.Sets)
	for i := range out.Sets {
		s := &out.Sets[i]
		at, found := slices.BinarySearchFunc(want.Sets, s.Name, func(w kernel.Set, name string) int { return strings.Compare(w.Name, name) })
		s.Dynamic = !found || want.Sets[at].Dynamic
	}
	return out
}
