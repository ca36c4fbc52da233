package ipvs

import (
	"net/netip"
	"slices"
	"strings"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// Options is what rules depend on besides the plan.
type Options struct {
	Marks kernel.Marks
	// CatchRefusals says that the host has xt_connbytes and counts packets
	// (net.netfilter.nf_conntrack_acct), so that a connection which an endpoint
	// refuses can go to another.
	CatchRefusals bool
	// SkipIPv6 renders nothing for IPv6, for hosts without ip6tables.
	SkipIPv6 bool
}

// DefaultOptions returns options for a host that has everything.
func DefaultOptions() Options {
	return Options{Marks: kernel.DefaultMarks(), CatchRefusals: true}
}

// Validate reports every problem.
func (o Options) Validate() error { return o.Marks.Validate() }

// Render returns what p wants of IPVS in the kernel: virtual servers, addresses,
// sets, and the rules that only those need. The rules that lead to these are
// kernel/steering's; [kernel.Merge] puts both together.
// Render is pure: equal plans and options give equal rulesets. A plan that
// doesn't use IPVS gives an empty one.
func Render(p *plan.Plan, o Options) kernel.Ruleset {
	out := NewRenderer(o).Render(p, plan.Between(nil, p))
	out.Step = kernel.Step{}
	return out
}

// Renderer renders like [Render] and remembers what it rendered last, so that a
// change of one service port costs little, however many there are. It isn't safe
// for concurrent use. Its rulesets share memory and must not be modified.
type Renderer struct {
	options Options
	known   map[service.Key]known
	total   totals
	step    kernel.Step // to what was rendered last
	empty   bool        // which had nothing
}

type known struct {
	hash     uint64
	fragment *fragment
}

// NewRenderer returns a Renderer that remembers nothing yet.
func NewRenderer(o Options) *Renderer {
	r := &Renderer{options: o}
	r.forget()
	return r
}

func (r *Renderer) forget() { r.known, r.total = map[service.Key]known{}, newTotals() }

// Render returns what p wants of IPVS in the kernel. d leads there from the plan
// that was rendered last.
func (r *Renderer) Render(p *plan.Plan, d plan.Delta) kernel.Ruleset {
	uses := p.Uses(plan.IPVS)
	if uses == r.empty {
		r.step = kernel.Step{}
	}
	r.step, r.empty = r.step.Next(), !uses
	if !uses {
		r.forget()
		return kernel.Ruleset{Step: r.step}
	}
	r.follow(p, d)
	out := kernel.Ruleset{Sets: r.sets(p), Virtuals: r.total.winners, Addresses: r.total.addresses.sorted}
	for i := range out.Sets {
		if name := out.Sets[i].Name; r.total.entries[name] == nil {
			r.step.Sets[name] = nil
		}
	}
	for _, f := range service.Families {
		if f == service.IPv6 && r.options.SkipIPv6 {
			continue
		}
		s := static{r.options, f, &p.Policy}
		out.Jumps[f], out.Chains[f] = s.jumps(), s.chains()
		slices.SortFunc(out.Chains[f], kernel.CompareChains)
		r.step.Chains[f] = out.Chains[f]
	}
	out.Step = r.step
	return out
}

// follow renders the services that IPVS carries and that need other rules than
// before, and brings the totals up to date.
func (r *Renderer) follow(p *plan.Plan, d plan.Delta) {
	var gone, come []*fragment
	remove := func(k service.Key) {
		if old, ok := r.known[k]; ok {
			gone = append(gone, old.fragment)
			delete(r.known, k)
		}
	}
	if d.Full {
		for k := range r.known {
			if p.Find(k) == nil {
				remove(k)
			}
		}
	}
	for _, c := range d.Changes {
		k, is := c.Key(), c.Is
		wanted := is != nil && is.Kernel == plan.IPVS
		if old, ok := r.known[k]; ok && wanted && old.hash == is.KernelHash {
			continue
		}
		remove(k)
		if wanted {
			fr := renderService(is, &p.Policy, r.options)
			r.known[k] = known{is.KernelHash, fr}
			come = append(come, fr)
		}
	}
	r.total.change(gone, come, &r.step)
}

// bitmaps are the sets that have one for node ports per protocol and
// family, besides one of addresses.
var bitmaps = []string{kernel.SetMasqAll, kernel.SetMasqNode}

// sets returns every set in order of name, with its entries.
func (r *Renderer) sets(p *plan.Plan) []kernel.Set {
	out := Sets()
	for _, f := range service.Families {
		out = append(out, steering.PodNetworks(p, f),
			kernel.Set{Name: kernel.FamilySet(kernel.SetEndpoint, f), Type: kernel.HashIPPortIP, Family: f})
		for _, base := range []string{kernel.SetMasqAll, kernel.SetMasqNet, kernel.SetMasqNode} {
			out = append(out, kernel.Set{Name: kernel.FamilySet(base, f), Type: kernel.HashIPPort, Family: f})
		}
		for _, base := range bitmaps {
			for _, proto := range []service.Protocol{service.TCP, service.UDP} {
				out = append(out, kernel.Set{Name: kernel.NodePortSet(base, proto, f), Type: kernel.BitmapPort})
			}
		}
	}
	for i := range out {
		if t := r.total.entries[out[i].Name]; t != nil {
			out[i].Entries = t.sorted
		}
	}
	slices.SortFunc(out, func(a, b kernel.Set) int { return strings.Compare(a.Name, b.Name) })
	return out
}

// totals are all fragments together, in order. Slices in it are never written
// to: a change makes new ones of those that it concerns, and leaves the others
// for who compares to find unchanged.
type totals struct {
	entries   map[string]*multiset[string] // by set
	addresses *multiset[netip.Addr]
	// candidates are all virtual servers, winners those that have their place.
	candidates []candidate
	winners    []kernel.Virtual
}

func newTotals() totals {
	return totals{entries: map[string]*multiset[string]{}, addresses: newMultiset(netip.Addr.Compare)}
}

// change takes fragments away and adds others, and says in step what that may change.
func (t *totals) change(gone, come []*fragment, step *kernel.Step) {
	if len(gone)+len(come) == 0 {
		return
	}
	var less, more []candidate
	for _, fr := range gone {
		for _, e := range fr.entries {
			t.entries[e.Set].put(e.Entry, -1)
		}
		for _, a := range fr.addresses {
			t.addresses.put(a, -1)
		}
		less = append(less, fr.candidates()...)
	}
	for _, fr := range come {
		for _, e := range fr.entries {
			if t.entries[e.Set] == nil {
				t.entries[e.Set] = newMultiset(strings.Compare)
			}
			t.entries[e.Set].put(e.Entry, 1)
		}
		for _, a := range fr.addresses {
			t.addresses.put(a, 1)
		}
		more = append(more, fr.candidates()...)
	}
	for set, c := range t.entries {
		if entries := c.settle(); len(entries) > 0 {
			step.Sets[set] = entries
		}
	}
	step.Addresses = t.addresses.settle()
	for _, c := range slices.Concat(less, more) {
		step.Virtuals = append(step.Virtuals, c.Virtual)
	}
	t.candidates = kernel.Patch(t.candidates, less, more, compareCandidates)
	t.winners = winners(t.candidates)
}

// candidate is a virtual server that wants a place.
type candidate struct {
	kernel.Virtual
	nodePort bool
}

func (fr *fragment) candidates() []candidate {
	out := make([]candidate, 0, len(fr.virtuals)+len(fr.nodePorts))
	for _, v := range fr.virtuals {
		out = append(out, candidate{v, false})
	}
	for _, v := range fr.nodePorts {
		out = append(out, candidate{v, true})
	}
	return out
}

// compareCandidates orders by place. Of several at one, a service's address comes
// before a node port, and the first service before others, as rules of iptables
// would have it.
func compareCandidates(a, b candidate) int {
	order := kernel.CompareVirtuals(a.Virtual, b.Virtual)
	switch {
	case order != 0:
		return order
	case a.nodePort == b.nodePort:
		return a.Owner.Compare(b.Owner)
	case b.nodePort:
		return -1
	}
	return 1
}

// winners are the first of each place.
func winners(candidates []candidate) []kernel.Virtual {
	if len(candidates) == 0 {
		return nil
	}
	out := make([]kernel.Virtual, 0, len(candidates))
	for i := range candidates {
		if i == 0 || kernel.CompareVirtuals(candidates[i-1].Virtual, candidates[i].Virtual) != 0 {
			out = append(out, candidates[i].Virtual)
		}
	}
	return out
}

// multiset is a sorted list of values without duplicates, and how often each was put in.
type multiset[T comparable] struct {
	compare func(T, T) int
	sorted  []T
	count   map[T]int
	before  map[T]int // counts that have changed since sorted was made
}

func newMultiset[T comparable](compare func(T, T) int) *multiset[T] {
	return &multiset[T]{compare: compare, count: map[T]int{}, before: map[T]int{}}
}

func (c *multiset[T]) put(x T, by int) {
	n := c.count[x]
	if _, ok := c.before[x]; !ok {
		c.before[x] = n
	}
	if n+by == 0 {
		delete(c.count, x)
	} else {
		c.count[x] = n + by
	}
}

// settle makes sorted what the counts say, and returns what is gone or has come.
func (c *multiset[T]) settle() []T {
	var gone, come []T
	for x, before := range c.before {
		switch now := c.count[x]; {
		case before > 0 && now == 0:
			gone = append(gone, x)
		case before == 0 && now > 0:
			come = append(come, x)
		}
	}
	clear(c.before)
	c.sorted = kernel.Patch(c.sorted, gone, come, c.compare)
	return append(gone, come...)
}
