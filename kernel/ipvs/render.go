package ipvs

import (
	"slices"
	"strings"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// Render returns what p wants of IPVS in the kernel: virtual servers, addresses,
// sets, and the rules that only those need. The rules that lead to these are
// kernel/iptables's, with the portal; [kernel.Merge] puts both together.
// Render is pure: equal plans and options give equal rulesets. A plan that
// doesn't use IPVS gives an empty one.
func Render(p *plan.Plan, o Options) kernel.Ruleset {
	return NewRenderer(o).Render(p, plan.Between(nil, p))
}

// Renderer renders like [Render] and remembers what it rendered last, so that a
// change of one service port costs little, however many there are. It isn't safe
// for concurrent use. Its rulesets share memory and must not be modified.
type Renderer struct {
	options Options
	known   map[service.Key]known
	total   totals
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
	if !p.Uses(plan.IPVS) {
		r.forget()
		return kernel.Ruleset{}
	}
	r.follow(p, d)
	out := kernel.Ruleset{Sets: r.sets(p), Virtuals: r.total.winners, Addresses: r.total.addresses.sorted}
	for _, f := range service.Families {
		if f == service.IPv6 && r.options.SkipIPv6 {
			continue
		}
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
		wanted := is != nil && is.Beneath == plan.IPVS
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
			out[i].Entries = t.sorted
		}
	}
	slices.SortFunc(out, func(a, b kernel.Set) int { return strings.Compare(a.Name, b.Name) })
	return out
}
