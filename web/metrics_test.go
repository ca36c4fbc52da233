package web

import (
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"kproxy.dev/kproxy/plan"
)

func TestMetrics(t *testing.T) {
	reg := prometheus.NewPedanticRegistry()
	NewMetrics(reg, metricsOf(shop()))
	want := `
# HELP kproxy_alive 1 while the heartbeat holds, so that new connections may come to userspace.
# TYPE kproxy_alive gauge
kproxy_alive 1
# HELP kproxy_endpoints Endpoints by health, usable or not.
# TYPE kproxy_endpoints gauge
kproxy_endpoints{health="down",usable="false"} 3
kproxy_endpoints{health="down",usable="true"} 0
kproxy_endpoints{health="unknown",usable="false"} 0
kproxy_endpoints{health="unknown",usable="true"} 0
kproxy_endpoints{health="up",usable="false"} 0
kproxy_endpoints{health="up",usable="true"} 3
# HELP kproxy_services Service ports by the data plane that carries their new connections.
# TYPE kproxy_services gauge
kproxy_services{dataplane="iptables"} 1
kproxy_services{dataplane="ipvs"} 0
kproxy_services{dataplane="none"} 0
kproxy_services{dataplane="userspace"} 2
# HELP kproxy_source_errors Problems in what a source holds now.
# TYPE kproxy_source_errors gauge
kproxy_source_errors{source="manifests"} 2
# HELP kproxy_service_connections_failed_total Connections that found no endpoint that answers.
# TYPE kproxy_service_connections_failed_total counter
kproxy_service_connections_failed_total{namespace="shop",port="",protocol="TCP",service="cart"} 2
kproxy_service_connections_failed_total{namespace="shop",port="http",protocol="TCP",service="web"} 2
kproxy_service_connections_failed_total{namespace="shop",port="http3",protocol="UDP",service="web"} 2
# HELP kproxy_sync_duration_seconds Duration of the last pass of the reconcile loop.
# TYPE kproxy_sync_duration_seconds gauge
kproxy_sync_duration_seconds 0.25
`
	names := []string{
		"kproxy_alive", "kproxy_endpoints", "kproxy_services", "kproxy_source_errors", "kproxy_sync_duration_seconds",
		"kproxy_service_connections_failed_total",
	}
	if err := testutil.GatherAndCompare(reg, strings.NewReader(want), names...); err != nil {
		t.Error(err)
	}
	if problems, err := testutil.GatherAndLint(reg); err != nil || len(problems) > 0 {
		t.Errorf("lint: %v %v", problems, err)
	}
}

// TestNamesThatOccurTwice: a folder given twice is one source, and what a host
// lacks in one place it lacks.
func TestNamesThatOccurTwice(t *testing.T) {
	src := shop()
	src.status.Sources = append(src.status.Sources, plan.SourceStatus{Name: "manifests", Error: "c.yaml:1: what"})
	src.status.Capabilities = append(src.status.Capabilities, plan.CapStatus{Name: "iptables"})
	reg := prometheus.NewPedanticRegistry()
	NewMetrics(reg, metricsOf(src))
	want := `
# HELP kproxy_capability 1 if this host can do it; the status says why not.
# TYPE kproxy_capability gauge
kproxy_capability{name="iptables"} 0
kproxy_capability{name="ipvs"} 0
# HELP kproxy_source_errors Problems in what a source holds now.
# TYPE kproxy_source_errors gauge
kproxy_source_errors{source="manifests"} 3
# HELP kproxy_source_synced 1 once a source has been read.
# TYPE kproxy_source_synced gauge
kproxy_source_synced{source="manifests"} 0
`
	if err := testutil.GatherAndCompare(reg, strings.NewReader(want), "kproxy_capability", "kproxy_source_errors", "kproxy_source_synced"); err != nil {
		t.Error(err)
	}
}

// metricsOf is what metrics of src need.
func metricsOf(src Source) MetricsConfig {
	return MetricsConfig{Source: src, Figures: kubeProxyFigures, Services: 500, Endpoints: 1000}
}
