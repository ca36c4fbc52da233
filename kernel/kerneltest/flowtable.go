package kerneltest

import (
	"net/netip"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// row is what clients get at one kind of address of one service: outsiders, the
// node itself, the endpoint "two", a pod. "two:node three:pod" says that both
// endpoints answer, and whose address each sees.
type row struct {
	offer  string
	kind   plan.Kind
	expect [4]string
}

var clients = [4]int{outside, node, two, pod}

const (
	refused = "refused"
	silence = "no answer"
	nobody  = "refused or no answer"
	lost    = "sent on to the gateway" // as if it were no service's address
	// kept is what a node's own datagram meets, whether it is refused or dropped:
	// the kernel doesn't let it out (EPERM).
	kept = "not let out"
)

// masked is what clients get whose address is replaced; plain, whose isn't. A
// client that meets itself, and the node, always have the node's address.
var (
	masked = [4]string{"two:node three:node", "two:node three:node", "two:node three:node", "two:node three:node"}
	plain  = [4]string{"two:outside three:outside", "two:node three:node", "two:node three:two", "two:pod three:pod"}
	inside = [4]string{"two:node three:node", "two:node three:node", "two:node three:two", "two:pod three:pod"} // plain for pods only
)

// local is what a policy for endpoints on this node makes of both endpoints, and
// elsewhere, of one on another node.
var (
	local     = [4]string{"two:outside", "two:node three:node", "two:node three:two", "two:pod three:pod"}
	elsewhere = [4]string{silence, "three:node", "three:two", "three:pod"}
)

func all(s string) [4]string { return [4]string{s, s, s, s} }

// alone is what becomes of the local policies of external addresses where a data
// plane can't tell clients apart and no live kproxy serves those that a short
// circuit is for: everybody gets the endpoints on this node.
var alone = map[string][4]string{
	"local":     {"two:outside", "two:node", "two:node", "two:pod"},
	"elsewhere": all(silence),
}

// flowScene is a policy and what follows from it.
type flowScene struct {
	name     string
	policy   func(n *Network, p *plan.Policy)
	firewall bool // of the host's own, which drops what it doesn't know
	dead     bool // there is no live kproxy
	sctp     bool // over SCTP as well
	rows     []row
}

func pods(n *Network, p *plan.Policy) {
	for _, f := range service.Families {
		for _, i := range []int{two, three, pod} {
			p.PodCIDRs = append(p.PodCIDRs, netip.PrefixFrom(n.Address(f, i), f.Bits()))
		}
	}
}

// client is what plans know of host i as a client.
func (n *Network) client(f service.Family, i int) plan.Client {
	if i == node {
		return plan.Client{Address: n.NodeAddress(f, outside), Node: true}
	}
	return plan.Client{Address: n.Address(f, i), Interface: linkName(i)}
}

// podLink and podLinks tell pods by their interface: only the one that is called so.
func podLink(_ *Network, p *plan.Policy)  { p.PodBridge = linkName(pod) }
func podLinks(_ *Network, p *plan.Policy) { p.PodInterfacePrefix = linkName(pod) }

// rowsOfLinks are some of rowsOfAll where only "pod" is known to be one.
var rowsOfLinks = []row{
	{"both", plan.ClusterIP, [4]string{"two:node three:node", "two:node three:node", "two:node three:node", "two:pod three:pod"}},
	{"both", plan.NodePort, masked},
	{"local", plan.ClusterIP, [4]string{"two:node", "two:node", "two:node", "two:pod"}},
	{"local", plan.ExternalIP, [4]string{"two:outside", "two:node three:node", "two:node", "two:pod three:pod"}},
	{"local", plan.NodePort, [4]string{"two:outside", "two:node three:node", "two:node", "two:pod three:pod"}},
	{"elsewhere", plan.ClusterIP, all(silence)},
	{"elsewhere", plan.LoadBalancer, [4]string{silence, "three:node", silence, "three:pod"}},
	{"elsewhere", plan.NodePort, [4]string{silence, "three:node", silence, "three:pod"}},
}

// rowsOfAll has every offer at every kind of address where it matters.
var rowsOfAll = []row{
	{"both", plan.ClusterIP, inside},
	{"both", plan.ExternalIP, masked},
	{"both", plan.LoadBalancer, masked},
	{"both", plan.NodePort, masked},
	{"local", plan.ClusterIP, [4]string{"two:node", "two:node", "two:node", "two:pod"}},
	{"local", plan.ExternalIP, local},
	{"local", plan.LoadBalancer, local},
	{"local", plan.NodePort, local},
	{"elsewhere", plan.ClusterIP, all(silence)},
	{"elsewhere", plan.ExternalIP, elsewhere},
	{"elsewhere", plan.LoadBalancer, elsewhere},
	{"elsewhere", plan.NodePort, elsewhere},
	{"nothing", plan.ClusterIP, all(refused)},
	{"nothing", plan.ExternalIP, all(refused)},
	{"nothing", plan.LoadBalancer, all(refused)},
	{"nothing", plan.NodePort, all(refused)},
	{"ranged", plan.ClusterIP, [4]string{"two:node", "two:node", "two:node", "two:pod"}},
	{"ranged", plan.LoadBalancer, [4]string{"two:node", silence, silence, silence}},
	{"ranged", plan.NodePort, all("two:node")},
	{"node's range", plan.LoadBalancer, [4]string{silence, "two:node", silence, silence}},
	{"unready", plan.ClusterIP, [4]string{"two:node", "two:node", "two:node", "two:pod"}},
}

// flowScenes is the table that every mode must pass: kube-proxy's rules.
func flowScenes() []flowScene {
	return []flowScene{
		{name: "pods are known", policy: pods, sctp: true, rows: rowsOfAll},
		{name: "pods aren't known", policy: func(*Network, *plan.Policy) {}, rows: []row{
			{"both", plan.ClusterIP, plain},
			{"both", plan.NodePort, masked},
			{"local", plan.ClusterIP, [4]string{"two:outside", "two:node", "two:node", "two:pod"}},
			{"local", plan.LoadBalancer, [4]string{"two:outside", "two:node three:node", "two:node", "two:pod"}},
		}},
		{name: "pods come in on a bridge", policy: podLink, rows: rowsOfLinks},
		{name: "pods come in on links of a name", policy: podLinks, sctp: true, rows: rowsOfLinks},
		{name: "node ports answer on one address", policy: func(n *Network, p *plan.Policy) {
			pods(n, p)
			for _, f := range service.Families {
				a := n.NodeAddress(f, outside) // of the link to "outside"; the others use that of theirs
				p.NodePortNetworks = append(p.NodePortNetworks, netip.PrefixFrom(a, a.BitLen()-1))
			}
		}, rows: []row{
			{"both", plan.ClusterIP, inside},
			{"both", plan.NodePort, [4]string{"two:node three:node", "two:node three:node", refused, refused}},
			{"local", plan.NodePort, [4]string{"two:outside", "two:node three:node", refused, refused}},
			{"elsewhere", plan.NodePort, [4]string{silence, "three:node", refused, refused}},
			{"nothing", plan.NodePort, all(refused)},
		}},
		{name: "all are masqueraded", policy: func(n *Network, p *plan.Policy) { pods(n, p); p.MasqueradeAll = true }, rows: []row{
			{"both", plan.ClusterIP, masked},
			{"local", plan.ExternalIP, local},
		}},
		// As if the hosts up to "three" were in one network.
		{name: "endpoints would answer past the node", policy: func(_ *Network, p *plan.Policy) {
			p.Links = []netip.Prefix{netip.MustParsePrefix("10.0.0.0/14"), netip.MustParsePrefix("fd00::/30")}
		}, rows: []row{
			{"both", plan.ClusterIP, [4]string{"two:node three:node", "two:node three:node", "two:node three:node", "two:pod three:pod"}},
			{"local", plan.NodePort, [4]string{"two:node", "two:node three:node", "two:node", "two:pod"}},
		}},
		{name: "the host drops what it doesn't know", policy: pods, firewall: true, rows: []row{
			{"both", plan.ClusterIP, inside},
			{"both", plan.LoadBalancer, masked},
			{"both", plan.NodePort, masked},
			{"local", plan.ExternalIP, local},
		}},
		{name: "kproxy is dead", policy: pods, dead: true, rows: []row{
			{"both", plan.ClusterIP, inside},
			{"local", plan.ClusterIP, [4]string{"two:node", "two:node", "two:node", "two:pod"}},
			{"local", plan.LoadBalancer, local},
			{"local", plan.NodePort, local},
			{"elsewhere", plan.ExternalIP, elsewhere},
			{"nothing", plan.NodePort, all(refused)},
		}},
	}
}
