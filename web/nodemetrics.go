package web

import (
	"slices"

	"kproxy.dev/kproxy/plan"
)

// collectNode sends what kproxy has in the kernel and does there, beyond kube-proxy's metrics.
func collectNode(f *plan.Figures, send sender) {
	for loop, n := range map[string]uint64{"portal": f.PassFailures, "rules": f.RuleFailures} {
		send.counter("kproxy_sync_failures_total", "Passes that failed: of the loop that decides and updates the redirect sets, or of the one that programs rules.", float64(n), "loop", loop)
	}
	for object, n := range map[string]uint64{"sets": f.SetRepairs, "rules": f.RuleRepairs} {
		send.counter("kproxy_repairs_total", "Times that somebody else had changed what is kproxy's in the kernel.", float64(n), "object", object)
	}
	for object, n := range map[string]uint64{"chain": f.Writes.Chains, "rule": f.Writes.Rules, "set_entry": f.Writes.Entries, "virtual_server": f.Writes.Virtuals} {
		send.counter("kproxy_kernel_writes_total", "Objects written into the kernel or deleted from it: rules in chains that were written, entries of sets, virtual and real servers.", float64(n), "object", object)
	}
	for name, n := range f.Sets {
		send.gauge("kproxy_set_entries", "Entries of kproxy's ipsets; KPROXY-AFF stands for all sets of session affinity.", float64(n), "set", name)
	}
	send.counter("kproxy_steered_packets_total", "Packets that began a connection and that rules sent to userspace.", float64(f.Steered))
	send.counter("kproxy_refused_packets_total", "Packets that rules refused, to services without a usable endpoint.", float64(f.Refused))
	for i, family := range ipFamilies {
		send.gauge("kproxy_virtual_servers", "Virtual servers of IPVS that are kproxy's.", float64(f.VirtualServers[i]), "ip_family", family)
		send.gauge("kproxy_real_servers", "Real servers of IPVS that get new connections.", float64(f.RealServers[i]), "ip_family", family)
	}
	send.gauge("kproxy_real_servers_draining", "Real servers of IPVS that only keep the connections they have.", float64(f.Draining))
	byCause(send, "kproxy_offloads_total", "Moves of service ports from userspace into the kernel, by reason.", f.Offloads, plan.OffloadCauses)
	byCause(send, "kproxy_recalls_total", "Moves of service ports from the kernel back to userspace, by reason.", f.Recalls, plan.RecallCauses)
	send.counter("kproxy_catch_ups_total", "Times that userspace stood in for a service port until the kernel's rules had followed a change.", float64(f.CatchUps))
	send.gauge("kproxy_conntrack_entries", "Entries in this network namespace's conntrack table.", float64(f.Conntrack.Count))
	send.gauge("kproxy_conntrack_entries_limit", "Entries that the conntrack table can hold.", float64(f.Conntrack.Max))
	send.counter("kproxy_conntrack_event_overflows_total", "Times that flows ended faster than they could be counted.", float64(f.ConntrackOverflows))
	for i, protocol := range []string{"TCP", "UDP"} {
		send.gauge("kproxy_userspace_descriptors", "File descriptors that forwarding in userspace uses.", float64(f.Descriptors[i].Count), "protocol", protocol)
		send.gauge("kproxy_userspace_descriptors_limit", "File descriptors that forwarding in userspace may use.", float64(f.Descriptors[i].Max), "protocol", protocol)
		send.gauge("kproxy_userspace_descriptors_waiting", "Listeners that accept no connection until a file descriptor is free.", float64(f.DescriptorWaits[i]), "protocol", protocol)
		for r, n := range f.Shed[i] {
			send.counter("kproxy_userspace_shed_total", "Connections and sessions in userspace that had to end to make room for others, by reason.", float64(n), "protocol", protocol, "reason", plan.ShedReasons[r])
		}
	}
	for _, r := range plan.Resources {
		send.gauge("kproxy_userspace_exhausted", "1 while forwarding in userspace lacks room: clients wait, are refused, or others end for them.", number(slices.Contains(f.Exhausted, r)), "resource", string(r))
	}
}

// byCause sends a counter for every cause there was, and for the usual ones also
// before: a series that begins with 1 has no increase.
func byCause(send sender, name, help string, counts map[plan.Cause]uint64, usual []plan.Cause) {
	for _, c := range plan.Causes {
		if n, ok := counts[c]; ok || slices.Contains(usual, c) {
			send.counter(name, help, float64(n), "reason", string(c))
		}
	}
}
