package plan

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"kproxy.dev/kproxy/service"
)

var compareAddrs = cmp.Options{
	cmp.Comparer(func(a, b netip.Addr) bool { return a == b }),
	cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b }),
	cmp.Comparer(func(a, b netip.Prefix) bool { return a == b }),
}

// external makes a port of type NodePort with the policies given.
func external(p *service.Port) { p.NodePort, p.ExternallyAccessible = 30080, true }
func iTPLocal(p *service.Port) { p.InternalLocal = true }
func eTPLocal(p *service.Port) { p.ExternalLocal = true }

type selectTest struct {
	name           string
	port           []func(*service.Port)
	noZone, noName bool
	endpoints      []string
	cluster, local string
}

// selectTests cover what upstream's TestCategorizeEndpoints covers. The node
// is n1 in zone-a unless a case says otherwise. Endpoints are told by the last
// number of their address; "-" means that the group isn't used at all.
var selectTests = []selectTest{
	{name: "zone hints used", endpoints: []string{"10.0.0.1 n1 ready zone:zone-a", "10.0.0.2 n2 ready zone:zone-b", "10.0.0.3 n3 ready zone:zone-c", "10.0.0.4 n4 ready zone:zone-a"}, cluster: "1 4"},
	{name: "zone hints ignored: node has no zone", noZone: true, endpoints: []string{"10.0.0.1 n1 ready zone:zone-a", "10.0.0.2 n2 ready zone:zone-b"}, cluster: "1 2"},
	{name: "zone hints ignored: no endpoint for the zone", endpoints: []string{"10.0.0.1 n1 ready zone:zone-b", "10.0.0.2 n2 ready zone:zone-c"}, cluster: "1 2"},
	{name: "zone hints ignored: one has none", endpoints: []string{"10.0.0.1 n1 ready zone:zone-a", "10.0.0.2 n2 ready", "10.0.0.3 n3 ready zone:zone-b"}, cluster: "1 2 3"},
	{name: "zone hints ignored: only an unready endpoint in the zone", endpoints: []string{"10.0.0.1 n1 zone:zone-a", "10.0.0.2 n2 ready zone:zone-b"}, cluster: "2"},
	{name: "zone hints used although an unready endpoint has none", endpoints: []string{"10.0.0.1 n1 ready zone:zone-a", "10.0.0.2 n2", "10.0.0.3 n2 ready zone:zone-b"}, cluster: "1"},
	{name: "zone hints used, the unready in the zone left out", endpoints: []string{"10.0.0.1 n1 ready zone:zone-a", "10.0.0.2 n2 zone:zone-a", "10.0.0.3 n2 ready zone:zone-b"}, cluster: "1"},
	{name: "several zone hints on an endpoint", endpoints: []string{"10.0.0.1 n1 ready zone:zone-a,zone-b", "10.0.0.2 n2 ready zone:zone-b,zone-c", "10.0.0.3 n3 ready zone:zone-a,zone-c"}, cluster: "1 3"},
	{name: "no hints at all", endpoints: []string{"10.0.0.1 n1 ready", "10.0.0.2 n2 ready"}, cluster: "1 2"},
	{name: "node hints used", endpoints: []string{"10.0.0.1 n1 ready node:n1 zone:zone-a", "10.0.0.2 n2 ready node:n2 zone:zone-a"}, cluster: "1"},
	{name: "several node hints on an endpoint", endpoints: []string{"10.0.0.1 n2 ready node:n1,n2", "10.0.0.2 n3 ready node:n3"}, cluster: "1"},
	{name: "node hints fall back to zone: none for the node", endpoints: []string{"10.0.0.1 n2 ready node:n2 zone:zone-a", "10.0.0.2 n3 ready node:n3 zone:zone-b"}, cluster: "1"},
	{name: "node hints fall back to zone: one has none", endpoints: []string{"10.0.0.1 n1 ready node:n1 zone:zone-a", "10.0.0.2 n2 ready zone:zone-a", "10.0.0.3 n3 ready node:n3 zone:zone-b"}, cluster: "1 2"},
	{name: "node hints fall back to zone: that for the node isn't ready", endpoints: []string{"10.0.0.1 n1 node:n1 zone:zone-a", "10.0.0.2 n2 ready node:n2 zone:zone-a", "10.0.0.3 n3 ready node:n3 zone:zone-b"}, cluster: "2"},
	{name: "node hints fall back to all", endpoints: []string{"10.0.0.1 n2 ready node:n2", "10.0.0.2 n3 ready node:n3"}, cluster: "1 2"},
	{name: "node hints don't match a node without a name", noName: true, noZone: true, endpoints: []string{"10.0.0.1 ready node:n2", "10.0.0.2 n3 ready node:n3"}, cluster: "1 2"},

	{name: "internal Local ignores topology", port: []func(*service.Port){iTPLocal}, endpoints: []string{"10.0.0.1 n1 ready zone:zone-b", "10.0.0.2 n2 ready zone:zone-a"}, cluster: "-", local: "1"},
	{name: "external Local: cluster follows topology, local doesn't", port: []func(*service.Port){external, eTPLocal}, endpoints: []string{"10.0.0.1 n1 ready zone:zone-b", "10.0.0.2 n2 ready zone:zone-a"}, cluster: "2", local: "1"},
	{name: "internal Local, external Cluster with hints: union", port: []func(*service.Port){external, iTPLocal}, endpoints: []string{"10.0.0.1 n1 ready zone:zone-b", "10.0.0.2 n2 ready zone:zone-a", "10.0.0.3 n1 ready zone:zone-a"}, cluster: "2 3", local: "1 3"},

	{name: "both Cluster", port: []func(*service.Port){external}, endpoints: []string{"10.0.0.1 n1 ready", "10.0.0.2 n2 ready"}, cluster: "1 2", local: "-"},
	{name: "internal Local: some local", port: []func(*service.Port){iTPLocal}, endpoints: []string{"10.0.0.1 n1 ready", "10.0.0.2 n2 ready"}, cluster: "-", local: "1"},
	{name: "internal Local: none local", port: []func(*service.Port){iTPLocal}, endpoints: []string{"10.0.0.1 n3 ready", "10.0.0.2 n2 ready"}, cluster: "-", local: ""},
	{name: "internal Local: local unready", port: []func(*service.Port){iTPLocal}, endpoints: []string{"10.0.0.1 n1", "10.0.0.2 n2 ready"}, cluster: "-", local: ""},
	{name: "external Local: some local", port: []func(*service.Port){external, eTPLocal}, endpoints: []string{"10.0.0.1 n1 ready", "10.0.0.2 n2 ready"}, cluster: "1 2", local: "1"},
	{name: "external Local: none local", port: []func(*service.Port){external, eTPLocal}, endpoints: []string{"10.0.0.1 n3 ready", "10.0.0.2 n2 ready"}, cluster: "1 2", local: ""},
	{name: "both Local, externally accessible: cluster for the short circuit", port: []func(*service.Port){external, iTPLocal, eTPLocal}, endpoints: []string{"10.0.0.1 n1 ready", "10.0.0.2 n2 ready"}, cluster: "1 2", local: "1"},
	{name: "not externally accessible ignores external Local", port: []func(*service.Port){eTPLocal}, endpoints: []string{"10.0.0.1 n1 ready", "10.0.0.2 n2 ready"}, cluster: "1 2", local: "-"},
	{name: "not externally accessible, both Local", port: []func(*service.Port){eTPLocal, iTPLocal}, endpoints: []string{"10.0.0.1 n1 ready", "10.0.0.2 n2 ready"}, cluster: "-", local: "1"},

	{name: "Cluster: serving and terminating used when none is ready", endpoints: []string{"10.0.0.1 n1 serving terminating", "10.0.0.2 n2 serving terminating", "10.0.0.3 n3", "10.0.0.4 n2 terminating"}, cluster: "1 2"},
	{name: "Cluster: terminating left out when one is ready", endpoints: []string{"10.0.0.1 n1 serving terminating", "10.0.0.2 n2 ready"}, cluster: "2"},
	{name: "Cluster: fallback ignores topology", endpoints: []string{"10.0.0.1 n1 serving terminating zone:zone-b", "10.0.0.2 n2 serving terminating zone:zone-a"}, cluster: "1 2"},
	{name: "Cluster: serving alone isn't enough", endpoints: []string{"10.0.0.1 n1 serving"}, cluster: ""},
	{name: "internal Local: local terminating, remote ready", port: []func(*service.Port){iTPLocal}, endpoints: []string{"10.0.0.1 n1 serving terminating", "10.0.0.2 n2 ready"}, cluster: "-", local: "1"},
	{name: "internal Local: remote terminating only", port: []func(*service.Port){iTPLocal}, endpoints: []string{"10.0.0.2 n2 serving terminating"}, cluster: "-", local: ""},
	{name: "external Local: local terminating, remote ready", port: []func(*service.Port){external, eTPLocal}, endpoints: []string{"10.0.0.1 n1 serving terminating", "10.0.0.2 n2 ready"}, cluster: "2", local: "1"},
	{name: "external Local: all terminating", port: []func(*service.Port){external, eTPLocal}, endpoints: []string{"10.0.0.1 n1 serving terminating", "10.0.0.2 n2 serving terminating"}, cluster: "1 2", local: "1"},
	{name: "external Local: local ready, local terminating", port: []func(*service.Port){external, eTPLocal}, endpoints: []string{"10.0.0.1 n1 serving terminating", "10.0.0.3 n1 ready", "10.0.0.2 n2 ready"}, cluster: "2 3", local: "3"},
	{name: "publishNotReadyAddresses: ready and terminating is ready", endpoints: []string{"10.0.0.1 n1 ready terminating", "10.0.0.2 n2 serving terminating"}, cluster: "1"},

	{name: "no endpoints, Cluster", port: []func(*service.Port){external}, cluster: "", local: "-"},
	{name: "no endpoints, both Local", port: []func(*service.Port){external, iTPLocal, eTPLocal}, cluster: "", local: ""},
	{name: "all unready", port: []func(*service.Port){external, iTPLocal, eTPLocal}, endpoints: []string{"10.0.0.1 n1", "10.0.0.2 n2"}, cluster: "", local: ""},
	{name: "an endpoint without a node isn't local to a node without a name", port: []func(*service.Port){iTPLocal}, noName: true, endpoints: []string{"10.0.0.1 ready"}, cluster: "-", local: ""},
	{name: "the other family's hints don't count", endpoints: []string{"10.0.0.1 n1 ready zone:zone-a", "10.0.0.2 n2 ready zone:zone-b", "fd00::3 n3 ready"}, cluster: "1"},
}

func TestSelect(t *testing.T) {
	for _, tt := range selectTests {
		t.Run(tt.name, func(t *testing.T) {
			p := port("a", tt.port...)
			node := testNode
			if tt.noZone {
				node.Zone = ""
			}
			if tt.noName {
				node.Name = ""
			}
			var b service.Builder
			b.SetNode(node)
			b.AddPort(p)
			for _, e := range endpoints(tt.endpoints...) {
				b.AddEndpoint(p.Key, e)
			}
			in := Inputs{Now: t0, Snapshot: b.Build(), Caps: allCaps, Policy: DefaultPolicy()}
			got, _ := Compute(nil, in)
			checkPlan(t, &in, got)
			g := got.Services[0].Groups[service.IPv4]
			check := func(name, want string, backends []Backend) {
				if (want == "-" || want == "") && backends == nil {
					return
				}
				if names := lastNumbers(backends); names != want {
					t.Errorf("%s group is %q, want %q", name, names, want)
				}
			}
			check("cluster", tt.cluster, g.Cluster)
			check("local", tt.local, g.Local)
		})
	}
}

// lastNumbers returns the last part of each backend's address: "1 2 3".
func lastNumbers(backends []Backend) string {
	var out []string
	for _, b := range backends {
		a := b.Address.Addr().String()
		out = append(out, a[strings.LastIndexAny(a, ".:")+1:])
	}
	return strings.Join(out, " ")
}
