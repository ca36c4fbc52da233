package ipvs

import (
	"fmt"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// static renders the rules, which are the same whatever services there are. IPVS
// takes a packet behind the nat table's PREROUTING (at LOCAL_IN, after filter
// INPUT) or OUTPUT, and sends it through OUTPUT and POSTROUTING. Conntrack tracks
// it, but doesn't know it as rewritten (no DNAT status), so a mark of the
// connection says that it is to a virtual server.
type static struct {
	steering.Options
	family service.Family
	policy *plan.Policy
}

func (s static) set(base string) string { return kernel.FamilySet(base, s.family) }

func (s static) jumps() []kernel.Jump {
	if !s.CatchRefusals {
		return nil
	}
	rule := "-p tcp -m tcp --tcp-flags " + steering.ResetOfSYN + " " + kernel.Comment("kproxy: refusals of endpoints") + " -j " + chainSwallow
	return []kernel.Jump{
		{Table: "mangle", From: "INPUT", Rule: rule},
		{Table: "mangle", From: "POSTROUTING", Rule: rule},
	}
}

func (s static) chains() []kernel.Chain {
	chain := func(table, name string, rules ...string) kernel.Chain {
		return kernel.Chain{Table: table, Name: name, Rules: rules}
	}
	out := []kernel.Chain{
		chain("filter", chainVIP, s.vip()...),
		chain("filter", chainVirtual, s.letThrough()...),
		chain("nat", chainVirtual, s.virtual()...),
	}
	if s.CatchRefusals {
		out = append(out,
			chain("mangle", chainRefused, s.refused()...),
			chain("mangle", chainSwallow, s.swallow()))
	}
	return out
}

// virtual is the way of new connections that userspace doesn't get. Everything
// that a service asks for is an entry of a set. Node ports are found by their
// number; a service's own port of that number is at one of its addresses.
func (s static) virtual() []string {
	bit := s.Marks.Own()
	mark := " " + kernel.SetMark(s.Marks.Masquerade, s.Marks.Masquerade)
	const node = " -m addrtype --src-type LOCAL"
	every, self := " "+kernel.Comment("masquerade every client"), " "+kernel.Comment("masquerade this node itself")
	out := []string{
		kernel.NotInSet(s.set(kernel.SetVirtual), "dst,dst") + " -j RETURN",
		kernel.Comment("connections to virtual servers") + fmt.Sprintf(" -j CONNMARK --set-xmark %#x/%#x", bit, bit),
		kernel.InSet(s.set(kernel.SetMasqAll), "dst,dst") + every + mark,
		steering.OtherRule(s.policy, s.family, "masquerade clients outside the pod network", kernel.InSet(s.set(kernel.SetMasqNet), "dst,dst"), mark[1:]),
		kernel.InSet(s.set(kernel.SetMasqNode), "dst,dst") + node + self + mark,
	}
	atNode := " " + kernel.NotInSet(s.set(kernel.SetVIP), "dst") + " "
	for _, p := range []service.Protocol{service.TCP, service.UDP} {
		out = append(out,
			"-p "+p.String()+atNode+kernel.InSet(kernel.NodePortSet(kernel.SetMasqAll, p, s.family), "dst")+every+mark,
			"-p "+p.String()+atNode+kernel.InSet(kernel.NodePortSet(kernel.SetMasqNode, p, s.family), "dst")+node+self+mark)
	}
	return out
}

// letThrough accepts, where the host's policy is to drop, what the data plane
// iptables would: what is established, and what is masqueraded. Whether the
// node's own programs may begin a connection is for the host to say. What is left
// is accepted at the end of the built-in chains, unless a rule of the host
// drops it.
func (s static) letThrough() []string {
	m := s.Marks.Masquerade
	return []string{
		"-m conntrack --ctstate RELATED,ESTABLISHED " + kernel.Comment("connections that were let through") + " -j ACCEPT",
		kernel.HasMark(m, m) + " -m addrtype ! --src-type LOCAL " + kernel.Comment("to endpoints, masqueraded") + " -j ACCEPT",
	}
}

// vip refuses what comes for a service's address and isn't the service's: the
// address is local, and without this the node's own ports would be reachable
// there. Pings are answered; and load balancers may ask for the service's health.
// What is for a virtual server and isn't marked came while table nat was flushed: a
// client tries again, unless it is refused.
func (s static) vip() []string {
	icmp := [2]string{service.IPv4: "icmp", service.IPv6: "ipv6-icmp"}
	out := []string{
		"-m conntrack ! --ctstate NEW -j RETURN",
		s.Accepted() + " -j RETURN",
		"-p " + icmp[s.family] + " -j RETURN",
		"-p tcp " + kernel.InSet(kernel.NodePortSet(kernel.SetHealth, service.TCP, s.family), "dst") + " " + kernel.Comment("a load balancer asks for health") + " -j RETURN",
		kernel.InSet(s.set(kernel.SetVirtual), "dst,dst") + " " + kernel.Comment("table nat was flushed, the next packet passes") + " -j DROP",
	}
	if s.LogRefusals {
		out = append(out, kernel.LogRefusal(kernel.ReasonNoPort))
	}
	return append(out,
		"-p tcp "+kernel.Comment(kernel.ReasonNoPort)+" -j REJECT --reject-with tcp-reset",
		kernel.Comment(kernel.ReasonNoPort)+" -j REJECT --reject-with "+kernel.RejectWith[s.family])
}

// refused marks an endpoint's reset that is its first packet: it refuses the
// connection, as in kernel/iptables's rule for that. IPVS has to see it, so
// that it sends the client's next SYN to another real server
// (net.ipv4.vs.conn_reuse_mode), so it is dropped only after that; the bit that
// otherwise stands for masquerading means nothing on a reply.
func (s static) refused() (out []string) {
	for _, reset := range steering.FirstReset(s.family) {
		out = append(out, "-p tcp -m conntrack "+reset+" "+kernel.SetMark(s.Marks.Masquerade, s.Marks.Masquerade))
	}
	return out
}

// swallow drops it: on its way to a client, or before the node's own TCP has it.
// IPVS doesn't see the latter, which comes first; such a client's next SYN
// waits for the service's recall.
func (s static) swallow() string {
	return kernel.HasMark(s.Marks.Masquerade, s.Marks.Masquerade) + " " + s.Accepted() + " -m conntrack --ctdir REPLY -j DROP"
}

// The chains of virtual servers. Some are in several tables.
const (
	chainVirtual = kernel.Prefix + "VIRTUAL" // connections to virtual servers
	chainVIP     = kernel.Prefix + "VIP"     // what else comes for addresses on [kernel.DummyLink]
	chainRefused = kernel.Prefix + "REFUSED" // endpoints' refusals, which IPVS is to see
	chainSwallow = kernel.Prefix + "SWALLOW" // and clients are not
)

// InSteering tells steering of connections to virtual servers. For conntrack they aren't rewritten
// (no DNAT), so a mark of the connection tells them from the first packet on. IPVS takes
// packets on their way into the node and sends them on their way out; what this node's
// own programs may do is for the host to say, in every data plane.
var InSteering = steering.Plane{Name: plan.IPVS, Rules: func(s steering.Rules) steering.PlaneRules {
	endpoint := kernel.InSet(s.Set(kernel.SetEndpoint), "dst,dst,dst")
	w := steering.PlaneRules{
		Rewritten: s.Accepted(),
		Untaken:   " " + kernel.NotInSet(s.Set(kernel.SetVirtual), "dst,dst"),
		NotNode:   " " + kernel.NotInSet(s.Set(kernel.SetVIP), "dst"),
		Services:  []string{kernel.Comment("IPVS takes those to its virtual servers") + " -j " + chainVirtual},
		Postrouting: []string{kernel.InSet(s.Set(kernel.SetVIP), "src") + " " + endpoint + " " +
			kernel.Comment("this node takes a service address on its link as its own") + " " + kernel.SetMark(s.Marks.Masquerade, s.Marks.Masquerade)},
		Passing:  []string{s.Accepted() + " -j " + chainVirtual},
		AcceptIn: []string{"INPUT", "OUTPUT"},
		Accept:   []string{s.Accepted() + " -m addrtype ! --src-type LOCAL -j ACCEPT"},
		InputNew: []string{kernel.InSet(s.Set(kernel.SetVIP), "dst") + " -j " + chainVIP},
		// IPVS takes what this node sends before the filter table sees it
		// (ip_vs_local_request at LOCAL_OUT, before NF_IP_PRI_FILTER), and refuses it where a
		// virtual server is left to endpoints that drain. What is in SHORT is userspace's.
		OutputNew: []string{kernel.InSet(s.Set(kernel.SetVIP), "dst") + " " + kernel.InSet(s.Set(kernel.SetDrop), "dst,dst") + " " +
			kernel.NotInSet(s.Set(kernel.SetShort), "dst,dst") + " " + kernel.Comment(kernel.ReasonElsewhere) + " -j " + steering.ChainElsewhere},
		Refusals: []string{"-p tcp -m tcp --tcp-flags " + steering.ResetOfSYN + " " + s.Accepted() + " -j " + chainRefused},
	}
	return w
}}
