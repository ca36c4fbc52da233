package web

import (
	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
)

// sender sends metrics to a registry.
type sender chan<- prometheus.Metric

func (ch sender) gauge(d *prometheus.Desc, v float64, labels ...string) {
	ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
}

func (ch sender) counter(d *prometheus.Desc, v float64, labels ...string) {
	ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, v, labels...)
}

// group sends several metrics with the same labels: what takes time about a
// metric is its labels, and a service port has ten.
type group struct {
	ch     sender
	labels []*dto.LabelPair
}

// with begins a group of d and others with labels of the same names, in the same
// order.
func (ch sender) with(d *prometheus.Desc, labels []string) group {
	return group{ch, prometheus.MakeLabelPairs(d, labels)}
}

func (g group) gauge(d *prometheus.Desc, v float64) {
	g.ch <- &sample{desc: d, value: v, labels: g.labels}
}

func (g group) counter(d *prometheus.Desc, v uint64) {
	g.ch <- &sample{desc: d, counter: true, value: float64(v), labels: g.labels}
}

// sample is a metric of a group.
type sample struct {
	desc    *prometheus.Desc
	counter bool
	value   float64
	labels  []*dto.LabelPair // in order of name, and never modified
}

// Desc implements prometheus.Metric.
func (s *sample) Desc() *prometheus.Desc { return s.desc }

// Write implements prometheus.Metric.
func (s *sample) Write(m *dto.Metric) error {
	m.Label = s.labels
	if s.counter {
		m.Counter = &dto.Counter{Value: &s.value}
	} else {
		m.Gauge = &dto.Gauge{Value: &s.value}
	}
	return nil
}
