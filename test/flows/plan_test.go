package flows

import (
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/source/file"
	"kproxy.dev/kproxy/test/kerneltest"
)

// network is one that nobody has to build.
var network = &Network{
	Endpoints: map[string][]netip.Addr{
		"here": addresses("10.2.0.2", "fd00:2::2"), "here2": addresses("10.2.0.3", "fd00:2::3"), "there": addresses("10.2.0.4", "fd00:2::4"),
	},
	TargetPorts: [2]uint16{9000, 9001},
	Node:        addresses("10.1.0.1", "fd00:1::1"),
	Outside:     addresses("10.1.0.2", "fd00:1::2"),
	Pods:        []netip.Prefix{netip.MustParsePrefix("10.2.0.0/24"), netip.MustParsePrefix("fd00:2::/64")},
}

// clients are the addresses of clients that are no endpoints.
var clients = map[From][]netip.Addr{
	Pod: addresses("10.2.0.9", "fd00:2::9"), Node: network.Node, Localhost: addresses("127.0.0.1", "::1"), Outside: network.Outside,
}

func addresses(in ...string) (out []netip.Addr) {
	for _, s := range in {
		out = append(out, netip.MustParseAddr(s))
	}
	return out
}

// podInterface is what the pod's packets come in on.
const podInterface = "b4"

var kinds = map[Kind]plan.Kind{
	ClusterIP: plan.ClusterIP, NodePort: plan.NodePort, ExternalIP: plan.ExternalIP, LoadBalancer: plan.LoadBalancer,
}

// TestPlan checks every flow of the matrix against what [plan.Compute] decides,
// in every mode.
func TestPlan(t *testing.T) {
	m := load(t)
	for _, c := range m.Configurations {
		flows, err := m.Flows(c)
		if err != nil {
			t.Fatal(err)
		}
		snapshot := snapshotOf(t, m, c)
		for _, mode := range []plan.Mode{plan.ModeUserspace, plan.ModeIPTables, plan.ModeIPVS, plan.ModeAuto} {
			t.Run(c.Name+"/"+string(mode), func(t *testing.T) {
				in := plan.Inputs{Snapshot: snapshot, Policy: policyOf(c, mode)}
				in.Caps.Planes = kerneltest.Planes(plan.IPVS, plan.IPTables)
				p, _ := plan.Compute(nil, in)
				for _, f := range m.ToNowhere() {
					checkNowhere(t, p, &f)
				}
				for i := range flows {
					for _, protocol := range flows[i].Service.Protocols() {
						checkFlow(t, p, &flows[i], protocol)
					}
				}
			})
		}
	}
}

// snapshotOf reads the manifests as kproxy does.
func snapshotOf(t *testing.T, m *Matrix, c Configuration) *service.Snapshot {
	t.Helper()
	manifests, err := m.Manifests(c, network)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "flows.yaml")
	if err := os.WriteFile(path, manifests, 0o644); err != nil {
		t.Fatal(err)
	}
	snapshot, problems, err := file.Load([]string{path}, ThisNode)
	if err != nil || len(problems) > 0 {
		t.Fatalf("manifests: %v %v", err, problems)
	}
	return snapshot
}

func policyOf(c Configuration, mode plan.Mode) plan.Policy {
	p := plan.DefaultPolicy()
	p.Mode, p.MasqueradeAll, p.NodeAddresses = mode, c.MasqueradeAll, slices.Clone(network.Node)
	p.CloseClusterIPs, p.ServiceCIDRs = true, []netip.Prefix{lab.ServiceCIDR4, lab.ServiceCIDR6}
	if c.OwnNodePorts {
		p.NodePortNetworks = network.nodeNetworks()
	}
	switch c.Detector {
	case ClusterCIDR:
		p.PodCIDRs = network.Pods
	case InterfacePrefix:
		p.PodInterfacePrefix = podInterface[:1]
	case Bridge:
		p.PodBridge = podInterface
	}
	return p
}

// checkNowhere checks that the plan has the cluster IP, but not by that port, or that the address is in a network that it
// closes, but for no pod.
func checkNowhere(t *testing.T, p *plan.Plan, f *Flow) {
	t.Helper()
	clusterIP := false
	for _, s := range p.Services {
		clusterIP = clusterIP || slices.Contains(s.Port.ClusterIPs, f.Nowhere.Addr())
		if slices.ContainsFunc(s.Frontends, func(x plan.Frontend) bool { return x.Address == f.Nowhere }) {
			t.Errorf("%s, but %s has it", f, s.Port.Key)
		}
	}
	closed, but := p.Policy.Closed(f.Family)
	in := func(list []netip.Prefix) bool {
		return slices.ContainsFunc(list, func(n netip.Prefix) bool { return n.Contains(f.Nowhere.Addr()) })
	}
	if got := map[bool]Verdict{true: Refuse, false: Drop}[clusterIP]; got != f.Want.Verdict || !clusterIP && (!in(closed) || in(but)) {
		t.Errorf("%s: a cluster IP: %v, closed %v but %v; want that it is a %s", f, clusterIP, closed, but, f.Want.Verdict)
	}
}

func checkFlow(t *testing.T, p *plan.Plan, flow *Flow, protocol service.Protocol) {
	t.Helper()
	name := portName(protocol, flow.Port)
	s := p.Find(service.Key{Namespace: "default", Name: flow.Service.Name, Port: name, Protocol: protocol})
	if s == nil {
		t.Fatalf("service %s isn't in the plan", flow.Service.Name)
	}
	at := slices.IndexFunc(s.Frontends, func(f plan.Frontend) bool { return f.Kind == kinds[flow.Kind] && f.Family == flow.Family })
	if at < 0 {
		t.Fatalf("%s, %s: no such frontend", protocol, flow)
	}
	f := &s.Frontends[at]
	client := plan.Client{Address: clients[flow.From][flow.Family], Node: flow.From == Node || flow.From == Localhost}
	if flow.From == Pod {
		client.Interface = podInterface
	}
	if affinity := flow.Service.Special == Affinity; (s.Port.Affinity > 0) != affinity {
		t.Errorf("%s, %s: affinity %v, want %v", protocol, flow, s.Port.Affinity, affinity)
	}
	if flow.Left {
		if p.Policy.AnswersNodePorts(client.Address) {
			t.Errorf("%s, %s: node ports answer at %s, want it left to the host", protocol, flow, client.Address)
		}
		return
	}
	want := flow.In(p.Policy.Mode)
	if diff := cmp.Diff(want, outcomeOf(s, f, client, &p.Policy, flow)); diff != "" {
		t.Errorf("%s, %s (-want +got):\n%s", protocol, flow, diff)
	}
	if want.Verdict != Serve || client.Node {
		return // what the node sends has its address anyway
	}
	for _, b := range s.Backends(f, client, &p.Policy) {
		if got := f.Masquerades(client, b.Address.Addr(), &p.Policy); got != (flow.Source == AsNode) {
			t.Errorf("%s, %s: %s is reached masqueraded: %v, want the source to be the %s's", protocol, flow, b.Address, got, flow.Source)
		}
	}
}

// outcomeOf returns what the plan decides for a client.
func outcomeOf(s *plan.Service, f *plan.Frontend, c plan.Client, p *plan.Policy, flow *Flow) Outcome {
	switch s.VerdictFor(f, c, p) {
	case plan.Reject:
		return Outcome{Verdict: Refuse}
	case plan.Drop:
		return Outcome{Verdict: Drop}
	}
	out := Outcome{Verdict: Serve}
	for _, b := range s.Backends(f, c, p) {
		for _, name := range EndpointNames {
			target := network.TargetPorts[flow.Service.Target(name, flow.Port)]
			if netip.AddrPortFrom(network.Endpoints[name][f.Family], target) == b.Address {
				out.Endpoints = append(out.Endpoints, name)
			}
		}
	}
	return out
}
