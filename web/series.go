package web

import (
	"math"
	"net/netip"
	"slices"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

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

// figures are the values of an object's columns; an endpoint has fewer.
type figures [10]float64

// series bounds how many objects have series of their own, so that many services don't
// make more series than a Prometheus can hold of every node. The rest share one.
//
// Which objects have their own is decided once: in the order of keys at first, then by
// who comes when there is room. An object keeps its series for as long as it exists, and
// the shared counters only grow, by what was added since the last scrape: no counter runs
// backwards when others come and go, and nothing is counted twice. Of endpoints that share
// and have never done anything nothing is kept: there may be very many.
type series[T any] struct {
	columns []column[T]
	limit   int
	own     int     // how many have series of their own
	sharing int     // how many share
	other   figures // what the shared series show
}

// kept holds what is remembered of an object between scrapes.
type kept struct {
	found     bool                     // by the scrape that is under way
	own       bool                     // it has series of its own
	last      *figures                 // its counters, if it shares and has done something
	endpoints map[netip.AddrPort]*kept // of a service port
}

// isGone reports whether the scrape hasn't found o, and takes its series.
func (s *series[T]) isGone(o *kept) bool {
	found := o.found
	if o.found = false; !found && o.own {
		s.own--
	}
	return !found
}

// begin empties what a scrape adds up.
func (s *series[T]) begin() {
	s.sharing = 0
	for i, c := range s.columns {
		if c.kind == prometheus.GaugeValue {
			s.other[i] = 0
		}
	}
}

// assign gives an object series of its own if it may have them, has never shared what it did, and there is room. It
// returns what is to be kept of it; o is what was, nil for nothing.
func (s *series[T]) assign(o *kept, may bool) *kept {
	if !may || s.own >= s.limit || o != nil && (o.own || o.last != nil) {
		return o
	}
	if o == nil {
		o = &kept{}
	}
	o.own = true
	s.own++
	return o
}

// send sends the series of t.
func (s *series[T]) send(ch sender, t *T, labels []string) {
	pairs := prometheus.MakeLabelPairs(s.columns[0].desc, labels)
	for _, c := range s.columns {
		if v := c.value(t); !math.IsNaN(v) {
			ch <- sample{c.desc, c.kind, v, pairs}
		}
	}
}

// share adds t to the shared series, and returns what is to be kept of it; o is what was, nil for nothing.
func (s *series[T]) share(o *kept, t *T) *kept {
	s.sharing++
	for i, c := range s.columns {
		v := c.value(t)
		switch {
		case c.noSum:
		case c.kind == prometheus.GaugeValue:
			s.other[i] += v
		case v != 0 || o != nil && o.last != nil:
			if o == nil {
				o = &kept{}
			}
			if o.last == nil {
				o.last = &figures{}
			}
			s.other[i] += grown(o.last[i], v)
			o.last[i] = v
		}
	}
	return o
}

// sendShared sends the shared series, once there are any.
func (s *series[T]) sendShared(ch sender, labels []string) {
	if s.sharing == 0 && s.other == (figures{}) {
		return
	}
	others := slices.Repeat([]string{"other"}, len(labels)) // no protocol is called so
	for i, c := range s.columns {
		if !c.noSum {
			ch <- prometheus.MustNewConstMetric(c.desc, c.kind, s.other[i], others...)
		}
	}
}

// sample is a metric as prometheus's own, but that all series of an object share the labels: making those was half of
// the garbage that a scrape left.
type sample struct {
	desc  *prometheus.Desc
	kind  prometheus.ValueType
	value float64
	pairs []*dto.LabelPair
}

// Desc implements prometheus.Metric.
func (s sample) Desc() *prometheus.Desc { return s.desc }

// Write implements prometheus.Metric.
func (s sample) Write(out *dto.Metric) error {
	out.Label = s.pairs
	if s.kind == prometheus.CounterValue {
		out.Counter = &dto.Counter{Value: &s.value}
	} else {
		out.Gauge = &dto.Gauge{Value: &s.value}
	}
	return nil
}

// grown is the growth of a counter. One that fell began anew: its service was deleted and
// created between two scrapes.
func grown(last, now float64) float64 {
	if now < last {
		return now
	}
	return now - last
}
