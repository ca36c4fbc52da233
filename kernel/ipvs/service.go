package ipvs

import (
	"cmp"
	"net/netip"
	"slices"
	"strconv"
	"time"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// fragment holds what one service port contributes. It depends on nothing but the
// service's KernelHash and the options, so it can be remembered.
type fragment struct {
	virtuals  []kernel.Virtual // at the service's addresses
	nodePorts []kernel.Virtual // at the node's own
	addresses []netip.Addr     // for kproxy's link
	entries   []kernel.SetEntry
}

// schedulerFlags are the flags that kproxy gives schedulers: where a hash leads to
// a real server of weight 0, sh and mh take another one instead of refusing
// the connection (IP_VS_SVC_F_SCHED_SH_FALLBACK and _MH_FALLBACK of
// include/uapi/linux/ip_vs.h, both IP_VS_SVC_F_SCHED1).
var schedulerFlags = map[string]uint32{"sh": flagSched1, "mh": flagSched1}

// flagSched1 is IP_VS_SVC_F_SCHED1.
const flagSched1 = 0x8

// renderService renders one service port in both families.
func renderService(s *plan.Service, p *plan.Policy, o steering.Options) *fragment {
	b := &builder{s: s, policy: p, out: &fragment{}}
	for i := range s.Frontends {
		if f := &s.Frontends[i]; f.Family != service.IPv6 || !o.SkipIPv6 {
			b.frontend(f)
		}
	}
	slices.SortFunc(b.out.entries, func(x, y kernel.SetEntry) int {
		return cmp.Or(cmp.Compare(x.Set, y.Set), cmp.Compare(x.Entry, y.Entry))
	})
	b.out.entries = slices.Compact(b.out.entries)
	slices.SortFunc(b.out.addresses, netip.Addr.Compare)
	b.out.addresses = slices.Compact(b.out.addresses)
	return b.out
}

// builder renders one service port.
type builder struct {
	s      *plan.Service
	policy *plan.Policy
	out    *fragment
	// groups are the real servers by family and by whether they are only those on
	// this node. Frontends share them.
	groups [2][2][]kernel.Real
	made   [2][2]bool
}

// frontend renders the virtual servers of f. Where no real server takes
// connections, f's verdict refuses new ones before they come here, and those that
// exist go on.
func (b *builder) frontend(f *plan.Frontend) {
	reals := b.reals(f.Family, f.Local)
	if len(reals) == 0 {
		return
	}
	places := []netip.AddrPort{f.Address}
	if f.Kind == plan.NodePort {
		places = b.nodePlaces(f)
	}
	for _, a := range places {
		if slices.ContainsFunc(reals, func(r kernel.Real) bool { return r.Address == a }) {
			continue // what is on its way to that endpoint isn't to come back to it
		}
		v := kernel.Virtual{
			Protocol: f.Protocol, Address: a, Scheduler: b.s.Scheduler, SchedFlags: schedulerFlags[b.s.Scheduler],
			Persistence: seconds(b.s.Port.Affinity), Reals: reals, Owner: b.s.Port.Key,
		}
		if f.Kind == plan.NodePort {
			b.out.nodePorts = append(b.out.nodePorts, v)
			continue
		}
		b.out.virtuals = append(b.out.virtuals, v)
		if ip := a.Addr(); !ip.IsLoopback() && !ip.IsLinkLocalUnicast() && !slices.Contains(b.policy.NodeAddresses, ip) {
			b.out.addresses = append(b.out.addresses, ip)
		}
	}
	b.masquerade(f, places)
	for _, r := range reals {
		b.put(kernel.FamilySet(kernel.SetEndpoint, f.Family), kernel.EndpointEntry(f.Protocol, r.Address))
	}
}

// nodePlaces are the node's addresses at which node port f answers.
func (b *builder) nodePlaces(f *plan.Frontend) []netip.AddrPort {
	var out []netip.AddrPort
	for _, a := range b.policy.NodePortAddresses(f.Family) {
		out = append(out, netip.AddrPortFrom(a, f.Address.Port()))
	}
	return out
}

// masquerade puts f where its rule says. Node ports are in bitmaps, which
// know no SCTP; those of SCTP are with the addresses.
func (b *builder) masquerade(f *plan.Frontend, places []netip.AddrPort) {
	base, ok := masquerades[f.Masquerade]
	if !ok {
		return
	}
	if f.Kind == plan.NodePort && f.Protocol != service.SCTP && slices.Contains(bitmaps, base) {
		b.put(kernel.NodePortSet(base, f.Protocol, f.Family), strconv.Itoa(int(f.Address.Port())))
		return
	}
	for _, a := range places {
		b.put(kernel.FamilySet(base, f.Family), kernel.AddressEntry(f.Protocol, a))
	}
}

var masquerades = map[plan.Masquerade]string{
	plan.MasqueradeAlways:    kernel.SetMasqAll,
	plan.MasqueradeUnlessPod: kernel.SetMasqNet,
	plan.MasqueradeNodeLocal: kernel.SetMasqNode,
}

func (b *builder) put(set, entry string) {
	b.out.entries = append(b.out.entries, kernel.SetEntry{Set: set, Entry: entry})
}

// reals returns the real servers of a group: its backends, and with weight 0 the
// endpoints that are listed but not to be used now. Their connections go on for
// as long as they are listed, as they do in the other data planes.
func (b *builder) reals(f service.Family, local bool) []kernel.Real {
	group, kind := b.s.Groups[f].Cluster, 0
	if local {
		group, kind = b.s.Groups[f].Local, 1
	}
	if b.made[f][kind] {
		return b.groups[f][kind]
	}
	var out []kernel.Real
	for _, e := range group {
		out = append(out, kernel.Real{Address: e.Address, Weight: e.Weight})
	}
	for i := range b.s.Endpoints {
		e := &b.s.Endpoints[i]
		if service.FamilyOf(e.Address.Addr()) == f && (e.Local || !local) && b.keeps(e) {
			out = append(out, kernel.Real{Address: e.Address})
		}
	}
	// Those in use come first and win.
	slices.SortStableFunc(out, func(x, y kernel.Real) int { return x.Address.Compare(y.Address) })
	out = slices.CompactFunc(out, func(x, y kernel.Real) bool { return x.Address == y.Address })
	b.groups[f][kind], b.made[f][kind] = out, true
	return out
}

// keeps reports whether an endpoint keeps the connections it has. A flow of UDP
// has no end that its client would notice: it leaves an endpoint that is down.
func (b *builder) keeps(e *plan.Endpoint) bool {
	return !e.Excluded && (b.s.Port.Protocol != service.UDP || e.Keeps())
}

// seconds rounds up: the kernel's persistence is in seconds.
func seconds(d time.Duration) uint32 { return uint32((d + time.Second - 1) / time.Second) }
