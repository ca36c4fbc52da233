package web

import (
	"slices"

	"github.com/prometheus/client_golang/prometheus"

	"kproxy.dev/kproxy/plan"
)

// What kproxy has in the kernel and does there, beyond kube-proxy's metrics.
var (
	syncFailures = desc("kproxy_sync_failures_total", "Passes that failed: of the loop that decides and updates the redirect sets, or of the one that programs rules.", "loop")
	repairs      = desc("kproxy_repairs_total", "Times that somebody else had changed what is kproxy's in the kernel.", "object")
	writes       = desc("kproxy_kernel_writes_total", "Objects written into the kernel or deleted from it: rules in chains that were written, entries of sets, virtual and real servers.", "object")
	setEntries   = desc("kproxy_set_entries", "Entries of kproxy's ipsets; KPROXY-AFF stands for all sets of session affinity.", "set")
	steered      = desc("kproxy_steered_packets_total", "Packets that began a connection and that rules sent to userspace.")
	refused      = desc("kproxy_refused_packets_total", "Packets that rules refused, to services without a usable endpoint.")

	virtualServers = desc("kproxy_virtual_servers", "Virtual servers of IPVS that are kproxy's.", "ip_family")
	realServers    = desc("kproxy_real_servers", "Real servers of IPVS that get new connections.", "ip_family")
	realDraining   = desc("kproxy_real_servers_draining", "Real servers of IPVS that only keep the connections they have.")

	offloads = desc("kproxy_offloads_total", "Moves of service ports from userspace into the kernel, by reason.", "reason")
	recalls  = desc("kproxy_recalls_total", "Moves of service ports from the kernel back to userspace, by reason.", "reason")
	catchUps = desc("kproxy_catch_ups_total", "Times that userspace stood in for a service port until the kernel's rules had followed a change.")

	conntrackEntries   = desc("kproxy_conntrack_entries", "Entries in this network namespace's conntrack table.")
	conntrackLimit     = desc("kproxy_conntrack_entries_limit", "Entries that the conntrack table can hold.")
	conntrackOverflows = desc("kproxy_conntrack_event_overflows_total", "Times that flows ended faster than they could be counted.")

	descriptors        = desc("kproxy_userspace_descriptors", "File descriptors that forwarding in userspace uses.", "protocol")
	descriptorsLimit   = desc("kproxy_userspace_descriptors_limit", "File descriptors that forwarding in userspace may use.", "protocol")
	descriptorsWaiting = desc("kproxy_userspace_descriptors_waiting", "Listeners that accept no connection until a file descriptor is free.", "protocol")
	exhausted          = desc("kproxy_userspace_exhausted", "1 while forwarding in userspace lacks room: clients wait, are refused, or others end for them.", "resource")
	shed               = desc("kproxy_userspace_shed_total", "Connections and sessions in userspace that had to end to make room for others, by reason.", "protocol", "reason")
)

func collectNode(f *plan.Figures, send sender) {
	send.counter(syncFailures, float64(f.PassFailures), "portal")
	send.counter(syncFailures, float64(f.RuleFailures), "rules")
	send.counter(repairs, float64(f.SetRepairs), "sets")
	send.counter(repairs, float64(f.RuleRepairs), "rules")
	send.counter(writes, float64(f.Writes.Chains), "chain")
	send.counter(writes, float64(f.Writes.Rules), "rule")
	send.counter(writes, float64(f.Writes.Entries), "set_entry")
	send.counter(writes, float64(f.Writes.Virtuals), "virtual_server")
	for name, n := range f.Sets {
		send.gauge(setEntries, float64(n), name)
	}
	send.counter(steered, float64(f.Steered))
	send.counter(refused, float64(f.Refused))
	for i, family := range ipFamilies {
		send.gauge(virtualServers, float64(f.VirtualServers[i]), family)
		send.gauge(realServers, float64(f.RealServers[i]), family)
	}
	send.gauge(realDraining, float64(f.Draining))
	byCause(send, offloads, f.Offloads, plan.OffloadCauses)
	byCause(send, recalls, f.Recalls, plan.RecallCauses)
	send.counter(catchUps, float64(f.CatchUps))
	send.gauge(conntrackEntries, float64(f.Conntrack.Count))
	send.gauge(conntrackLimit, float64(f.Conntrack.Max))
	send.counter(conntrackOverflows, float64(f.ConntrackOverflows))
	for i, protocol := range []string{"TCP", "UDP"} {
		send.gauge(descriptors, float64(f.Descriptors[i].Count), protocol)
		send.gauge(descriptorsLimit, float64(f.Descriptors[i].Max), protocol)
		send.gauge(descriptorsWaiting, float64(f.DescriptorWaits[i]), protocol)
		for r, n := range f.Shed[i] {
			send.counter(shed, float64(n), protocol, plan.ShedReasons[r])
		}
	}
	for _, r := range plan.Resources {
		send.gauge(exhausted, number(slices.Contains(f.Exhausted, r)), string(r))
	}
}

// byCause sends a counter for every cause there was, and for the usual ones also
// before: a series that begins with 1 has no increase.
func byCause(send sender, d *prometheus.Desc, counts map[plan.Cause]uint64, usual []plan.Cause) {
	for _, c := range plan.Causes {
		if n, ok := counts[c]; ok || slices.Contains(usual, c) {
			send.counter(d, float64(n), string(c))
		}
	}
}
