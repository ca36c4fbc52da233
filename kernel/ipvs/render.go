package ipvs

import (
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// Render returns what p wants of IPVS in the kernel: virtual servers, addresses,
// sets, and the rules that only those need. The rules that lead to these are
// kernel/iptables's, with the portal; [kernel.Merge] puts both together.
// Render is pure: equal plans and options give equal rulesets. A plan that
// doesn't use IPVS gives an empty one.
func Render(p *plan.Plan, o Options) kernel.Ruleset { return NewRenderer(o).Render(p) }

// Renderer renders like [Render] and remembers what it rendered for each service
// port, so that a change of one costs little. It isn't safe for concurrent
// use. Its rulesets share memory and must not be modified.
type Renderer struct {
	options Options
	known   map[service.Key]known
}

type known struct {
	hash     uint64
	fragment *fragment
}

// NewRenderer returns a Renderer that remembers nothing yet.
func NewRenderer(o Options) *Renderer {
	return &Renderer{options: o, known: map[service.Key]known{}}
}

// Render returns what p wants of IPVS in the kernel.
func (r *Renderer) Render(p *plan.Plan) kernel.Ruleset {
	if !p.Uses(plan.IPVS) {
		clear(r.known)
		return kernel.Ruleset{}
	}
	fragments := r.fragments(p)
	out := kernel.Ruleset{Sets: sets(p, fragments)}
	for _, f := range service.Families {
		if f == service.IPv6 && r.options.SkipIPv6 {
			continue
		}
		s := static{r.options, f}
		out.Jumps[f], out.Chains[f] = s.jumps(), s.chains()
		slices.SortFunc(out.Chains[f], kernel.CompareChains)
	}
	out.Virtuals, out.Addresses = collect(fragments)
	return out
}

// fragments renders the services that IPVS carries, and forgets those that are
// gone. A hash of 0 says that the plan has none.
func (r *Renderer) fragments(p *plan.Plan) []*fragment {
	var out []*fragment
	next := make(map[service.Key]known, len(r.known))
	for _, s := range p.Services {
		if s.Beneath != plan.IPVS {
			continue
		}
		k, ok := r.known[s.Port.Key]
		if !ok || k.hash != s.KernelHash || k.hash == 0 {
			k = known{s.KernelHash, renderService(s, &p.Policy, r.options)}
		}
		next[s.Port.Key] = k
		out = append(out, k.fragment)
	}
	r.known = next
	return out
}

// collect gathers virtual servers and addresses in order. Of several virtual
// servers at one place, a service's address comes before a node port, and the
// first service before others, as rules of iptables would have it.
func collect(fragments []*fragment) ([]kernel.Virtual, []netip.Addr) {
	n := 0
	for _, fr := range fragments {
		n += len(fr.virtuals) + len(fr.nodePorts)
	}
	virtuals := make([]kernel.Virtual, 0, n)
	var addresses []netip.Addr
	for _, fr := range fragments {
		virtuals = append(virtuals, fr.virtuals...)
		addresses = append(addresses, fr.addresses...)
	}
	for _, fr := range fragments {
		virtuals = append(virtuals, fr.nodePorts...)
	}
	slices.SortStableFunc(virtuals, kernel.CompareVirtuals)
	virtuals = slices.CompactFunc(virtuals, func(a, b kernel.Virtual) bool { return kernel.CompareVirtuals(a, b) == 0 })
	slices.SortFunc(addresses, netip.Addr.Compare)
	return virtuals, slices.Compact(addresses)
}

// bitmaps are the sets that have one for node ports per protocol, besides one
// of addresses per family.
var bitmaps = []string{kernel.SetMasqAll, kernel.SetMasqNode}

// sets returns every set in order of name, with the entries of fragments.
func sets(p *plan.Plan, fragments []*fragment) []kernel.Set {
	out := Sets()
	for _, f := range service.Families {
		out = append(out, kernel.PodNetworks(p, f),
			kernel.Set{Name: kernel.FamilySet(kernel.SetEndpoint, f), Type: kernel.HashIPPortIP, Family: f})
		for _, base := range []string{kernel.SetMasqAll, kernel.SetMasqNet, kernel.SetMasqNode} {
			out = append(out, kernel.Set{Name: kernel.FamilySet(base, f), Type: kernel.HashIPPort, Family: f})
		}
	}
	for _, base := range bitmaps {
		for _, proto := range []service.Protocol{service.TCP, service.UDP} {
			out = append(out, kernel.Set{Name: kernel.NodePortSet(base, proto), Type: kernel.BitmapPort})
		}
	}
	out = append(out, kernel.Set{Name: kernel.NodePortSet(kernel.SetHealth, service.TCP), Type: kernel.BitmapPort, Entries: healthPorts(p)})
	at := make(map[string]*kernel.Set, len(out))
	for i := range out {
		at[out[i].Name] = &out[i]
	}
	for _, fr := range fragments {
		for _, e := range fr.entries {
			at[e.Set].Entries = append(at[e.Set].Entries, e.Entry)
		}
	}
	for i := range out {
		slices.Sort(out[i].Entries)
		out[i].Entries = slices.Compact(out[i].Entries)
	}
	slices.SortFunc(out, func(a, b kernel.Set) int { return strings.Compare(a.Name, b.Name) })
	return out
}

// healthPorts are the ports at which load balancers ask this node whether it has
// endpoints, some of them by the load balancer's own address.
func healthPorts(p *plan.Plan) []string {
	var out []string
	for _, s := range p.Services {
		if n := s.Port.HealthCheckNodePort; n != 0 && s.Beneath == plan.IPVS {
			out = append(out, strconv.Itoa(int(n)))
		}
	}
	return out
}
