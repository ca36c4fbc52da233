package kerneltest

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"time"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// Walk is a random walk over plans: each is computed of services that differ
// from the ones before in a few, and sometimes under another policy. The same
// seed gives the same walk.
type Walk struct {
	rng    *rand.Rand
	mode   plan.Mode
	kernel plan.DataPlane
	wishes map[int]wish
	size   int
	policy plan.Policy
	// scheduler is for services that ask for none.
	scheduler string
}

// wish is a service port of a walk.
type wish struct {
	port      service.Port
	endpoints []service.Endpoint
	userspace bool // serves its new connections, if the kernel could too
}

// NewWalk returns a walk over plans of at most size services, on a host that has
// the kernel data plane named; in mode auto, iptables as well.
func NewWalk(seed uint64, mode plan.Mode, kernel plan.DataPlane, size int) *Walk {
	return &Walk{rng: rand.New(rand.NewPCG(seed, 1)), mode: mode, kernel: kernel, wishes: map[int]wish{}, size: size}
}

// Next takes a step.
func (w *Walk) Next() *plan.Plan {
	for range 1 + w.rng.IntN(w.size/2+1) {
		i := w.rng.IntN(w.size)
		if w.rng.IntN(4) == 0 {
			delete(w.wishes, i)
			continue
		}
		w.wishes[i] = w.wish(i)
	}
	if w.policy.Mode == "" || w.one(6) {
		w.policy = w.newPolicy()
	}
	var b service.Builder
	b.SetNode(service.Node{Name: here, Addresses: w.policy.NodeAddresses})
	for _, wish := range w.wishes {
		if err := b.AddPort(wish.port); err != nil {
			panic(err) // two of one name: a bug of the walk
		}
		for _, e := range wish.endpoints {
			b.AddEndpoint(wish.port.Key, e)
		}
	}
	has := []plan.DataPlane{w.kernel}
	if w.mode == plan.ModeAuto {
		has = append(has, plan.IPTables)
	}
	planes := Planes(has...)
	for i := range planes {
		if planes[i].Schedulers {
			planes[i].Scheduler = w.scheduler
		}
	}
	p, _ := plan.Compute(nil, plan.Inputs{Now: time.Unix(1e9, 0), Snapshot: b.Build(), Caps: plan.Caps{Planes: planes}, Policy: w.policy})
	for _, wish := range w.wishes {
		if s := p.Find(wish.port.Key); s.DataPlane == plan.Userspace && !wish.userspace && s.Kernel != plan.None {
			s.DataPlane = s.Kernel
		}
	}
	return p
}

// here is this node's name.
const here = "here"

func (w *Walk) one(n int) bool { return w.rng.IntN(n) == 0 }

func (w *Walk) newPolicy() plan.Policy {
	p := plan.DefaultPolicy()
	w.scheduler = ""
	p.Mode, p.MasqueradeAll = w.mode, w.one(8)
	switch w.rng.IntN(6) {
	case 0:
		p.PodBridge = "cni0"
	case 1:
		p.PodInterfacePrefix = "veth"
	case 2: // nothing tells pods
	default:
		p.PodCIDRs = []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("fd00:244::/64")}
	}
	p.NodeAddresses = []netip.Addr{netip.MustParseAddr("198.51.100.77"), netip.MustParseAddr("2001:db8:7::7")}
	// Some more, that are service addresses as well.
	for _, a := range []string{"198.51.100.78", "192.0.2.2", "192.0.2.4", "2001:db8:7::8", "2001:db8::4", "2001:db8::5"} {
		if w.one(2) {
			p.NodeAddresses = append(p.NodeAddresses, netip.MustParseAddr(a))
		}
	}
	slices.SortFunc(p.NodeAddresses, netip.Addr.Compare)
	if w.one(4) {
		p.NodePortNetworks = []netip.Prefix{netip.MustParsePrefix("198.51.100.0/24")}
		p.PrimaryNodePorts = w.one(2)
	}
	p.NoLocalhostNodePorts = w.one(8)
	if w.one(4) {
		p.ExcludeCIDRs = []netip.Prefix{netip.MustParsePrefix("10.244.0.0/22"), netip.MustParsePrefix("fd00:244::/118")}
	}
	if p.CloseClusterIPs = !w.one(4); !w.one(4) { // the second has pods in it
		p.ServiceCIDRs = []netip.Prefix{netip.MustParsePrefix("10.96.0.0/20"), netip.MustParsePrefix("10.240.0.0/12"), netip.MustParsePrefix("fd00:96::/112"), netip.MustParsePrefix("fd00:200::/24")}
	}
	if w.one(4) { // whose hosts would answer each other past the node
		p.Links = []netip.Prefix{netip.MustParsePrefix("10.244.0.0/20"), netip.MustParsePrefix("fd00:244::/120")}
	}
	if w.one(4) { // whose hosts' answers to each other only pass its rules
		p.BridgedLinks = []netip.Prefix{netip.MustParsePrefix("10.244.16.0/24"), netip.MustParsePrefix("fd00:244:0:1::/64")}
	}
	return p
}

// Taken is a virtual server for a foreigner to have: at the address of a service
// of every walk.
func Taken() kernel.Virtual {
	return kernel.Virtual{
		Protocol: service.TCP, Address: netip.MustParseAddrPort("10.96.0.1:80"), Scheduler: "lblc",
		Reals: []kernel.Real{{Address: netip.MustParseAddrPort("192.0.2.250:8080"), Weight: 7}},
	}
}

// wish makes the i-th service, different each time. Its addresses are nobody
// else's, but for the cluster IPs of some pairs.
func (w *Walk) wish(i int) wish {
	protocols := []service.Protocol{service.TCP, service.TCP, service.UDP, service.SCTP}
	p := service.Port{
		Key:       service.Key{Namespace: "default", Name: fmt.Sprintf("walk-%d", i), Protocol: protocols[i%len(protocols)]},
		Number:    80,
		Algorithm: service.Algorithms[w.rng.IntN(len(service.Algorithms))], AlgorithmGiven: true,
		InternalLocal: w.one(5), ExternalLocal: w.one(2),
	}
	if w.one(3) {
		p.Affinity = time.Duration(1+w.rng.IntN(3)) * time.Hour
	}
	if w.kernel == plan.IPVS && w.one(5) {
		w.scheduler = []string{"sed", "lblc", "wlc"}[w.rng.IntN(3)]
	}
	addresses := func(v4, v6 string) []netip.Addr {
		return []netip.Addr{netip.MustParseAddr(fmt.Sprintf(v4, i)), netip.MustParseAddr(fmt.Sprintf(v6, i))}
	}
	if p.ClusterIPs = addresses("10.96.0.%d", "fd00:96::%x"); i%4 == 3 { // another port of the Service before
		p.ClusterIPs, p.Number = []netip.Addr{p.ClusterIPs[0].Prev(), p.ClusterIPs[1].Prev()}, 81
	}
	if w.one(2) {
		p.LoadBalancerIPs = addresses("192.0.2.%d", "2001:db8::%x")
		if w.one(3) {
			p.SourceRanges = []netip.Prefix{netip.MustParsePrefix("198.51.100.0/26"), netip.MustParsePrefix("2001:db8:1::/48")}
		}
	}
	if w.one(3) {
		p.ExternalIPs = addresses("198.18.0.%d", "2001:db8:113::%x")
	}
	if w.one(2) {
		p.NodePort = uint16(30000 + i*5)
	}
	if p.ExternalLocal && p.LoadBalancerIPs != nil {
		p.HealthCheckNodePort = uint16(32000 + i%3) // which not everybody can have
	}
	p.ExternallyAccessible = p.NodePort != 0 || p.LoadBalancerIPs != nil || p.ExternalIPs != nil
	return wish{port: p, endpoints: w.endpoints(i), userspace: w.one(2)}
}

// endpoints gives the i-th service endpoints, out of few: those that a walk
// takes away come back.
func (w *Walk) endpoints(i int) []service.Endpoint {
	taken := map[int]bool{}
	for range w.rng.IntN(5) {
		taken[w.rng.IntN(8)] = true
	}
	var out []service.Endpoint
	for _, id := range slices.Sorted(maps.Keys(taken)) {
		for _, a := range []string{fmt.Sprintf("10.244.%d.%d:8080", i, id), fmt.Sprintf("[fd00:244::%x:%x]:8080", i, id)} {
			e := service.Endpoint{Address: netip.MustParseAddrPort(a), Node: "elsewhere", Ready: true, Serving: true, Weight: uint16(w.rng.IntN(4))}
			if id%3 == 0 {
				e.Node = here
			}
			switch w.rng.IntN(8) {
			case 0:
				e.Ready, e.Serving = false, false // not usable, but listed
			case 1:
				e.Ready, e.Terminating = false, true
			}
			out = append(out, e)
		}
	}
	return out
}
