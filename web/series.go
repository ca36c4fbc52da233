package web

import (
	"iter"

	"github.com/prometheus/client_golang/prometheus"

	"kproxy.dev/kproxy/plan"
)

var serviceLabels = []string{"namespace", "service", "port", "protocol"}

// serviceCounters are the counters of a service port, in every data plane, in the
// order of the counters that countersOf returns.
var serviceCounters = []*prometheus.Desc{
	desc("kproxy_service_connections_total", "Connections and sessions established.", serviceLabels...),
	desc("kproxy_service_connections_failed_total", "Connections that found no endpoint that answers.", serviceLabels...),
	desc("kproxy_service_connections_retried_total", "Further endpoints tried for a connection.", serviceLabels...),
	desc("kproxy_service_received_bytes_total", "Bytes from clients to endpoints.", serviceLabels...),
	desc("kproxy_service_sent_bytes_total", "Bytes from endpoints to clients.", serviceLabels...),
	desc("kproxy_service_offloads_total", "Moves of the service port from userspace into the kernel.", serviceLabels...),
	desc("kproxy_service_recalls_total", "Moves of the service port from the kernel back to userspace.", serviceLabels...),
}

func countersOf(s *plan.ServiceStatus) counters {
	c := &s.Connections
	return counters{c.Total, c.Failed, c.Retried, c.BytesIn, c.BytesOut, s.Offloads, s.Recalls}
}

// The gauges of a service port.
var (
	serviceActive    = desc("kproxy_service_connections_active", "Connections and sessions alive now.", serviceLabels...)
	serviceEndpoints = desc("kproxy_service_endpoints", "Endpoints of the service port, usable or not.", serviceLabels...)
	serviceUsable    = desc("kproxy_service_endpoints_usable", "Endpoints that get new connections.", serviceLabels...)
	// Its labels change, and those of what else is said of the service port don't.
	serviceInfo = desc("kproxy_service_info", "Always 1; the labels say where the service port stands, and why.",
		append(serviceLabels[:len(serviceLabels):len(serviceLabels)], "dataplane", "state", "reason")...)
)

// seriesKey is the labels of a service port.
type seriesKey struct{ namespace, name, port, protocol string }

// otherServices is the labels of the shared series: no protocol is called so.
var otherServices = seriesKey{"other", "other", "other", "other"}

func (k seriesKey) labels(more ...string) []string {
	return append([]string{k.namespace, k.name, k.port, k.protocol}, more...)
}

func keyOf(s *plan.ServiceStatus) seriesKey {
	return seriesKey{s.Namespace, s.Name, s.Port, s.Protocol}
}

func describeServices(ch chan<- *prometheus.Desc) {
	for _, d := range serviceCounters {
		ch <- d
	}
	for _, d := range []*prometheus.Desc{serviceActive, serviceEndpoints, serviceUsable, serviceInfo} {
		ch <- d
	}
}

// serviceGauges are what a service port, or all that share, have now.
type serviceGauges struct{ active, endpoints, usable int64 }

func (g *serviceGauges) add(s *plan.ServiceStatus) {
	g.active += s.Connections.Active
	g.endpoints += int64(len(s.Endpoints))
	for i := range s.Endpoints {
		if s.Endpoints[i].Usable {
			g.usable++
		}
	}
}

// serviceSeries are the series of service ports, of a bounded number of them.
type serviceSeries struct{ allotment[seriesKey] }

func (t *serviceSeries) collect(services []plan.ServiceStatus, send sender) {
	t.assign(len(services), eachService(services))
	var shared serviceGauges
	for i := range services {
		s := &services[i]
		k := keyOf(s)
		if !t.own[k] {
			t.add(k, countersOf(s))
			shared.add(s)
			continue
		}
		var g serviceGauges
		g.add(s)
		sendService(send, k.labels(), countersOf(s), g)
		send.gauge(serviceInfo, 1, k.labels(string(s.DataPlane), string(s.State), string(s.Cause))...)
	}
	if t.used() {
		sendService(send, otherServices.labels(), t.other, shared)
	}
}

func eachService(services []plan.ServiceStatus) iter.Seq2[seriesKey, bool] {
	return func(yield func(seriesKey, bool) bool) {
		for i := range services {
			if !yield(keyOf(&services[i]), true) {
				return
			}
		}
	}
}

func sendService(send sender, labels []string, c counters, g serviceGauges) {
	to := send.with(serviceActive, labels)
	for i, d := range serviceCounters {
		to.counter(d, c[i])
	}
	to.gauge(serviceActive, float64(g.active))
	to.gauge(serviceEndpoints, float64(g.endpoints))
	to.gauge(serviceUsable, float64(g.usable))
}
