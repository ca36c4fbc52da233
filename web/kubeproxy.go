package web

import (
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// KubeProxyMetrics are kube-proxy's metrics, under its names, where kproxy has
// what they mean. docs/metrics.md says of each what that is, and which there
// aren't. It is safe for concurrent use.
//
// kube-proxy has a proxier per address family; one pass of kproxy programs both, so
// metrics that measure a pass are the same for both families.
type KubeProxyMetrics struct {
	figures func() plan.Figures

	passes, full, partial, sweeps, reached *prometheus.HistogramVec
}

// ipFamilies are kube-proxy's labels, in the order of service.Families.
var ipFamilies = [2]string{"IPv4", "IPv6"}

// NewKubeProxyMetrics returns the metrics of figures, registered with reg.
func NewKubeProxyMetrics(reg prometheus.Registerer, figures func() plan.Figures) *KubeProxyMetrics {
	of := func(buckets []float64, name, help string) *prometheus.HistogramVec {
		v := prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "kubeproxy_" + name, Help: help, Buckets: buckets,
		}, []string{"ip_family"})
		for _, f := range ipFamilies {
			v.WithLabelValues(f)
		}
		reg.MustRegister(v)
		return v
	}
	histogram := func(name, help string) *prometheus.HistogramVec {
		return of(prometheus.ExponentialBuckets(0.001, 2, 15), name, help) // kube-proxy's
	}
	m := &KubeProxyMetrics{
		figures: figures,
		passes:  histogram("sync_proxy_rules_duration_seconds", "SyncProxyRules latency in seconds. One pass is for both address families."),
		full:    histogram("sync_full_proxy_rules_duration_seconds", "SyncProxyRules latency in seconds for full resyncs: rules were changed after all had been read back."),
		partial: histogram("sync_partial_proxy_rules_duration_seconds", "SyncProxyRules latency in seconds for partial resyncs: what differs was changed."),
		reached: of(programmingBuckets(), "network_programming_duration_seconds", "In Cluster Network Programming Latency in seconds: from a change of a pod until it took effect here."),
		sweeps:  histogram("conntrack_reconciler_sync_duration_seconds", "ReconcileConntrackFlowsLatency latency in seconds. One look is at both address families."),
	}
	reg.MustRegister(m)
	return m
}

// Synced records how long a pass took that took effect.
func (m *KubeProxyMetrics) Synced(d time.Duration) { observe(m.passes, d) }

// Programmed records how long a change of the kernel's rules took.
func (m *KubeProxyMetrics) Programmed(full bool, d time.Duration) {
	if full {
		observe(m.full, d)
	} else {
		observe(m.partial, d)
	}
}

// programmingBuckets are kube-proxy's: from a quarter of a second to five
// minutes, finest where a cluster in good order is.
func programmingBuckets() []float64 {
	return slices.Concat(
		prometheus.LinearBuckets(0.25, 0.25, 2), prometheus.LinearBuckets(1, 1, 59),
		prometheus.LinearBuckets(60, 5, 12), prometheus.LinearBuckets(120, 30, 7))
}

// Reached records how long a change in the cluster took to take effect here.
func (m *KubeProxyMetrics) Reached(f service.Family, d time.Duration) {
	m.reached.WithLabelValues(ipFamilies[f]).Observe(d.Seconds())
}

// Swept records how long a cleanup of stale conntrack entries took.
func (m *KubeProxyMetrics) Swept(d time.Duration) { observe(m.sweeps, d) }

func observe(v *prometheus.HistogramVec, d time.Duration) {
	for _, f := range ipFamilies {
		v.WithLabelValues(f).Observe(d.Seconds())
	}
}

// Describe implements prometheus.Collector; see Metrics.Describe.
func (m *KubeProxyMetrics) Describe(chan<- *prometheus.Desc) {}

// Collect implements prometheus.Collector.
func (m *KubeProxyMetrics) Collect(ch chan<- prometheus.Metric) {
	send := sender(ch)
	f := m.figures()
	send.counter("kubeproxy_sync_proxy_rules_endpoint_changes_total", "Cumulative proxy rules Endpoint changes.", float64(f.EndpointChanges))
	send.gauge("kubeproxy_sync_proxy_rules_endpoint_changes_pending", "Pending proxy rules Endpoint changes.", float64(f.EndpointsPending))
	send.counter("kubeproxy_sync_proxy_rules_service_changes_total", "Cumulative proxy rules Service changes.", float64(f.ServiceChanges))
	send.gauge("kubeproxy_sync_proxy_rules_service_changes_pending", "Pending proxy rules Service changes.", float64(f.ServicesPending))
	send.counter("kubeproxy_iptables_ct_state_invalid_dropped_packets_total", "Packets dropped by iptables to work around conntrack problems.", float64(f.InvalidDropped))
	for i, family := range ipFamilies {
		if !f.Queued.IsZero() {
			send.gauge("kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds", "The last time a sync of proxy rules was queued.", seconds(f.Queued), "ip_family", family)
		}
		if !f.Synced.IsZero() {
			send.gauge("kubeproxy_sync_proxy_rules_last_timestamp_seconds", "The last time proxy rules were successfully synced.", seconds(f.Synced), "ip_family", family)
		}
		send.gauge("kubeproxy_sync_proxy_rules_no_local_endpoints_total", "Number of services with a Local traffic policy and no endpoints.", float64(f.NoLocalInternal[i]), "traffic_policy", "internal", "ip_family", family)
		send.gauge("kubeproxy_sync_proxy_rules_no_local_endpoints_total", "Number of services with a Local traffic policy and no endpoints.", float64(f.NoLocalExternal[i]), "traffic_policy", "external", "ip_family", family)
		for table, n := range f.Rules[i] {
			send.gauge("kubeproxy_sync_proxy_rules_iptables_total", "Total number of iptables rules owned by kproxy.", float64(n), "table", table, "ip_family", family)
		}
		for table, n := range f.Written[i] {
			send.gauge("kubeproxy_sync_proxy_rules_iptables_last", "Number of iptables rules written by kproxy in last sync.", float64(n), "table", table, "ip_family", family)
		}
		send.counter("kubeproxy_sync_proxy_rules_iptables_restore_failures_total", "Cumulative proxy iptables restore failures.", float64(f.RestoreFailures[i]), "ip_family", family)
		send.counter("kubeproxy_conntrack_reconciler_deleted_entries_total", "Cumulative conntrack flows deleted by conntrack reconciler.", float64(f.ConntrackDeletions[i]), "ip_family", family)
	}
}

func seconds(t time.Time) float64 { return float64(t.UnixNano()) / 1e9 }
