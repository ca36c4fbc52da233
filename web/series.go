package web

import (
	"iter"
	"math"
	"net/netip"

	"github.com/prometheus/client_golang/prometheus"

	"kproxy.dev/kproxy/plan"
)

// column is a metric that each of many objects has. Its value is NaN for an object that
// has none.
type column[T any] struct {
	desc  *prometheus.Desc
	kind  prometheus.ValueType
	value func(*T) float64
	noSum bool // one of several objects would say nothing
}

func count[T any](d *prometheus.Desc, value func(*T) uint64) column[T] {
	return column[T]{desc: d, kind: prometheus.CounterValue, value: func(t *T) float64 { return float64(value(t)) }}
}

func gauge[T any](d *prometheus.Desc, value func(*T) float64) column[T] {
	return column[T]{desc: d, kind: prometheus.GaugeValue, value: value}
}

func withoutSum[T any](c column[T]) column[T] {
	c.noSum = true
	return c
}

var (
	serviceLabels  = []string{"namespace", "service", "port", "protocol"}
	endpointLabels = []string{"namespace", "service", "port", "protocol", "endpoint"}
)

// serviceColumns are what each service port has, in every data plane.
var serviceColumns = []column[plan.ServiceStatus]{
	count(desc("kproxy_service_connections_total", "Connections and sessions established.", serviceLabels...), func(s *plan.ServiceStatus) uint64 { return s.Connections.Total }),
	count(desc("kproxy_service_connections_failed_total", "Connections that found no endpoint that answers.", serviceLabels...), func(s *plan.ServiceStatus) uint64 { return s.Connections.Failed }),
	count(desc("kproxy_service_connections_retried_total", "Further endpoints tried for a connection.", serviceLabels...), func(s *plan.ServiceStatus) uint64 { return s.Connections.Retried }),
	count(desc("kproxy_service_received_bytes_total", "Bytes from clients to endpoints.", serviceLabels...), func(s *plan.ServiceStatus) uint64 { return s.Connections.BytesIn }),
	count(desc("kproxy_service_sent_bytes_total", "Bytes from endpoints to clients.", serviceLabels...), func(s *plan.ServiceStatus) uint64 { return s.Connections.BytesOut }),
	count(desc("kproxy_service_offloads_total", "Moves of the service port from userspace into the kernel.", serviceLabels...), func(s *plan.ServiceStatus) uint64 { return s.Offloads }),
	count(desc("kproxy_service_recalls_total", "Moves of the service port from the kernel back to userspace.", serviceLabels...), func(s *plan.ServiceStatus) uint64 { return s.Recalls }),
	gauge(desc("kproxy_service_connections_active", "Connections and sessions alive now.", serviceLabels...), func(s *plan.ServiceStatus) float64 { return float64(s.Connections.Active) }),
	gauge(desc("kproxy_service_endpoints", "Endpoints of the service port, usable or not.", serviceLabels...), func(s *plan.ServiceStatus) float64 { return float64(len(s.Endpoints)) }),
	gauge(desc("kproxy_service_endpoints_usable", "Endpoints that get new connections.", serviceLabels...), func(s *plan.ServiceStatus) (n float64) {
		for i := range s.Endpoints {
			n += number(s.Endpoints[i].Usable)
		}
		return n
	}),
}

// serviceInfo's labels change, and those of the columns don't.
var serviceInfo = desc("kproxy_service_info", "Always 1; the labels say where the service port stands, and why.",
	"namespace", "service", "port", "protocol", "dataplane", "state", "reason")

// endpointColumns are what each endpoint of a service port has, in every data plane.
var endpointColumns = []column[plan.EndpointStatus]{
	count(desc("kproxy_endpoint_connections_total", "Connections and sessions that the endpoint took.", endpointLabels...), func(e *plan.EndpointStatus) uint64 { return e.TotalConnections }),
	count(desc("kproxy_endpoint_failures_total", "Connections that userspace tried on the endpoint in vain.", endpointLabels...), func(e *plan.EndpointStatus) uint64 { return e.Failures }),
	count(desc("kproxy_endpoint_received_bytes_total", "Bytes from clients to the endpoint.", endpointLabels...), func(e *plan.EndpointStatus) uint64 { return e.BytesIn }),
	count(desc("kproxy_endpoint_sent_bytes_total", "Bytes from the endpoint to clients.", endpointLabels...), func(e *plan.EndpointStatus) uint64 { return e.BytesOut }),
	gauge(desc("kproxy_endpoint_connections_active", "Connections and sessions of the endpoint that are alive now.", endpointLabels...), func(e *plan.EndpointStatus) float64 { return float64(e.ActiveConnections) }),
	gauge(desc("kproxy_endpoint_usable", "1 if the endpoint gets new connections.", endpointLabels...), func(e *plan.EndpointStatus) float64 { return number(e.Usable) }),
	withoutSum(gauge(desc("kproxy_endpoint_up", "1 if the active health check succeeds; not there where there is none, or before its first result.", endpointLabels...), func(e *plan.EndpointStatus) float64 {
		if e.Health == "unknown" {
			return math.NaN()
		}
		return number(e.Health == "up")
	})),
}

// serviceKey is the labels of a service port, endpointKey those of an endpoint.
type (
	serviceKey  struct{ namespace, name, port, protocol string }
	endpointKey struct {
		service serviceKey
		address netip.AddrPort
	}
)

func keyOf(s *plan.ServiceStatus) serviceKey {
	return serviceKey{s.Namespace, s.Name, s.Port, s.Protocol}
}

func (k serviceKey) labels() []string { return []string{k.namespace, k.name, k.port, k.protocol} }
func (k endpointKey) labels() []string {
	return append(k.service.labels(), k.address.String())
}

// eachService yields the service ports, in the status's order.
func eachService(services []plan.ServiceStatus) iter.Seq2[serviceKey, *plan.ServiceStatus] {
	return func(yield func(serviceKey, *plan.ServiceStatus) bool) {
		for i := range services {
			if !yield(keyOf(&services[i]), &services[i]) {
				return
			}
		}
	}
}

// eachEndpoint yields the endpoints of all service ports.
func eachEndpoint(services []plan.ServiceStatus) iter.Seq2[endpointKey, *plan.EndpointStatus] {
	return func(yield func(endpointKey, *plan.EndpointStatus) bool) {
		for i := range services {
			for j := range services[i].Endpoints {
				if e := &services[i].Endpoints[j]; !yield(endpointKey{keyOf(&services[i]), e.Address}, e) {
					return
				}
			}
		}
	}
}

// figures are the values of an object's columns; an endpoint has fewer.
type figures [10]float64

// series bounds how many objects have series of their own, so that many services don't
// make more series than a Prometheus can hold of every node. The rest share one.
//
// Which objects have their own is decided once: in the order of keys at first, then by
// who comes when there is room. An object keeps its series for as long as it exists, and
// the shared counters only grow, by what was added since the last scrape: no counter runs
// backwards when others come and go, and nothing is counted twice. Of those that share
// and have never done anything it keeps nothing: there may be very many.
type series[K interface {
	comparable
	labels() []string
}, T any] struct {
	columns []column[T]
	limit   int
	own     map[K]bool    // those with series of their own
	shared  map[K]figures // last counters of those that share and have done something
	other   figures       // what the shared counters show
	sharing int           // how many share
}

// collect sends the series of all objects, of which those that may can have their own.
// They come in the same order every time.
func (s *series[K, T]) collect(send sender, all iter.Seq2[K, *T], may func(K) bool) {
	s.assign(all, may)
	var now figures // what the shared series show
	for k, t := range all {
		var labels []string
		if s.own[k] {
			labels = k.labels()
		}
		last := s.shared[k]
		was := last
		for i, c := range s.columns {
			v := c.value(t)
			switch {
			case math.IsNaN(v):
			case s.own[k]:
				send <- prometheus.MustNewConstMetric(c.desc, c.kind, v, labels...)
			case c.kind == prometheus.GaugeValue:
				now[i] += v
			default:
				s.other[i] += grown(last[i], v)
				last[i] = v
			}
		}
		if last != was {
			s.shared[k] = last
		}
	}
	if s.sharing == 0 && s.other == (figures{}) {
		return
	}
	var none K
	others := none.labels()
	for i := range others {
		others[i] = "other" // no protocol is called so
	}
	for i, c := range s.columns {
		if c.noSum {
			continue
		}
		if c.kind == prometheus.CounterValue {
			now[i] = s.other[i]
		}
		send <- prometheus.MustNewConstMetric(c.desc, c.kind, now[i], others...)
	}
}

// assign forgets objects that are gone and gives free series to new ones.
func (s *series[K, T]) assign(all iter.Seq2[K, *T], may func(K) bool) {
	if s.own == nil {
		s.own, s.shared = map[K]bool{}, map[K]figures{}
	}
	present := map[K]bool{}
	for k := range all {
		present[k] = true
	}
	for k := range s.own {
		if !present[k] {
			delete(s.own, k)
		}
	}
	for k := range s.shared {
		if !present[k] {
			delete(s.shared, k)
		}
	}
	for k := range all {
		if _, shares := s.shared[k]; !shares && !s.own[k] && len(s.own) < s.limit && may(k) {
			s.own[k] = true
		}
	}
	s.sharing = len(present) - len(s.own)
}

// grown is the growth of a counter. One that fell began anew: its service was deleted and
// created between two scrapes.
func grown(last, now float64) float64 {
	if now < last {
		return now
	}
	return now - last
}
