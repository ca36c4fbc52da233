package web

import (
	"iter"
	"net/netip"

	"github.com/prometheus/client_golang/prometheus"

	"kproxy.dev/kproxy/plan"
)

var endpointLabels = append(serviceLabels[:len(serviceLabels):len(serviceLabels)], "endpoint")

// endpointCounters are the counters of an endpoint of a service port, in every
// data plane, in the order of the counters that endpointCountersOf returns.
var endpointCounters = []*prometheus.Desc{
	desc("kproxy_endpoint_connections_total", "Connections and sessions that the endpoint took.", endpointLabels...),
	desc("kproxy_endpoint_failures_total", "Connections that userspace tried on the endpoint in vain.", endpointLabels...),
	desc("kproxy_endpoint_received_bytes_total", "Bytes from clients to the endpoint.", endpointLabels...),
	desc("kproxy_endpoint_sent_bytes_total", "Bytes from the endpoint to clients.", endpointLabels...),
}

func endpointCountersOf(e *plan.EndpointStatus) counters {
	return counters{e.TotalConnections, e.Failures, e.BytesIn, e.BytesOut}
}

// The gauges of an endpoint.
var (
	endpointActive = desc("kproxy_endpoint_connections_active", "Connections and sessions of the endpoint that are alive now.", endpointLabels...)
	endpointUsable = desc("kproxy_endpoint_usable", "1 if the endpoint gets new connections.", endpointLabels...)
	endpointUp     = desc("kproxy_endpoint_up", "1 if the active health check succeeds; not there where there is none, or before its first result.", endpointLabels...)
)

// endpointKey is an endpoint of a service port.
type endpointKey struct {
	service seriesKey
	address netip.AddrPort
}

func describeEndpoints(ch chan<- *prometheus.Desc) {
	for _, d := range endpointCounters {
		ch <- d
	}
	for _, d := range []*prometheus.Desc{endpointActive, endpointUsable, endpointUp} {
		ch <- d
	}
}

// endpointSeries are the series of endpoints: of a bounded number of them, and
// only of service ports that have series themselves.
type endpointSeries struct{ allotment[endpointKey] }

func (t *endpointSeries) collect(services []plan.ServiceStatus, own map[seriesKey]bool, send sender) {
	n := 0
	for i := range services {
		n += len(services[i].Endpoints)
	}
	t.assign(n, eachEndpoint(services, own))
	var active, usable int64
	for i := range services {
		service := keyOf(&services[i])
		for j := range services[i].Endpoints {
			e := &services[i].Endpoints[j]
			k := endpointKey{service, e.Address}
			if t.own[k] {
				sendEndpoint(send, service.labels(e.Address.String()), e)
				continue
			}
			t.add(k, endpointCountersOf(e))
			active += e.ActiveConnections
			if e.Usable {
				usable++
			}
		}
	}
	if !t.used() {
		return
	}
	to := send.with(endpointActive, otherServices.labels("other"))
	for i, d := range endpointCounters {
		to.counter(d, t.other[i])
	}
	to.gauge(endpointActive, float64(active))
	to.gauge(endpointUsable, float64(usable))
}

func eachEndpoint(services []plan.ServiceStatus, own map[seriesKey]bool) iter.Seq2[endpointKey, bool] {
	return func(yield func(endpointKey, bool) bool) {
		for i := range services {
			service := keyOf(&services[i])
			for j := range services[i].Endpoints {
				if !yield(endpointKey{service, services[i].Endpoints[j].Address}, own[service]) {
					return
				}
			}
		}
	}
}

func sendEndpoint(send sender, labels []string, e *plan.EndpointStatus) {
	to := send.with(endpointActive, labels)
	c := endpointCountersOf(e)
	for i, d := range endpointCounters {
		to.counter(d, c[i])
	}
	to.gauge(endpointActive, float64(e.ActiveConnections))
	to.gauge(endpointUsable, number(e.Usable))
	if e.Health != "unknown" {
		to.gauge(endpointUp, number(e.Health == "up"))
	}
}
