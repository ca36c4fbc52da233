package web

import (
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"kproxy.dev/kproxy/plan"
)

func TestNodeMetrics(t *testing.T) {
	c := metricsOf(shop())
	c.Figures = func() plan.Figures {
		return plan.Figures{
			Sets: map[string]int{"KPROXY-AFF": 5, "KPROXY-USER-4": 7}, VirtualServers: [2]int{3, 2}, RealServers: [2]int{9, 4}, Draining: 1,
			Writes: plan.Writes{Chains: 2, Rules: 11, Entries: 13, Virtuals: 17}, PassFailures: 19, RuleFailures: 23, RuleRepairs: 29, SetRepairs: 31,
			Offloads: map[plan.Cause]uint64{plan.CauseQualified: 37},
			Recalls:  map[plan.Cause]uint64{plan.CauseRefused: 41, plan.CausePanic: 43}, CatchUps: 47,
			Conntrack: plan.Usage{Count: 53, Max: 59}, ConntrackOverflows: 61,
			Descriptors: [2]plan.Usage{{Count: 67, Max: 71}, {Count: 73, Max: 79}}, DescriptorWaits: [2]int{1, 0}, Steered: 83, Refused: 89,
			Exhausted: []plan.Resource{plan.Sessions}, Shed: [2][4]uint64{{83, 89, 97, 101}, {3: 103}},
		}
	}
	reg := prometheus.NewPedanticRegistry()
	NewMetrics(reg, c)
	text := get(API(APIConfig{Source: c.Source, Gatherer: reg}), "/metrics").Body.String()
	want := map[string]string{
		"kproxy_set_entries": `{set="KPROXY-AFF"} 5
{set="KPROXY-USER-4"} 7`,
		"kproxy_virtual_servers": `{ip_family="IPv4"} 3
{ip_family="IPv6"} 2`,
		"kproxy_real_servers": `{ip_family="IPv4"} 9
{ip_family="IPv6"} 4`,
		"kproxy_steered_packets_total": " 83",
		"kproxy_refused_packets_total": " 89",
		"kproxy_real_servers_draining": " 1",
		"kproxy_kernel_writes_total": `{object="chain"} 2
{object="rule"} 11
{object="set_entry"} 13
{object="virtual_server"} 17`,
		"kproxy_sync_failures_total": `{loop="portal"} 19
{loop="rules"} 23`,
		"kproxy_repairs_total": `{object="rules"} 29
{object="sets"} 31`,
		"kproxy_offloads_total": `{reason="pinned"} 0
{reason="qualified"} 37`,
		"kproxy_recalls_total": `{reason="connection-refused"} 41
{reason="endpoints-down"} 43
{reason="endpoints-flapping"} 0
{reason="kernel-cannot"} 0
{reason="pinned"} 0
{reason="rules-failed"} 0`,
		"kproxy_catch_ups_total":                 " 47",
		"kproxy_conntrack_entries":               " 53",
		"kproxy_conntrack_entries_limit":         " 59",
		"kproxy_conntrack_event_overflows_total": " 61",
		"kproxy_userspace_descriptors": `{protocol="TCP"} 67
{protocol="UDP"} 73`,
		"kproxy_userspace_descriptors_limit": `{protocol="TCP"} 71
{protocol="UDP"} 79`,
		"kproxy_userspace_descriptors_waiting": `{protocol="TCP"} 1
{protocol="UDP"} 0`,
		"kproxy_userspace_exhausted": `{resource="descriptors"} 0
{resource="memory"} 0
{resource="sessions"} 1`,
		"kproxy_userspace_shed_total": `{protocol="TCP",reason="client_share"} 89
{protocol="TCP",reason="idle"} 101
{protocol="TCP",reason="reset"} 83
{protocol="TCP",reason="service_share"} 97
{protocol="UDP",reason="client_share"} 0
{protocol="UDP",reason="idle"} 103
{protocol="UDP",reason="reset"} 0
{protocol="UDP",reason="service_share"} 0`,
	}
	all := make(chan prometheus.Metric, 1000)
	f := c.Figures()
	collectNode(&f, all)
	close(all)
	descs := map[string]bool{}
	for m := range all {
		descs[m.Desc().String()] = true
	}
	if len(want) != len(descs) {
		t.Errorf("%d metrics are tested of %d", len(want), len(descs))
	}
	for name, samples := range want {
		var got []string
		for line := range strings.Lines(text) {
			if sample, ok := strings.CutPrefix(line, name); ok && strings.ContainsAny(sample[:1], " {") {
				got = append(got, strings.TrimSuffix(sample, "\n"))
			}
		}
		if strings.Join(got, "\n") != samples {
			t.Errorf("%s:\n%s\nwant\n%s", name, strings.Join(got, "\n"), samples)
		}
	}
}
