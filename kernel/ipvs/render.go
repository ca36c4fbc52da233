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

// Render returns what p wants of IPVS in the kernel: virtual servers, addresses,
// sets, and the rules that only those need. The rules that lead to these are
// kernel/steering's; [kernel.Merge] puts both together.
// Render is pure: equal plans and options give equal rulesets. A plan that
// doesn't use IPVS gives an empty one.
func Render(p *plan.Plan, o steering.Options) kernel.Ruleset {
	return NewRenderer(o).Render(p, plan.Between(nil, p))
}

// Renderer renders like [Render] and remembers what it rendered last, so that a
// change of one service port costs little, however many there are. It isn't safe
// for concurrent use. Its rulesets share memory and must not be modified.
type Renderer struct {
	options steering.Options
	known   map[service.Key]known
	total   totals
}

type known struct {
	hash     uint64
	fragment *fragment
}

// NewRenderer returns a Renderer that remembers nothing yet.
func NewRenderer(o steering.Options) *Renderer {
	r := &Renderer{options: o}
	r.forget()
	return r
}

func (r *Renderer) forget() {
	r.known, r.total = map[service.Key]known{}, totals{entries: map[string]*kernel.Multiset[string]{}}
}

// Render returns what p wants of IPVS in the kernel. d leads there from the plan
// that was rendered last.
func (r *Renderer) Render(p *plan.Plan, d plan.Delta) kernel.Ruleset {
	if !p.Uses(plan.IPVS) {
		r.forget()
		return kernel.Ruleset{}
	}
	r.follow(p, d)
	out := kernel.Ruleset{Sets: r.sets(p), Virtuals: r.total.all, Addresses: r.total.addresses.Unique}
	for _, f := range r.options.Families() {
		s := static{r.options, f, &p.Policy}
		out.Jumps[f], out.Chains[f] = s.jumps(), s.chains()
		slices.SortFunc(out.Chains[f], kernel.CompareChains)
	}
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
	r.total.change(gone, come)
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
			out[i].Entries = t.Unique
		}
	}
	slices.SortFunc(out, kernel.CompareSets)
	return out
}

// totals are all fragments together, in order.
type totals struct {
	entries   map[string]*kernel.Multiset[string] // by set
	addresses kernel.Multiset[netip.Addr]
	// virtuals are at services' own addresses, nodePorts at the node's. Where both are at one,
	// which plans allow, the former has it in all, as rules of iptables would have it.
	virtuals, nodePorts, all []kernel.Virtual
}

// change takes fragments away and adds others.
func (t *totals) change(gone, come []*fragment) {
	if len(gone)+len(come) == 0 {
		return
	}
	was, is := join(gone), join(come)
	less, more := was.bySet(), is.bySet()
	for _, m := range []map[string][]string{less, more} {
		for set := range m {
			if t.entries[set] == nil {
				t.entries[set] = &kernel.Multiset[string]{}
			}
		}
	}
	for set, m := range t.entries {
		m.Change(less[set], more[set], strings.Compare)
	}
	t.addresses.Change(was.addresses, is.addresses, netip.Addr.Compare)
	t.virtuals = kernel.Patch(t.virtuals, was.virtuals, is.virtuals, kernel.CompareVirtuals)
	t.nodePorts = kernel.Patch(t.nodePorts, was.nodePorts, is.nodePorts, kernel.CompareVirtuals)
	t.all = kernel.MergeSorted(t.virtuals, t.nodePorts, kernel.CompareVirtuals, kernel.First)
}

// join puts fragments together.
func join(fragments []*fragment) *fragment {
	out := &fragment{}
	for _, fr := range fragments {
		out.virtuals = append(out.virtuals, fr.virtuals...)
		out.nodePorts = append(out.nodePorts, fr.nodePorts...)
		out.addresses = append(out.addresses, fr.addresses...)
		out.entries = append(out.entries, fr.entries...)
	}
	return out
}

func (fr *fragment) bySet() map[string][]string {
	out := map[string][]string{}
	for _, e := range fr.entries {
		out[e.Set] = append(out[e.Set], e.Entry)
	}
	return out
}
