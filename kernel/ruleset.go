package kernel

import (
	"context"
	"maps"
	"net/netip"

	"kproxy.dev/kproxy/service"
)

// Ruleset is everything a mode wants in the kernel, or what Observe found of
// it there. It holds whole objects only: chains and sets that are kproxy's, the
// jumps into them, and virtual servers. Slices are sorted, so equal plans give
// equal Rulesets.
type Ruleset struct {
	Sets   []Set
	Chains [2][]Chain // per service.Family, sorted by table, then name
	Jumps  [2][]Jump  // per service.Family, from built-in chains
	// Virtuals are IPVS's; see [CompareVirtuals] for their order. What drains is no
	// part of them: it isn't wanted, and goes in its own time.
	Virtuals []Virtual
	// Addresses are on [DummyLink], sorted. One that only a draining virtual server
	// answers on is no part of them either.
	Addresses []netip.Addr
}

// Chain is one chain of kproxy's own with all its rules.
type Chain struct {
	Table string // "nat", "filter", "mangle"
	Name  string // at most 28 bytes (XT_EXTENSION_MAXNAMELEN - 1)
	// Rules are in the form iptables-save prints them, without "-A NAME ". They
	// are nil where Maker makes them; [Chain.Text] gives them either way.
	Rules []string
	Maker RuleMaker
	Count int // of the rules that Maker makes
	// Owner is the service port the chain belongs to; the zero Key for shared chains.
	Owner service.Key
}

// RuleMaker makes the rules of chains when they are asked for, always the same for
// a name. The rules of 10,000 services take tens of megabytes as text, and each is
// needed once, when it is written. Chains of one name with the same maker have the
// same rules. Implementations are comparable and safe for concurrent use.
type RuleMaker interface {
	MakeRules(chain string) []string
}

// Text returns the chain's rules.
func (c *Chain) Text() []string {
	if c.Maker == nil {
		return c.Rules
	}
	return c.Maker.MakeRules(c.Name)
}

// Len is the number of rules.
func (c *Chain) Len() int {
	if c.Maker == nil {
		return len(c.Rules)
	}
	return c.Count
}

// SameText reports whether chains of one name have the same rules.
func (c *Chain) SameText(o *Chain) bool {
	if c.Maker != nil && c.Maker == o.Maker {
		return true
	}
	return c.Len() == o.Len() && SameRules(c.Text(), o.Text())
}

// Jump is a rule in a built-in chain that leads to one of kproxy's.
type Jump struct {
	Table string
	From  string // built-in chain
	Rule  string // in the form iptables-save prints it, without "-A FROM "
	// Last puts the rule at the end of the built-in chain instead of its
	// beginning, so that the host's own rules come first; but before a rule
	// that rejects or drops everything, which is a policy in disguise. One that
	// is read back behind such a rule isn't Last.
	Last bool
}

// SetType is a type of ipset.
type SetType string

// The types kproxy uses (ipset(8)).
const (
	HashIP        SetType = "hash:ip"
	HashIPPort    SetType = "hash:ip,port"
	HashIPPortIP  SetType = "hash:ip,port,ip"
	HashIPPortNet SetType = "hash:ip,port,net"
	HashNet       SetType = "hash:net"
	BitmapPort    SetType = "bitmap:port"
)

// Set is one ipset of kproxy's own.
type Set struct {
	Name   string // at most 31 bytes (IPSET_MAXNAMELEN - 1)
	Type   SetType
	Family service.Family // ignored for bitmap:port
	// Timeout is the default lifetime of entries in seconds; 0 makes a set without timeouts.
	Timeout uint32
	// Entries in the form `ipset save` prints them, sorted: "10.96.0.10,tcp:80".
	Entries []string
	// Dynamic sets are filled by the kernel, or by kproxy apart from plans
	// (heartbeat, refusals): Diff creates and destroys them but leaves their
	// entries alone.
	Dynamic bool
	// Owner is the service port the set belongs to; the zero Key for shared
	// sets, and for sets that were read back.
	Owner service.Key
}

// Backend puts one mode's rules into the kernel. Implementations are safe for
// use by one goroutine at a time.
type Backend interface {
	// Observe reads back everything that kproxy has in the kernel.
	Observe(ctx context.Context) (Ruleset, error)
	// Apply carries out ops in order and reports what took effect, also when
	// it returns an error.
	Apply(ctx context.Context, ops Ops) (Applied, error)
}

// Ops leads from one Ruleset to another. Its parts are applied in the order of
// its fields, so nothing is reachable before what it needs and nothing is gone
// while something refers to it.
type Ops struct {
	CreateSets []Set
	AddEntries []SetEntries
	Chains     [2][]Chain // new and changed chains, whole
	AddJumps   [2][]Jump
	// Virtuals come before Addresses: a service address is reachable when there is
	// somebody to answer, and the masquerade rules above are there.
	Virtuals     []VirtualChange
	AddAddresses []netip.Addr
	DelAddresses []netip.Addr
	DelJumps     [2][]Jump
	DelEntries   []SetEntries
	DelChains    [2][]Chain // names only
	DestroySets  []string
}

// SetEntries are entries to add to or delete from a set.
type SetEntries struct {
	Set     Set // without Entries
	Entries []string
}

// Applied says what Apply changed.
type Applied struct {
	Chains  int // written or deleted
	Rules   int // in written chains
	Entries int // added or deleted
	// Virtuals counts virtual and real servers and addresses written or deleted.
	Virtuals int
	// Failed names service ports whose chains or virtual servers could not be
	// written, with why.
	Failed map[service.Key]error
}

// Add adds what another Apply changed.
func (a *Applied) Add(o Applied) {
	a.Chains += o.Chains
	a.Rules += o.Rules
	a.Entries += o.Entries
	a.Virtuals += o.Virtuals
	if a.Failed == nil {
		a.Failed = o.Failed
	} else {
		maps.Copy(a.Failed, o.Failed)
	}
}

// SetEntry is one entry of one set.
type SetEntry struct{ Set, Entry string }
