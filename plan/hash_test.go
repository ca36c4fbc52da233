package plan

import (
	"net/netip"
	"reflect"
	"slices"
	"testing"
	"time"

	"kproxy.dev/kproxy/health"
	"kproxy.dev/kproxy/service"
)

// TestKernelHashOfIPVS: what IPVS depends on besides.
func TestKernelHashOfIPVS(t *testing.T) {
	balancer := func(p *service.Port) {
		p.NodePort, p.ExternallyAccessible = 30080, true
		p.LoadBalancerIPs = addrs("203.0.113.1")
	}
	local := addrs("192.168.0.1", "fd00:1::1")
	nodeAddresses := func(to ...string) func(*world) {
		return func(w *world) { w.in.Policy.NodeAddresses = addrs(to...) }
	}
	tests := []struct {
		name   string
		change func(*world)
		// whether it changes the hash on IPVS, and on iptables
		ipvs, iptables bool
	}{
		{"nothing", program0, false, false},
		{"an endpoint that isn't ready", setTo("10.0.0.1 n1 ready", "10.0.0.2 n2 ready", "10.0.0.3 n1"), true, false},
		{"one of weight 0", setTo("10.0.0.1 n1 ready", "10.0.0.2 n2 ready weight:0"), true, true},
		{"weights of round robin", setTo("10.0.0.1 n1 ready", "10.0.0.2 n2 ready weight:2"), false, false},
		{"a scheduler", change(scheduler("wlc")), true, false},
		{"the scheduler it has", change(scheduler("rr")), false, false},
		{"the policy's scheduler", defaultScheduler("sed"), true, false},
		{"a scheduler that nobody uses is missing", unusable(map[string]string{"mh": "gone"}), false, false},
		{"a node address of the family", nodeAddresses("10.9.9.9", "192.168.0.1", "fd00:1::1"), true, false},
		{"a node address of the other family", nodeAddresses("192.168.0.1", "fd00:1::1", "fd00:1::2"), false, false},
		{"a service address becomes the node's own", nodeAddresses("192.168.0.1", "203.0.113.1", "fd00:1::1"), true, false},
	}
	for _, tt := range tests {
		for _, mode := range []Mode{ModeIPVS, ModeIPTables} {
			t.Run(tt.name+"/"+string(mode), func(t *testing.T) {
				w := newWorld(t)
				in(mode)(w)
				w.in.Policy.NodeAddresses = local
				w.set(port("a", balancer), "10.0.0.1 n1 ready", "10.0.0.2 n2 ready")
				before := w.one().KernelHash
				tt.change(w)
				want := tt.iptables
				if mode == ModeIPVS {
					want = tt.ipvs
				}
				if after := w.one().KernelHash; (after != before) != want {
					t.Errorf("hash changed: %v, want %v", after != before, want)
				}
			})
		}
	}
}

// TestKernelHashWithoutNodePort: node addresses are no concern of a service
// that has neither a node port nor one of them.
func TestKernelHashWithoutNodePort(t *testing.T) {
	w := newWorld(t)
	in(ModeIPVS)(w)
	w.set(port("a"), "10.0.0.1 n1 ready")
	before := w.one().KernelHash
	w.in.Policy.NodeAddresses = addrs("192.168.0.1")
	if w.one().KernelHash != before {
		t.Error("hash changed")
	}
}

// TestKernelHashOfUnusable: an endpoint that isn't usable counts with its node,
// because those of a Local group are kept on this node only.
func TestKernelHashOfUnusable(t *testing.T) {
	w := newWorld(t)
	in(ModeIPVS)(w)
	w.set(port("a"), "10.0.0.1 n1 ready", "10.0.0.2 n2")
	before := w.one().KernelHash
	setTo("10.0.0.1 n1 ready", "10.0.0.2 n1")(w)
	if w.one().KernelHash == before {
		t.Error("hash stays")
	}
}

// TestKernelHash: the hash changes with everything that rules are made of, and
// with nothing else.
func TestKernelHash(t *testing.T) {
	balancer := func(p *service.Port) {
		p.NodePort, p.ExternallyAccessible = 30080, true
		p.ClusterIPs = addrs("10.96.0.1", "fd96::1")
		p.ExternalIPs, p.LoadBalancerIPs = addrs("198.51.100.1"), addrs("203.0.113.1")
		p.SourceRanges = prefixes("198.51.100.0/24")
		p.ExternalLocal = true
		p.Algorithm = service.WeightedRoundRobin
	}
	eps := []string{"10.0.0.1 n1 ready", "10.0.0.2 n2 ready", "fd00::1 n1 ready"}
	begin := func(t *testing.T) (*world, uint64) {
		w := newWorld(t)
		w.in.Policy.PodCIDRs = prefixes("10.0.0.0/16")
		w.set(port("a", balancer), eps...)
		return w, w.one().KernelHash
	}
	tests := []struct {
		name    string
		change  func(*world)
		changes bool
	}{
		{"nothing", program0, false},
		{"time", func(w *world) { w.in.Now = w.in.Now.Add(time.Hour) }, false},
		{"the line where it was read", change(func(p *service.Port) { p.Source = "shop.yaml:7" }), false},
		{"offload", func(w *world) { w.in.Now = w.in.Now.Add(time.Hour); carry(5)(w); w.program() }, false},
		{"pin", pinTo(service.PreferUserspace), false},
		{"forwarding", forward(false, false), false},
		{"a first success of a probe", func(w *world) { w.health("a", "10.0.0.1", health.Up, w.in.Now) }, false},
		{"an endpoint that isn't ready", setTo(append([]string{"10.0.0.3 n1"}, eps...)...), false},
		{"userspace settings", change(func(p *service.Port) { p.ConnectTimeout, p.Retries, p.Prefer = time.Second, 7, service.PreferKernel }), false},
		{"another service", func(w *world) {
			w.set(port("b", func(p *service.Port) { p.ClusterIPs = addrs("10.96.0.9") }), "10.0.0.9 n1 ready")
		}, false},

		{"an endpoint is down", func(w *world) { w.health("a", "10.0.0.1", health.Down, w.in.Now) }, true},
		{"an endpoint more", setTo(append([]string{"10.0.0.3 n1 ready"}, eps...)...), true},
		{"a weight", setTo(append([]string{"10.0.0.1 n1 ready weight:2"}, eps[1:]...)...), true},
		{"an endpoint's node", setTo(append([]string{"10.0.0.1 n2 ready"}, eps[1:]...)...), true},
		{"cluster address", change(func(p *service.Port) { p.ClusterIPs = addrs("10.96.0.2", "fd96::1") }), true},
		{"external address", change(func(p *service.Port) { p.ExternalIPs = nil }), true},
		{"external address becomes one of a load balancer", change(func(p *service.Port) { p.ExternalIPs, p.LoadBalancerIPs = nil, addrs("198.51.100.1", "203.0.113.1") }), true},
		{"port number", change(func(p *service.Port) { p.Number = 81 }), true},
		{"node port", change(func(p *service.Port) { p.NodePort = 30081 }), true},
		{"source ranges", change(func(p *service.Port) { p.SourceRanges = nil }), true},
		{"external policy", change(func(p *service.Port) { p.ExternalLocal = false }), true},
		{"internal policy", change(func(p *service.Port) { p.InternalLocal = true }), true},
		{"affinity", change(func(p *service.Port) { p.Affinity = time.Hour }), true},
		{"algorithm", change(func(p *service.Port) { p.Algorithm = service.Random }), true},
		{"masquerade all", func(w *world) { w.in.Policy.MasqueradeAll = true }, true},
		{"pod CIDRs", func(w *world) { w.in.Policy.PodCIDRs = prefixes("10.0.0.0/17") }, true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			w, before := begin(t)
			tt.change(w)
			if after := w.compute().Services[0].KernelHash; (after != before) != tt.changes {
				t.Errorf("hash changed: %v, want %v", after != before, tt.changes)
			}
		})
	}
}

// TestKernelHashKnowsEveryField: of what renderers are given, each field either changes the hash, or is
// named here with what stands for it. A new field has to be one or the other.
func TestKernelHashKnowsEveryField(t *testing.T) {
	frontends, groups, userspace, decides := "in Frontends", "in Groups", "userspace's", "decides about the data plane only"
	without := map[string]string{
		"Port.Created": "decides who gets an address", "Port.Number": frontends, "Port.NodePort": frontends, "Port.ClusterIPs": frontends, "Port.ExternalIPs": frontends,
		"Port.LoadBalancerIPs": frontends, "Port.SourceRanges": frontends, "Port.ExternallyAccessible": frontends, "Port.InternalLocal": frontends, "Port.ExternalLocal": frontends,
		"Port.HealthCheckNodePort": "the agent's", "Port.Scheduler": "in Service.Scheduler", "Port.Prefer": decides, "Port.Health": groups, "Port.ProxyProtocol": decides,
		"Port.ConnectTimeout": userspace, "Port.Retries": userspace, "Port.IdleTimeout": userspace, "Port.Responses": userspace, "Port.Problems": "for people", "Port.Source": "for people",

		"Policy.Mode": decides, "Policy.OffloadAfter": decides, "Policy.OffloadMinConnections": decides, "Policy.DrainedBy": decides, "Policy.BackoffMax": decides, "Policy.FlapLimit": decides,
		"Policy.NodePodCIDRs": "in PodCIDRs", "Policy.ExcludeCIDRs": "in Endpoints",
		"Policy.CloseClusterIPs": "of rules that all services share", "Policy.ServiceCIDRs": "of rules that all services share",
	}
	for _, f := range []string{"NodePortNetworks", "PrimaryNodePorts", "NoLocalhostNodePorts", "Links", "BridgedLinks", "NoStandIns", "NodeAddresses"} {
		without["Policy."+f] = "of rules that all services share; see localAddresses"
	}
	hash := func(change func(*Service, *Policy)) uint64 {
		w := newWorld(t)
		in(ModeIPVS)(w)
		w.set(port("a"), "10.0.0.1 n1 ready", "10.0.0.2 n2 ready")
		s := *w.one()
		p, copied := w.in.Policy, *s.Port
		s.Port, s.Frontends = &copied, slices.Clone(s.Frontends)
		s.Groups[0].Cluster = slices.Clone(s.Groups[0].Cluster)
		change(&s, &p)
		return kernelHash(&s, &p, &Abilities{Drains: true})
	}
	before := hash(func(*Service, *Policy) {})
	for name, value := range map[string]func(*Service, *Policy) any{
		"Port":     func(s *Service, _ *Policy) any { return s.Port },
		"Policy":   func(_ *Service, p *Policy) any { return p },
		"Frontend": func(s *Service, _ *Policy) any { return &s.Frontends[0] },
		"Backend":  func(s *Service, _ *Policy) any { return &s.Groups[0].Cluster[0] },
	} {
		var fields []string
		hash(func(s *Service, p *Policy) {
			for _, f := range reflect.VisibleFields(reflect.TypeOf(value(s, p)).Elem()) {
				if len(f.Index) == 1 {
					fields = append(fields, f.Name)
				}
			}
		})
		for _, field := range fields {
			changed := hash(func(s *Service, p *Policy) { vary(t, reflect.ValueOf(value(s, p)).Elem().FieldByName(field)) }) != before
			_, listed := without[name+"."+field]
			if delete(without, name+"."+field); changed == listed {
				t.Errorf("%s.%s changes the hash: %v, and is listed as what doesn't: %v", name, field, changed, listed)
			}
		}
	}
	for field := range without {
		t.Errorf("there is no %s", field)
	}
}

// vary gives a field another value.
func vary(t *testing.T, v reflect.Value) {
	switch x := v.Addr().Interface().(type) {
	case *service.Key:
		x.Namespace += "x"
	case *netip.AddrPort:
		*x = netip.MustParseAddrPort("192.0.2.99:99")
	case *[]netip.Prefix:
		*x = append(slices.Clone(*x), netip.MustParsePrefix("192.0.2.0/24"))
	case *[]netip.Addr:
		*x = append(slices.Clone(*x), netip.MustParseAddr("192.0.2.99"))
	case *[]string:
		*x = append(slices.Clone(*x), "x")
	case *time.Time:
		*x = x.Add(time.Hour)
	case *service.HealthCheck, *service.ProxyProtocol, *service.Preference:
	default:
		switch v.Kind() {
		case reflect.Bool:
			v.SetBool(!v.Bool())
		case reflect.String:
			v.SetString(v.String() + "x")
		case reflect.Int, reflect.Int64, reflect.Int32:
			v.SetInt(v.Int() + 1)
		case reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
			v.SetUint(v.Uint() + 1)
		default:
			t.Fatalf("how is a %T varied?", x)
		}
	}
}
