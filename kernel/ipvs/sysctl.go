package ipvs

import "kproxy.dev/kproxy/kernel"

// Sysctls lists the kernel settings that IPVS is to have, beside those of
// [kernel.Sysctls]. Release is the kernel's ("6.1.0-56-amd64"). StrictARP makes
// the node answer ARP for addresses of the link that was asked only, as load
// balancers on the same network need that announce service addresses themselves.
func Sysctls(release string, strictARP bool) []kernel.Sysctl {
	out := []kernel.Sysctl{
		// Without it IPVS takes its packets past conntrack (ip_vs_update_conntrack):
		// no masquerading, no marks, and nothing to count or list flows by.
		{Name: "net.ipv4.vs.conntrack", Value: "1", Reason: "flows of virtual servers are masqueraded, marked and counted by conntrack"},
		reuse(release),
		// The next packet of a flow whose real server is gone ends it, and a UDP flow
		// goes to another one with the one after (ip_vs_in).
		{Name: "net.ipv4.vs.expire_nodest_conn", Value: "1", Reason: "flows to endpoints that are gone end, instead of vanishing until they time out"},
		// Else clients with affinity stay with a real server of weight 0 for ever
		// (ip_vs_check_template).
		{Name: "net.ipv4.vs.expire_quiescent_template", Value: "1", Reason: "clients with affinity leave an endpoint that drains"},
	}
	if strictARP {
		const why = "other nodes' service addresses on " + kernel.DummyLink + " aren't announced on the network (strict ARP)"
		out = append(out,
			kernel.Sysctl{Name: "net.ipv4.conf.all.arp_ignore", Value: "1", Reason: why},
			kernel.Sysctl{Name: "net.ipv4.conf.all.arp_announce", Value: "2", Reason: why})
	}
	return out
}

// reuse decides what becomes of a client's port that comes again while IPVS
// remembers the connection before. With 1 it is scheduled anew, so that a client
// isn't bound to a real server that is gone (kubernetes/kubernetes#81775). Before
// Linux 5.9 (f0a5e4d7a594) that took a second for a SYN to be sent again where
// conntrack is on.
func reuse(release string) kernel.Sysctl {
	s := kernel.Sysctl{Name: "net.ipv4.vs.conn_reuse_mode", Value: "1", Reason: "a client's port that comes again may go to another endpoint"}
	if kernel.OlderThan(release, 5, 9) {
		s.Value, s.Reason = "0", "a client's port that comes again isn't delayed by a second, as this kernel does otherwise"
	}
	return s
}
