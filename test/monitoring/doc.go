// Package monitoring tests what deploy/monitoring has for Prometheus and Grafana.
// Whether a live kproxy exports what is asked for there, and as it should be, is
// tested with real packets (test/e2e, TestMetricsAreInOrder).
package monitoring
