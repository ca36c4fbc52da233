package kerneltest

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/ipvs"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/trace/netfilter"
)

// simulation follows the first packet of a connection through a ruleset: the
// rules and sets by package netfilter, virtual servers and routes by itself. It
// is the [netfilter.SetReader] and the [netfilter.Host] of its tables. Everything
// that is wanted is in the kernel.
type simulation struct {
	t      *testing.T
	rules  *kernel.Ruleset
	plan   *plan.Plan
	family service.Family
	alive  bool // whether kproxy is
	tables *netfilter.Tables
	sets   map[string]kernel.AnySet
}

// Fate is one thing that may become of a packet.
type Fate struct {
	To     string // endpoint, "userspace", "none", or the verdict that ends it
	Masked bool   // its source is replaced
}

// none: kproxy leaves the packet to others.
var none = []Fate{{To: "none"}}

func simulate(t *testing.T, p *plan.Plan, r kernel.Ruleset, redirects []kernel.Set, f service.Family) *simulation {
	t.Helper()
	sim := &simulation{t: t, rules: &r, plan: p, family: f, sets: map[string]kernel.AnySet{}}
	var err error
	if sim.tables, err = netfilter.Parse(f, saved(r, f), sim, sim); err != nil {
		t.Fatal(err)
	}
	add := func(s kernel.Set) {
		known := sim.sets[s.Name]
		known.Name, known.Type, known.Family = s.Name, string(s.Type), s.Family
		for _, text := range s.Entries {
			e, err := kernel.ParseEntry(s.Type, text)
			if err != nil {
				t.Fatal(err)
			}
			known.Entries = append(known.Entries, e)
		}
		sim.sets[s.Name] = known
	}
	for _, s := range slices.Concat(r.Sets, redirects, ipvs.Record(r)) {
		add(s)
	}
	return sim
}

// saved returns what iptables-save prints where rules are all that there is.
func saved(r kernel.Ruleset, f service.Family) string {
	text := ""
	for table, hooks := range map[string][]string{
		"nat":    {"PREROUTING", "INPUT", "OUTPUT", "POSTROUTING"},
		"filter": {"INPUT", "FORWARD", "OUTPUT"},
		"mangle": {"PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"},
	} {
		text += "*" + table + "\n:" + strings.Join(hooks, " ACCEPT [0:0]\n:") + " ACCEPT [0:0]\n"
		var rules strings.Builder
		for _, j := range r.Jumps[f] {
			if j.Table == table {
				fmt.Fprintf(&rules, "-A %s %s\n", j.From, j.Rule)
			}
		}
		for _, c := range r.Chains[f] {
			if c.Table == table {
				text += ":" + c.Name + " - [0:0]\n"
				for _, rule := range c.Text() {
					fmt.Fprintf(&rules, "-A %s %s\n", c.Name, rule)
				}
			}
		}
		text += rules.String() + "COMMIT\n"
	}
	return text
}

// ReadAny implements [netfilter.SetReader]. Every packet is in the sets that say
// that kproxy is alive; which clients have an affinity isn't known.
func (sim *simulation) ReadAny(name string) (kernel.AnySet, error) {
	if strings.HasPrefix(name, kernel.SetAlive) && !sim.alive {
		return kernel.AnySet{Name: name, Type: string(kernel.HashNet), Family: sim.family}, nil
	}
	if strings.HasPrefix(name, kernel.SetAlive) {
		everything := netip.PrefixFrom([2]netip.Addr{netip.IPv4Unspecified(), netip.IPv6Unspecified()}[sim.family], 0)
		return kernel.AnySet{Name: name, Type: string(kernel.HashNet), Family: sim.family, Entries: []kernel.AnyEntry{{Net: everything}}}, nil
	}
	s, ok := sim.sets[name]
	if !ok || strings.HasPrefix(name, kernel.Prefix+"AFF-") {
		return kernel.AnySet{}, errors.New("what is in " + name + " isn't known")
	}
	return s, nil
}

// local reports whether an address is one of the node's, kproxy's link included.
func (sim *simulation) local(a netip.Addr) bool {
	return a.IsLoopback() || slices.Contains(sim.plan.Policy.NodeAddresses, a) || sim.onLink(a)
}

func (sim *simulation) onLink(a netip.Addr) bool {
	_, on := slices.BinarySearchFunc(sim.rules.Addresses, a, netip.Addr.Compare)
	return on
}

// AddressType implements [netfilter.Host].
func (sim *simulation) AddressType(a netip.Addr) (string, error) {
	if sim.local(a) {
		return "LOCAL", nil
	}
	return "UNICAST", nil
}

// InterfaceAddress implements [netfilter.Host].
func (sim *simulation) InterfaceAddress(string, service.Family) (netip.Addr, error) {
	return nodeAddress(sim.plan, sim.family), nil
}

// MasqueradeAddress implements [netfilter.Host]. That it is none tells masked packets from others.
func (sim *simulation) MasqueradeAddress(string, netip.Addr) (a netip.Addr, err error) {
	return a, nil
}

// Listens implements [netfilter.Host].
func (sim *simulation) Listens(service.Protocol, netip.AddrPort) (netfilter.Socket, error) {
	return netfilter.Socket{}, nil
}

// first is the first packet of a connection.
func first(proto service.Protocol, c plan.Client, to netip.AddrPort) netfilter.Packet {
	in := c.Interface
	if in == "" && !c.Node {
		in = "eth0"
	}
	return netfilter.NewPacket(proto, netip.AddrPortFrom(c.Address, 40000), to, in)
}

// connect returns everything that may become of a new connection.
func (sim *simulation) connect(p netfilter.Packet) []Fate {
	out := map[Fate]bool{}
	hook, span := netfilter.Prerouting, netfilter.Whole
	if p.In == "" {
		hook, span = netfilter.Output, netfilter.OutputBeforeBalancing
	}
	sim.walk(out, p, hook, span, func(p netfilter.Packet) { sim.route(out, p) })
	return sortedFates(out)
}

// walk follows a packet through a hook, and calls accepted for each way in which
// it goes on.
func (sim *simulation) walk(out map[Fate]bool, p netfilter.Packet, h netfilter.Hook, s netfilter.Span, accepted func(netfilter.Packet)) {
	for _, o := range sim.tables.Walk(p, h, s).Outcomes {
		switch o.Verdict {
		case netfilter.Accept:
			accepted(o.Packet)
		case netfilter.Unknown:
			sim.t.Fatalf("%s: it can't be said what becomes of %+v", h, p)
		default:
			out[Fate{To: strings.ToUpper(string(o.Verdict))}] = true
		}
	}
}

// route follows a packet whose destination is settled.
func (sim *simulation) route(out map[Fate]bool, p netfilter.Packet) {
	nobody := func(netfilter.Packet) { out[none[0]] = true }
	own := p.In == ""
	switch {
	case slices.Contains(steering.ListenerAddress[:], p.Dst.Addr()):
		out[Fate{To: "userspace"}] = true
	case p.DNAT && own:
		sim.leave(out, p, netfilter.Output, netfilter.OutputAfterBalancing)
	case p.DNAT:
		sim.leave(out, p, netfilter.Forward, netfilter.Whole)
	case own:
		if fates := sim.schedule(p); fates != nil {
			for _, f := range fates {
				out[f] = true
			}
			return
		}
		p.Out = "eth0"
		sim.walk(out, p, netfilter.Output, netfilter.OutputAfterBalancing, func(p netfilter.Packet) {
			if !sim.local(p.Dst.Addr()) {
				nobody(p)
				return
			}
			p.In = "lo"
			sim.walk(out, p, netfilter.Input, netfilter.Whole, nobody)
		})
	case sim.local(p.Dst.Addr()):
		sim.walk(out, p, netfilter.Input, netfilter.InputBeforeBalancing, func(p netfilter.Packet) {
			fates := sim.schedule(p)
			if fates == nil {
				fates = none
			}
			for _, f := range fates {
				out[f] = true
			}
		})
	default:
		p.Out = "eth0"
		sim.walk(out, p, netfilter.Forward, netfilter.Whole, nobody)
	}
}

// schedule is IPVS: what its virtual server at the packet's destination does with
// it; nil where there is none.
func (sim *simulation) schedule(p netfilter.Packet) []Fate {
	v, ok := sim.rules.Virtual(p.Protocol, p.Dst)
	if !ok {
		return nil
	}
	out := map[Fate]bool{}
	for _, r := range v.Reals {
		if r.Weight > 0 {
			to := p
			to.Dst, to.DstDone, to.In = r.Address, true, ""
			sim.leave(out, to, netfilter.Output, netfilter.OutputAfterBalancing)
		}
	}
	if len(out) == 0 {
		return []Fate{{To: "REJECT"}} // ip_vs_leave
	}
	return sortedFates(out)
}

// leave follows a packet to an endpoint out of the node.
func (sim *simulation) leave(out map[Fate]bool, p netfilter.Packet, h netfilter.Hook, s netfilter.Span) {
	p.Out = "eth1"
	sim.walk(out, p, h, s, func(p netfilter.Packet) {
		sim.walk(out, p, netfilter.Postrouting, netfilter.Whole, func(p netfilter.Packet) {
			out[Fate{To: p.Dst.String(), Masked: !p.Src.Addr().IsValid()}] = true
		})
	})
}
