package web

import (
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

func kubeProxyFigures() plan.Figures {
	rules := map[string]int{"nat": 30, "filter": 20, "mangle": 4}
	return plan.Figures{
		Queued: start, Synced: start, ServiceChanges: 7, EndpointChanges: 9, ServicesPending: 1, EndpointsPending: 2,
		NoLocalInternal: [2]int{1, 0}, NoLocalExternal: [2]int{0, 3}, Rules: [2]map[string]int{rules, rules},
		Sets: map[string]int{"KPROXY-USER-4": 3}, Written: [2]map[string]int{{"nat": 2}, {}}, RestoreFailures: [2]uint64{5, 0}, InvalidDropped: 11, ConntrackDeletions: [2]uint64{0, 13},
	}
}

func TestKubeProxyMetrics(t *testing.T) {
	reg := prometheus.NewPedanticRegistry()
	m := NewKubeProxyMetrics(reg, kubeProxyFigures)
	m.Synced(2 * time.Millisecond)
	m.Programmed(true, time.Second)
	m.Programmed(false, time.Second)
	m.Swept(time.Second)
	m.Reached(service.IPv6, time.Second)
	want := `
# HELP kubeproxy_conntrack_reconciler_deleted_entries_total Cumulative conntrack flows deleted by conntrack reconciler.
# TYPE kubeproxy_conntrack_reconciler_deleted_entries_total counter
kubeproxy_conntrack_reconciler_deleted_entries_total{ip_family="IPv4"} 0
kubeproxy_conntrack_reconciler_deleted_entries_total{ip_family="IPv6"} 13
# HELP kubeproxy_iptables_ct_state_invalid_dropped_packets_total Packets dropped by iptables to work around conntrack problems.
# TYPE kubeproxy_iptables_ct_state_invalid_dropped_packets_total counter
kubeproxy_iptables_ct_state_invalid_dropped_packets_total 11
# HELP kubeproxy_sync_proxy_rules_iptables_last Number of iptables rules written by kproxy in last sync.
# TYPE kubeproxy_sync_proxy_rules_iptables_last gauge
kubeproxy_sync_proxy_rules_iptables_last{ip_family="IPv4",table="nat"} 2
# HELP kubeproxy_sync_proxy_rules_last_timestamp_seconds The last time proxy rules were successfully synced.
# TYPE kubeproxy_sync_proxy_rules_last_timestamp_seconds gauge
kubeproxy_sync_proxy_rules_last_timestamp_seconds{ip_family="IPv4"} 1.767323045e+09
kubeproxy_sync_proxy_rules_last_timestamp_seconds{ip_family="IPv6"} 1.767323045e+09
# HELP kubeproxy_sync_proxy_rules_no_local_endpoints_total Number of services with a Local traffic policy and no endpoints.
# TYPE kubeproxy_sync_proxy_rules_no_local_endpoints_total gauge
kubeproxy_sync_proxy_rules_no_local_endpoints_total{ip_family="IPv4",traffic_policy="external"} 0
kubeproxy_sync_proxy_rules_no_local_endpoints_total{ip_family="IPv4",traffic_policy="internal"} 1
kubeproxy_sync_proxy_rules_no_local_endpoints_total{ip_family="IPv6",traffic_policy="external"} 3
kubeproxy_sync_proxy_rules_no_local_endpoints_total{ip_family="IPv6",traffic_policy="internal"} 0
`
	if err := testutil.GatherAndCompare(reg, strings.NewReader(want),
		"kubeproxy_conntrack_reconciler_deleted_entries_total", "kubeproxy_iptables_ct_state_invalid_dropped_packets_total",
		"kubeproxy_sync_proxy_rules_iptables_last", "kubeproxy_sync_proxy_rules_last_timestamp_seconds", "kubeproxy_sync_proxy_rules_no_local_endpoints_total"); err != nil {
		t.Error(err)
	}
	for _, name := range []string{"sync_proxy_rules", "sync_full_proxy_rules", "sync_partial_proxy_rules", "conntrack_reconciler_sync", "network_programming"} {
		if n, err := testutil.GatherAndCount(reg, "kubeproxy_"+name+"_duration_seconds"); err != nil || n != 2 {
			t.Errorf("%s: %d series, %v; want one for each family", name, n, err)
		}
	}
}

// TestKubeProxyMetricsAreDocumented: docs/metrics.md has a line for every metric
// with kube-proxy's name, with its labels, and no other; and everything that
// kube-proxy has is either there or among those that kproxy hasn't.
func TestKubeProxyMetricsAreDocumented(t *testing.T) {
	row := regexp.MustCompile("(?m)^- (no )?`kubeproxy_([a-z_]+)(?:\\{([a-z_, ]+)\\})?`: ")
	documented, absent := map[string]string{}, map[string]bool{}
	for _, m := range row.FindAllStringSubmatch(documentation(t), -1) {
		if m[1] == "" {
			documented[m[2]] = m[3]
		} else {
			absent[m[2]] = true
		}
	}
	reg := prometheus.NewRegistry()
	NewKubeProxyMetrics(reg, kubeProxyFigures)
	h := Health(shop(), reg)
	get(h, "/healthz")
	get(h, "/livez")
	exported := map[string]string{}
	for name, m := range gathered(t, reg) {
		exported[strings.TrimPrefix(name, "kubeproxy_")] = m.labels
	}
	if diff := cmp.Diff(documented, exported); diff != "" {
		t.Errorf("metrics (-documented +exported):\n%s", diff)
	}
	// Those of kube-proxy 1.36 on Linux (pkg/proxy/metrics).
	for _, name := range []string{
		"sync_proxy_rules_duration_seconds", "sync_full_proxy_rules_duration_seconds", "sync_partial_proxy_rules_duration_seconds",
		"sync_proxy_rules_last_timestamp_seconds", "sync_proxy_rules_last_queued_timestamp_seconds", "network_programming_duration_seconds",
		"sync_proxy_rules_endpoint_changes_pending", "sync_proxy_rules_endpoint_changes_total",
		"sync_proxy_rules_service_changes_pending", "sync_proxy_rules_service_changes_total",
		"sync_proxy_rules_iptables_restore_failures_total", "sync_proxy_rules_iptables_partial_restore_failures_total",
		"sync_proxy_rules_iptables_total", "sync_proxy_rules_iptables_last", "sync_proxy_rules_no_local_endpoints_total",
		"sync_proxy_rules_nftables_sync_failures_total", "sync_proxy_rules_nftables_cleanup_failures_total",
		"proxy_healthz_total", "proxy_livez_total", "iptables_ct_state_invalid_dropped_packets_total", "iptables_localhost_nodeports_accepted_packets_total",
		"conntrack_reconciler_sync_duration_seconds", "conntrack_reconciler_deleted_entries_total",
	} {
		if _, has := documented[name]; has == absent[name] {
			t.Errorf("kube-proxy's %s: want it in the list, as one that there is or as one that there isn't", name)
		}
	}
}
