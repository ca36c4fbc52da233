package web

import (
	"math"
	"slices"

	dto "github.com/prometheus/client_model/go"

	"kproxy.dev/kproxy/plan"
)

// column is a metric that each of many objects has. Its value is NaN for an object that
// has none.
type column[T any] struct {
	name, help string
	kind       dto.MetricType
	value      func(*T) float64
	noSum      bool // one of several objects would say nothing
}

func count[T any](name, help string, value func(*T) uint64) column[T] {
	return column[T]{name: name, help: help, kind: dto.MetricType_COUNTER, value: func(t *T) float64 { return float64(value(t)) }}
}

func gauge[T any](name, help string, value func(*T) float64) column[T] {
	return column[T]{name: name, help: help, kind: dto.MetricType_GAUGE, value: value}
}

func withoutSum[T any](c column[T]) column[T] {
	c.noSum = true
	return c
}

// Labels are sorted, as registries have them.
var (
	serviceLabels  = []string{"namespace", "port", "protocol", "service"}
	endpointLabels = []string{"endpoint", "namespace", "port", "protocol", "service"}
	infoLabels     = []string{"dataplane", "namespace", "port", "protocol", "reason", "service", "state"}
)

// serviceColumns are what each service port has, in every data plane.
var serviceColumns = []column[plan.ServiceStatus]{
	count("kproxy_service_connections_total", "Connections and sessions established.", func(s *plan.ServiceStatus) uint64 { return s.Connections.Total }),
	count("kproxy_service_connections_failed_total", "Connections that found no endpoint that answers.", func(s *plan.ServiceStatus) uint64 { return s.Connections.Failed }),
	count("kproxy_service_connections_retried_total", "Further endpoints tried for a connection.", func(s *plan.ServiceStatus) uint64 { return s.Connections.Retried }),
	count("kproxy_service_received_bytes_total", "Bytes from clients to endpoints.", func(s *plan.ServiceStatus) uint64 { return s.Connections.BytesIn }),
	count("kproxy_service_sent_bytes_total", "Bytes from endpoints to clients.", func(s *plan.ServiceStatus) uint64 { return s.Connections.BytesOut }),
	count("kproxy_service_offloads_total", "Moves of the service port from userspace into the kernel.", func(s *plan.ServiceStatus) uint64 { return s.Offloads }),
	count("kproxy_service_recalls_total", "Moves of the service port from the kernel back to userspace.", func(s *plan.ServiceStatus) uint64 { return s.Recalls }),
	gauge("kproxy_service_connections_active", "Connections and sessions alive now.", func(s *plan.ServiceStatus) float64 { return float64(s.Connections.Active) }),
	gauge("kproxy_service_endpoints", "Endpoints of the service port, usable or not.", func(s *plan.ServiceStatus) float64 { return float64(len(s.Endpoints)) }),
	gauge("kproxy_service_endpoints_usable", "Endpoints that get new connections.", func(s *plan.ServiceStatus) (n float64) {
		for i := range s.Endpoints {
			n += number(s.Endpoints[i].Usable)
		}
		return n
	}),
}

// serviceInfo's labels change, and those of the columns don't.
var serviceInfo = gauge("kproxy_service_info", "Always 1; the labels say where the service port stands, and why.", func(*plan.ServiceStatus) float64 { return 1 })

// endpointColumns are what each endpoint of a service port has, in every data plane.
var endpointColumns = []column[plan.EndpointStatus]{
	count("kproxy_endpoint_connections_total", "Connections and sessions that the endpoint took.", func(e *plan.EndpointStatus) uint64 { return e.TotalConnections }),
	count("kproxy_endpoint_failures_total", "Connections that userspace tried on the endpoint in vain.", func(e *plan.EndpointStatus) uint64 { return e.Failures }),
	count("kproxy_endpoint_received_bytes_total", "Bytes from clients to the endpoint.", func(e *plan.EndpointStatus) uint64 { return e.BytesIn }),
	count("kproxy_endpoint_sent_bytes_total", "Bytes from the endpoint to clients.", func(e *plan.EndpointStatus) uint64 { return e.BytesOut }),
	gauge("kproxy_endpoint_connections_active", "Connections and sessions of the endpoint that are alive now.", func(e *plan.EndpointStatus) float64 { return float64(e.ActiveConnections) }),
	gauge("kproxy_endpoint_usable", "1 if the endpoint gets new connections.", func(e *plan.EndpointStatus) float64 { return number(e.Usable) }),
	withoutSum(gauge("kproxy_endpoint_up", "1 if the active health check succeeds; not there where there is none, or before its first result.", func(e *plan.EndpointStatus) float64 {
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
	columns  []column[T]
	names    []string // of labels
	limit    int
	own      int     // how many have series of their own
	other    figures // what the shared counters show
	room     *room
	shared   gauges              // of the scrape that is under way
	families []*dto.MetricFamily // of the scrape that is under way, one for each column
}

// gauges hold those of the shared series, and of how many objects.
type gauges struct {
	figures
	objects int
}

func (g *gauges) add(more *gauges) {
	for i := range g.figures {
		g.figures[i] += more.figures[i]
	}
	g.objects += more.objects
}

func (g gauges) minus(less gauges) gauges {
	for i := range g.figures {
		g.figures[i] -= less.figures[i]
	}
	g.objects -= less.objects
	return g
}

// kept holds what is remembered of an object between scrapes.
type kept struct {
	labels []*dto.LabelPair // if it has series of its own
	last   *figures         // its counters, if it shares and has done something
}

// release takes the series of an object that is gone.
func (s *series[T]) release(o *kept) {
	if o.labels != nil {
		s.own--
	}
}

// begin empties what a scrape adds up, and makes its metrics in r.
func (s *series[T]) begin(r *room) {
	s.room, s.shared, s.families = r, gauges{}, make([]*dto.MetricFamily, len(s.columns))
	for i := range s.columns {
		c := &s.columns[i]
		s.families[i] = &dto.MetricFamily{Name: &c.name, Help: &c.help, Type: &c.kind}
	}
}

// assign gives an object series of its own if it may have them, has never shared what it did, and there is room. It
// returns what is to be kept of it; o is what was, nil for nothing.
func (s *series[T]) assign(o *kept, may bool, values func() []string) *kept {
	if !may || s.own >= s.limit || o != nil && (o.labels != nil || o.last != nil) {
		return o
	}
	if o == nil {
		o = &kept{}
	}
	o.labels = pairs(s.names, values()...)
	s.own++
	return o
}

// pairs are labels with their values.
func pairs(names []string, values ...string) []*dto.LabelPair {
	out := make([]*dto.LabelPair, len(names))
	for i := range names {
		out[i] = &dto.LabelPair{Name: &names[i], Value: &values[i]}
	}
	return out
}

// send adds the series of t to the families.
func (s *series[T]) send(t *T, labels []*dto.LabelPair) {
	for i, c := range s.columns {
		if v := c.value(t); !math.IsNaN(v) {
			s.add(i, v, labels)
		}
	}
}

func (s *series[T]) add(column int, v float64, labels []*dto.LabelPair) {
	x := s.room.sample()
	x.value, x.Label, x.Counter, x.Gauge = v, labels, nil, nil
	if s.columns[column].kind == dto.MetricType_COUNTER {
		x.Counter = &x.counter
	} else {
		x.Gauge = &x.gauge
	}
	s.families[column].Metric = append(s.families[column].Metric, &x.Metric)
}

// sample is a metric with what it points to.
type sample struct {
	dto.Metric
	value   float64
	counter dto.Counter
	gauge   dto.Gauge
}

// room holds the samples of a scrape, of which there are thousands: once its answer is written, another one uses them.
type room struct {
	blocks [][]sample
	used   int // samples
}

const samplesOfBlock = 256

// sample returns one that is free.
func (r *room) sample() *sample {
	if r.used == len(r.blocks)*samplesOfBlock {
		r.blocks = append(r.blocks, make([]sample, samplesOfBlock))
	}
	x := &r.blocks[r.used/samplesOfBlock][r.used%samplesOfBlock]
	x.counter.Value, x.gauge.Value = &x.value, &x.value
	r.used++
	return x
}

// share adds t to the shared series, and returns what is to be kept of it; o is what was, nil for nothing.
func (s *series[T]) share(o *kept, t *T) *kept {
	s.shared.objects++
	for i, c := range s.columns {
		v := c.value(t)
		switch {
		case c.noSum:
		case c.kind == dto.MetricType_GAUGE:
			s.shared.figures[i] += v
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

// sendShared adds the shared series, once there are any.
func (s *series[T]) sendShared() {
	if s.shared.objects == 0 && s.other == (figures{}) {
		return
	}
	others := pairs(s.names, slices.Repeat([]string{"other"}, len(s.names))...) // no protocol is called so
	for i, c := range s.columns {
		if !c.noSum {
			s.add(i, s.other[i]+s.shared.figures[i], others) // one of them is 0
		}
	}
}

// grown is the growth of a counter. One that fell began anew: its service was deleted and
// created between two scrapes.
func grown(last, now float64) float64 {
	if now < last {
		return now
	}
	return now - last
}
