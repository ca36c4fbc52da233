package e2e

import (
	"bufio"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"kproxy.dev/kproxy/service"
)

// metrics are the samples of /metrics, as they are printed.
func (w *world) metrics() (map[string]float64, error) {
	resp, err := w.net.Node.HTTPClient(within(5 * time.Second)).Get("http://127.0.0.1:10249/metrics")
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	out := map[string]float64{}
	lines := bufio.NewScanner(resp.Body)
	for lines.Scan() {
		line := lines.Text()
		if at := strings.LastIndex(line, " "); at > 0 && !strings.HasPrefix(line, "#") { // labels may have spaces
			if out[line[:at]], err = strconv.ParseFloat(line[at+1:], 64); err != nil {
				return nil, err
			}
		}
	}
	return out, lines.Err()
}

// metric waits until a metric is as it should be.
func (w *world) metric(name string, right func(float64) bool) {
	w.Helper()
	w.eventually(20*time.Second, "metric "+name, func() error {
		m, err := w.metrics()
		if v, ok := m[name]; err == nil && (!ok || !right(v)) {
			err = fmt.Errorf("there %v, %g", ok, v)
		}
		return err
	})
}

// TestKubeProxyMetrics: what kube-proxy's dashboards look at follows what happens.
func TestKubeProxyMetrics(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	m.InternalLocal = true
	w.must(m.Write(w.manifests))
	w.start()
	positive := func(v float64) bool { return v > 0 }
	is := func(want float64) func(float64) bool { return func(v float64) bool { return v == want } }
	w.pin("web", "line", service.PreferKernel)
	w.metric(`kubeproxy_sync_proxy_rules_duration_seconds_count{ip_family="IPv6"}`, positive)
	w.metric(`kubeproxy_sync_proxy_rules_last_timestamp_seconds{ip_family="IPv4"}`, positive)
	w.metric(`kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds{ip_family="IPv4"}`, positive)
	w.metric(`kubeproxy_sync_proxy_rules_iptables_total{ip_family="IPv4",table="filter"}`, positive)
	w.metric(`kubeproxy_sync_proxy_rules_iptables_total{ip_family="IPv6",table="nat"}`, positive)
	w.metric("kubeproxy_sync_proxy_rules_service_changes_total", is(1))
	w.metric("kubeproxy_sync_proxy_rules_endpoint_changes_total", is(1))
	w.metric("kubeproxy_sync_proxy_rules_service_changes_pending", is(0))
	w.metric(`kubeproxy_sync_proxy_rules_no_local_endpoints_total{ip_family="IPv4",traffic_policy="internal"}`, is(0))
	for i := range m.Endpoints {
		m.Endpoints[i].Node = "another"
	}
	w.must(m.Write(w.manifests))
	w.metric(`kubeproxy_sync_proxy_rules_no_local_endpoints_total{ip_family="IPv4",traffic_policy="internal"}`, is(3)) // its ports
	w.metric("kubeproxy_sync_proxy_rules_service_changes_total", is(1))
	w.metric("kubeproxy_sync_proxy_rules_endpoint_changes_total", is(2))
	w.metric("kubeproxy_sync_proxy_rules_endpoint_changes_pending", is(0))
	w.metric(`kubeproxy_sync_proxy_rules_iptables_restore_failures_total{ip_family="IPv4"}`, is(0))
}
