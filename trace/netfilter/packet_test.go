package netfilter_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/iptables"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/test/kerneltest"
	"kproxy.dev/kproxy/trace/netfilter"
)

// hosts is how many there are in a scene: 1 is a client, 2 to 4 are endpoints.
const hosts = 4

// scene is a network whose node has rules.
type scene struct {
	*kerneltest.Network
	t       *testing.T
	family  service.Family
	variant kernel.Variant
}

// onEachKernel runs test for both variants and both families.
func onEachKernel(t *testing.T, test func(s *scene)) {
	for _, v := range []kernel.Variant{kernel.VariantNFT(), kernel.VariantLegacy()} {
		for _, f := range service.Families {
			t.Run(v.Name+"/"+f.String(), func(t *testing.T) {
				t.Parallel() // most of it is waiting for what is dropped
				s := newScene(t, f)
				s.variant = v
				test(s)
			})
		}
	}
}

func newScene(t *testing.T, f service.Family) *scene {
	s := &scene{Network: kerneltest.NewNetwork(t, hosts), t: t, family: f, variant: kernel.VariantNFT()}
	for i := 2; i <= hosts; i++ {
		s.Serve(i, fmt.Sprint(i), 8080)
	}
	return s
}

func options() steering.Options {
	o := steering.DefaultOptions()
	o.Planes = []steering.Plane{iptables.InSteering}
	o.TCPPort, o.UDPPort = 4001, 4002
	return o
}

// program makes the kernel do what p says, in every data plane.
func (s *scene) program(p *plan.Plan) *kernel.IPSets {
	s.t.Helper()
	sets, err := kernel.OpenIPSets()
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(sets.Close)
	c := steering.DefaultEnv(nil)
	c.Sets, c.Variant = sets, s.variant
	b := iptables.New(c)
	ctx := context.Background()
	if a, err := b.Apply(ctx, kernel.Diff(kernel.Ruleset{}, iptables.Render(p, options()))); err != nil || len(a.Failed) > 0 {
		s.t.Fatalf("apply: %v, %v", err, a.Failed)
	}
	if _, err := kernel.ApplySets(ctx, sets, kernel.DiffSets(nil, steering.Sets(p))); err != nil {
		s.t.Fatal(err)
	}
	if err := steering.DefaultRouting().Ensure(); err != nil {
		s.t.Fatal(err)
	}
	return sets
}

// AddressType and the other methods are the scene's netfilter.Host: a network
// that the test knows.
func (s *scene) AddressType(a netip.Addr) (string, error) {
	if s.local(a) {
		return "LOCAL", nil
	}
	return "UNICAST", nil
}

func (s *scene) local(a netip.Addr) bool {
	for i := 1; i <= hosts; i++ {
		if a == s.NodeAddress(s.family, i) {
			return true
		}
	}
	return a.IsLoopback() || a == steering.ListenerAddress[s.family]
}

func (s *scene) InterfaceAddress(name string, f service.Family) (netip.Addr, error) {
	for i := 1; i <= hosts; i++ {
		if name == fmt.Sprintf("host%d", i) {
			return s.NodeAddress(f, i), nil
		}
	}
	return netip.Addr{}, errors.New("no such link")
}

func (s *scene) MasqueradeAddress(out string, _ netip.Addr) (netip.Addr, error) {
	return s.InterfaceAddress(out, s.family)
}

func (s *scene) Listens(service.Protocol, netip.AddrPort) (netfilter.Socket, error) {
	return netfilter.Socket{}, nil
}

// link is the one that leads to an address.
func (s *scene) link(a netip.Addr) string {
	for i := 1; i <= hosts; i++ {
		if p, err := s.Address(s.family, i).Prefix(map[service.Family]int{service.IPv4: 24, service.IPv6: 64}[s.family]); err == nil && p.Contains(a) {
			return fmt.Sprintf("host%d", i)
		}
	}
	return fmt.Sprintf("host%d", hosts)
}

// fate says what becomes of a connection: who may answer, and the client's address
// that they see.
type fate struct {
	Verdict string            // "answered", "refused", "dropped", "node", "maybe"
	Servers map[string]string // host: the address that it sees
}

// predict follows a new connection through every hook.
func (s *scene) predict(tables *netfilter.Tables, proto service.Protocol, from int, to netip.AddrPort) (fate, float64) {
	j := journey{scene: s, tables: tables, out: fate{Servers: map[string]string{}}}
	if from == 0 {
		src := s.NodeAddress(s.family, hosts) // of the default route
		p := netfilter.NewPacket(proto, netip.AddrPortFrom(src, 40000), to, "")
		if s.local(to.Addr()) {
			p = netfilter.NewPacket(proto, netip.AddrPortFrom(to.Addr(), 40000), to, "")
		}
		p.Out = s.link(to.Addr())
		p.Near(1500)
		j.hook(p, 1, netfilter.Output, j.route)
	} else {
		p := netfilter.NewPacket(proto, netip.AddrPortFrom(s.Address(s.family, from), 40000), to, fmt.Sprintf("host%d", from))
		p.Near(1500)
		j.hook(p, 1, netfilter.Prerouting, j.route)
	}
	return j.out, j.sum
}

type journey struct {
	*scene
	tables *netfilter.Tables
	out    fate
	sum    float64
}

// hook walks one hook and goes on with what gets past it.
func (j *journey) hook(p netfilter.Packet, share float64, h netfilter.Hook, then func(netfilter.Packet, float64)) {
	w := j.tables.Walk(p, h, netfilter.Whole)
	for _, o := range w.Outcomes {
		switch {
		case !o.Certain || o.Verdict == netfilter.Unknown:
			var why []string
			for _, d := range o.Doubts {
				why = append(why, w.Steps[d].Text+": "+w.Steps[d].Why)
			}
			j.end("maybe", 0)
			j.t.Logf("uncertain at %s: %q", h, why)
		case o.Verdict == netfilter.Drop:
			j.end("dropped", share*o.Probability)
		case o.Verdict == netfilter.Reject:
			j.end("refused", share*o.Probability)
		default:
			then(o.Packet, share*o.Probability)
		}
	}
}

func (j *journey) end(verdict string, share float64) {
	if j.out.Verdict == "" || j.out.Verdict == verdict {
		j.out.Verdict = verdict
	} else {
		j.out.Verdict = "maybe"
	}
	j.sum += share
}

func (j *journey) route(p netfilter.Packet, share float64) {
	if j.local(p.Dst.Addr()) {
		if p.In == "" {
			p.In = "lo"
		}
		j.hook(p, share, netfilter.Input, func(_ netfilter.Packet, share float64) { j.end("node", share) })
		return
	}
	p.Out = j.link(p.Dst.Addr())
	if p.In == "" {
		j.hook(p, share, netfilter.Postrouting, j.arrive)
		return
	}
	if !p.Hop() {
		j.end("dropped", share) // the cases let no ICMP tell: when a client of TCP gives up by it depends on its retransmissions
		return
	}
	j.hook(p, share, netfilter.Forward, func(p netfilter.Packet, share float64) { j.hook(p, share, netfilter.Postrouting, j.arrive) })
}

func (j *journey) arrive(p netfilter.Packet, share float64) {
	for i := 1; i <= hosts; i++ {
		if p.Dst.Addr() == j.Address(j.family, i) {
			j.end("answered", share)
			j.out.Servers[fmt.Sprint(i)] = p.Src.Addr().String()
			return
		}
	}
	j.end("nowhere", share)
}

// measure finds out what becomes of n connections. It waits longer where expected says that they are answered or refused.
func (s *scene) measure(n int, proto service.Protocol, from int, to netip.AddrPort, expected bool) fate {
	out := fate{Servers: map[string]string{}}
	for range n {
		server, client, err := s.Ask(from, proto, to, expected)
		v := "answered"
		switch {
		case errors.Is(err, kerneltest.ErrRefused):
			v = "refused"
		case errors.Is(err, kerneltest.ErrTimeout):
			v = "dropped"
		case err != nil:
			v = err.Error()
		default:
			out.Servers[server] = client
		}
		if out.Verdict != "" && out.Verdict != v {
			v = "maybe"
		}
		out.Verdict = v
	}
	return out
}

// differs compares what was predicted of a client's connection with what becomes of one.
func (s *scene) differs(predicted fate, to netip.AddrPort) string {
	return cmp.Diff(predicted, s.measure(1, service.TCP, 1, to, predicted.Verdict == "answered" || predicted.Verdict == "refused"))
}

// services are one of each kind; the numbers are the last of their addresses.
func (s *scene) services() *plan.Plan {
	verdict := func(v plan.Verdict) func(*plan.Frontend) { return func(f *plan.Frontend) { f.Verdict = v } }
	local := func(f *plan.Frontend) { f.Local, f.ShortCircuit, f.Masquerade = true, true, plan.MasqueradeNodeLocal }
	unlessPod := func(f *plan.Frontend) { f.Masquerade = plan.MasqueradeUnlessPod }
	ranges := func(p netip.Prefix) func(*plan.Frontend) {
		return func(f *plan.Frontend) { f.SourceRanges = []netip.Prefix{p} }
	}
	host := func(i int) netip.Prefix { return netip.PrefixFrom(s.Address(s.family, i), s.family.Bits()) }
	at := func(h int, weight uint32, isLocal bool) func(*plan.Service) {
		return kerneltest.Endpoint(netip.AddrPortFrom(s.Address(s.family, h), 8080).String(), weight, isLocal)
	}
	p := kerneltest.Plan(plan.ModeIPTables,
		kerneltest.Service("tcp", service.TCP, kerneltest.Cluster(s.virtual(1)), kerneltest.NodePort(30080), at(2, 1, false), at(3, 1, false), at(4, 1, false)),
		kerneltest.Service("udp", service.UDP, kerneltest.Cluster(s.virtual(1)), at(2, 1, false), at(3, 1, false)),
		kerneltest.Service("weighted", service.TCP, kerneltest.Cluster(s.virtual(2)), kerneltest.Algorithm(service.WeightedRoundRobin), at(2, 3, false), at(3, 1, false)),
		kerneltest.Service("external", service.TCP, kerneltest.External(s.virtual(3)), kerneltest.External(s.virtual(4), local), at(2, 1, true), at(3, 1, false)),
		kerneltest.Service("pods", service.TCP, kerneltest.Cluster(s.virtual(5), unlessPod), at(2, 1, false), at(3, 1, false)),
		kerneltest.Service("rejected", service.TCP, kerneltest.Cluster(s.virtual(6), verdict(plan.Reject)), kerneltest.NodePort(30081, verdict(plan.Reject))),
		kerneltest.Service("dropped", service.TCP, kerneltest.Cluster(s.virtual(7), verdict(plan.Drop))),
		kerneltest.Service("admitted", service.TCP, kerneltest.LoadBalancer(s.virtual(8), ranges(host(1))), at(2, 1, false)),
		kerneltest.Service("excluded", service.TCP, kerneltest.LoadBalancer(s.virtual(9), ranges(host(2))), at(2, 1, false)),
		kerneltest.Service("sticky", service.TCP, kerneltest.Cluster(s.virtual(10)), kerneltest.Affinity(time.Hour), at(2, 1, false), at(3, 1, false)),
	)
	p.Policy.PodCIDRs = []netip.Prefix{host(3)}
	return p
}

func (s *scene) virtual(last int) string {
	if s.family == service.IPv6 {
		return fmt.Sprintf("[fd00:96::%d]:80", last)
	}
	return fmt.Sprintf("10.96.0.%d:80", last)
}

// TestPredictsServices compares what the rules of every kind of service are
// found to do with what real packets meet.
func TestPredictsServices(t *testing.T) {
	onEachKernel(t, func(s *scene) {
		sets := s.program(s.services())
		run(s.t, fmt.Sprintf("%[1]s -P FORWARD DROP", s.variant.Program[s.family]))
		cases := []struct {
			proto service.Protocol
			to    string
			from  []int
		}{
			{service.TCP, s.virtual(1), []int{1, 3, 0}}, {service.UDP, s.virtual(1), []int{1, 0}}, {service.TCP, s.virtual(2), []int{1}},
			{service.TCP, s.virtual(3), []int{1, 3, 0}}, {service.TCP, s.virtual(4), []int{1, 3, 0}}, {service.TCP, s.virtual(5), []int{1, 3}},
			{service.TCP, s.virtual(6), []int{1, 0}}, {service.TCP, s.virtual(7), []int{1}}, {service.TCP, s.virtual(8), []int{1}},
			{service.TCP, s.virtual(9), []int{1}}, {service.TCP, s.nodePort(30080), []int{1, 0}}, {service.TCP, s.nodePort(30081), []int{1}},
			{service.TCP, s.virtual(10), []int{1}}, // the first decides: asked again below
		}
		for _, c := range cases {
			for _, from := range c.from {
				to := netip.MustParseAddrPort(c.to)
				want, sum := s.predict(s.read(), c.proto, from, to)
				if want.Verdict != "answered" && want.Verdict != "refused" && want.Verdict != "dropped" || sum < 1-1e-6 || sum > 1+1e-6 {
					s.t.Errorf("%s to %s from %d: predicted %+v, sum %v", c.proto, c.to, from, want, sum)
				}
				n := max(1, len(want.Servers)*2) // each has its turn
				if strings.HasSuffix(c.to, "0.2:80") || strings.HasSuffix(c.to, "::2]:80") {
					n = 4
				}
				got := s.measure(n, c.proto, from, to, want.Verdict != "dropped")
				if c.to == s.virtual(10) { // the first connection binds the client
					for server := range want.Servers {
						if _, ok := got.Servers[server]; !ok {
							delete(want.Servers, server)
						}
					}
				}
				if diff := cmp.Diff(want, got); diff != "" {
					s.t.Errorf("%s to %s from %d (-predicted +real):\n%s", c.proto, c.to, from, diff)
				}
			}
		}
		s.checkAffinity()
		s.checkRedirect(sets)
	})
}

func (s *scene) nodePort(n uint16) string {
	return netip.AddrPortFrom(s.NodeAddress(s.family, 1), n).String()
}

func (s *scene) read() *netfilter.Tables { return read(s.t, s.family, s.variant, s) }

// checkAffinity: a client that is in a set has one endpoint, and the set says for
// how long.
func (s *scene) checkAffinity() {
	s.t.Helper()
	to := netip.MustParseAddrPort(s.virtual(10))
	tables := s.read()
	want, _ := s.predict(tables, service.TCP, 1, to)
	if got := s.measure(2, service.TCP, 1, to, true); !cmp.Equal(want, got) || len(want.Servers) != 1 {
		s.t.Errorf("sticky: predicted %v, real %v", want, got)
	}
	if other, _ := s.predict(tables, service.TCP, 3, to); len(other.Servers) != 2 {
		s.t.Errorf("sticky: another client is predicted %v", other)
	}
	w := tables.Walk(netfilter.NewPacket(service.TCP, netip.AddrPortFrom(s.Address(s.family, 1), 40000), to, "host1"), netfilter.Prerouting, netfilter.Whole)
	i := slices.IndexFunc(w.Steps, func(st netfilter.Step) bool {
		return st.Matched == netfilter.Yes && strings.Contains(st.Text, "AFF-")
	})
	if i < 0 || !strings.Contains(w.Steps[i].Why, "expires in ") {
		s.t.Errorf("no step says for how long the client stays: %+v", w.Steps)
	}
	c := w.Choices()
	if len(c) != 1 || c[0].Probability != 1 || !c[0].Certain || c[0].Packets == nil || *c[0].Packets == 0 {
		s.t.Errorf("choices are %+v", c)
	}
}

// checkRedirect: while kproxy is alive, what is in its set is redirected.
func (s *scene) checkRedirect(sets *kernel.IPSets) {
	s.t.Helper()
	to := netip.MustParseAddrPort(s.virtual(1))
	user := kernel.FamilySet(kernel.SetUser, s.family)
	if err := sets.Add(kernel.Set{Name: user, Type: kernel.HashIPPort, Family: s.family}, 0, kernel.AddressEntry(service.TCP, to)); err != nil {
		s.t.Fatal(err)
	}
	if got, _ := s.predict(s.read(), service.TCP, 1, to); got.Verdict != "answered" {
		s.t.Errorf("not alive: predicted %v", got)
	}
	if err := (&steering.Redirects{Store: sets}).Alive(time.Hour); err != nil {
		s.t.Fatal(err)
	}
	if got, _ := s.predict(s.read(), service.TCP, 1, to); got.Verdict != "node" {
		s.t.Errorf("alive: predicted %v", got)
	}
	w := s.read().Walk(netfilter.NewPacket(service.TCP, netip.AddrPortFrom(s.Address(s.family, 1), 40000), to, "host1"), netfilter.Prerouting, netfilter.Whole)
	if c := w.Choices(); len(c) != 1 || !c[0].Redirect || c[0].To.Port() != 4001 || c[0].To.Addr() != steering.ListenerAddress[s.family] {
		s.t.Errorf("choices are %+v", c)
	}
}
