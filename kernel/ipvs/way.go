package ipvs

import (
	"fmt"
	"net/netip"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// The chains of virtual servers. Some are in several tables.
const (
	chainVirtual = kernel.Prefix + "VIRTUAL" // connections to virtual servers
	chainVIP     = kernel.Prefix + "VIP"     // what else comes for addresses on [kernel.DummyLink]
	chainRefused = kernel.Prefix + "REFUSED" // endpoints' refusals, which IPVS is to see
	chainSwallow = kernel.Prefix + "SWALLOW" // and clients are not
)

// SyncGroup is where kproxy's synchronisation daemon of IPVS listens, by which
// clients keep their endpoints when a service moves to IPVS: a multicast group that
// doesn't leave the node (RFC 2365), on the loopback link. It tells the daemon from others'.
var SyncGroup = netip.MustParseAddrPort("239.255.75.80:8848")

// Way is the one of connections to virtual servers. For conntrack they aren't rewritten
// (no DNAT), so a mark of the connection tells them from the first packet on. IPVS takes
// packets on their way into the node and sends them on their way out; what this node's
// own programs may do is for the host to say, in every data plane.
var Way = steering.Waymaker{Plane: plan.IPVS, Make: func(s steering.Rules) steering.Way {
	endpoint := kernel.InSet(s.Set(kernel.SetEndpoint), "dst,dst,dst")
	w := steering.Way{
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
			kernel.NotInSet(s.Set(kernel.SetShort), "dst,dst") + " " + kernel.Comment("the traffic policy allows no endpoint here") + " -j DROP"},
		Refusals: []string{"-p tcp -m tcp --tcp-flags RST RST " + s.Accepted() + " -j " + chainRefused},
	}
	if s.Family == service.IPv4 {
		// A program that reached the daemon could lead connections anywhere.
		w.Input = []string{fmt.Sprintf("-d %s/32 -p udp %s -j DROP", SyncGroup.Addr(), kernel.Comment("only kproxy tells IPVS of clients"))}
	}
	return w
}}
