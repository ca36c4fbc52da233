package web

import (
	"github.com/prometheus/client_golang/prometheus"

	"kproxy.dev/kproxy/plan"
)

// maxSeries bounds how many service ports have series of their own. The rest
// share one, with namespace, service and port "other": 10,000 services must not
// make 60,000 series on every node of a cluster.
const maxSeries = 500

var serviceLabels = []string{"namespace", "service", "port", "protocol"}

// serviceMetrics are the per-service metrics, in every data plane.
var serviceMetrics = []struct {
	desc  *prometheus.Desc
	value func(plan.Connections) float64
}{
	{desc("kproxy_service_connections_total", "Connections and sessions established.", serviceLabels...),
		func(c plan.Connections) float64 { return float64(c.Total) }},
	{desc("kproxy_service_connections_failed_total", "Connections that found no endpoint that answers.", serviceLabels...),
		func(c plan.Connections) float64 { return float64(c.Failed) }},
	{desc("kproxy_service_connections_retried_total", "Further endpoints tried for a connection.", serviceLabels...),
		func(c plan.Connections) float64 { return float64(c.Retried) }},
	{desc("kproxy_service_received_bytes_total", "Bytes from clients to endpoints.", serviceLabels...),
		func(c plan.Connections) float64 { return float64(c.BytesIn) }},
	{desc("kproxy_service_sent_bytes_total", "Bytes from endpoints to clients.", serviceLabels...),
		func(c plan.Connections) float64 { return float64(c.BytesOut) }},
}

var activeDesc = desc("kproxy_service_connections_active", "Connections and sessions alive now.", serviceLabels...)

func describeServices(ch chan<- *prometheus.Desc) {
	for _, m := range serviceMetrics {
		ch <- m.desc
	}
	ch <- activeDesc
}

// seriesKey is the labels of a service port.
type seriesKey struct{ namespace, name, port, protocol string }

var otherServices = seriesKey{"other", "other", "other", "other"}

// serviceSeries decides which service ports have their own series. A port keeps
// what it got for as long as it exists, and the shared counters only ever grow
// by what was added since the last scrape, so no counter runs backwards when
// services come and go. The zero value is ready to use.
type serviceSeries struct {
	own    map[seriesKey]bool             // ports with series of their own
	folded map[seriesKey]plan.Connections // last figures of the ports that share
	other  plan.Connections               // what the shared series show
}

func (t *serviceSeries) collect(services []plan.ServiceStatus, ch chan<- prometheus.Metric) {
	t.assign(services)
	t.other.Active = 0
	for i := range services {
		s := &services[i]
		k := keyOf(s)
		if t.own[k] {
			emit(ch, k, s.Connections)
			continue
		}
		t.fold(k, s.Connections)
	}
	if len(t.folded) > 0 || t.other.Total > 0 {
		emit(ch, otherServices, t.other)
	}
}

// assign forgets ports that are gone and gives free series to new ones.
func (t *serviceSeries) assign(services []plan.ServiceStatus) {
	present := make(map[seriesKey]bool, len(services))
	for i := range services {
		present[keyOf(&services[i])] = true
	}
	if t.own == nil {
		t.own, t.folded = map[seriesKey]bool{}, map[seriesKey]plan.Connections{}
	}
	for k := range t.own {
		if !present[k] {
			delete(t.own, k)
		}
	}
	for k := range t.folded {
		if !present[k] {
			delete(t.folded, k)
		}
	}
	for i := range services {
		k := keyOf(&services[i])
		_, shares := t.folded[k]
		if !t.own[k] && !shares && len(t.own) < maxSeries {
			t.own[k] = true
		}
	}
}

// fold adds what a sharing port did since the last scrape.
func (t *serviceSeries) fold(k seriesKey, now plan.Connections) {
	last := t.folded[k]
	t.folded[k] = now
	t.other.Active += now.Active
	t.other.Total += grown(last.Total, now.Total)
	t.other.Failed += grown(last.Failed, now.Failed)
	t.other.Retried += grown(last.Retried, now.Retried)
	t.other.BytesIn += grown(last.BytesIn, now.BytesIn)
	t.other.BytesOut += grown(last.BytesOut, now.BytesOut)
}

// grown is the growth of a counter; one that fell began anew (the service was
// deleted and created between two scrapes).
func grown(last, now uint64) uint64 {
	if now < last {
		return now
	}
	return now - last
}

func keyOf(s *plan.ServiceStatus) seriesKey {
	return seriesKey{s.Namespace, s.Name, s.Port, s.Protocol}
}

func emit(ch chan<- prometheus.Metric, k seriesKey, c plan.Connections) {
	labels := []string{k.namespace, k.name, k.port, k.protocol}
	for _, m := range serviceMetrics {
		ch <- prometheus.MustNewConstMetric(m.desc, prometheus.CounterValue, m.value(c), labels...)
	}
	ch <- prometheus.MustNewConstMetric(activeDesc, prometheus.GaugeValue, float64(c.Active), labels...)
}
