package web

import (
	"runtime"
	"strings"
	"sync"

	"github.com/prometheus/client_golang/prometheus"

	"kproxy.dev/kproxy/plan"
)

// Metrics turns the status into metrics at every scrape, so there is one truth
// and nothing to keep in step. It is safe for concurrent use.
type Metrics struct {
	src Source

	mu       sync.Mutex // scrapes may overlap; the series must not
	services serviceSeries
}

// NewMetrics returns the metrics of src, registered with reg.
func NewMetrics(reg prometheus.Registerer, src Source) *Metrics {
	m := &Metrics{src: src}
	reg.MustRegister(m)
	return m
}

var (
	buildInfo = desc("kproxy_build_info", "Always 1; the labels say what is running.", "version", "goversion")
	upSeconds = desc("kproxy_uptime_seconds", "Time since start.")
	aliveDesc = desc("kproxy_alive", "1 while the heartbeat holds, so that new connections may come to userspace.")

	syncPasses   = desc("kproxy_syncs_total", "Passes of the reconcile loop that took effect.")
	syncDuration = desc("kproxy_sync_duration_seconds", "Duration of the last pass of the reconcile loop.")
	syncFailing  = desc("kproxy_sync_failing", "1 while the last pass of the reconcile loop failed.")

	sourceErrors = desc("kproxy_source_errors", "Problems in what a source holds now.", "source")
	sourceSynced = desc("kproxy_source_synced", "1 once a source has been read.", "source")
	capability   = desc("kproxy_capability", "1 if this host can do it; the status says why not.", "name")

	servicesDesc  = desc("kproxy_services", "Service ports by the data plane that carries their new connections.", "dataplane")
	statesDesc    = desc("kproxy_service_states", "Service ports by state.", "state")
	endpointsDesc = desc("kproxy_endpoints", "Endpoints by health, usable or not.", "health", "usable")
)

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc(name, help, labels, nil)
}

// Describe implements prometheus.Collector.
func (m *Metrics) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		buildInfo, upSeconds, aliveDesc, syncPasses, syncDuration, syncFailing,
		sourceErrors, sourceSynced, capability, servicesDesc, statesDesc, endpointsDesc,
	} {
		ch <- d
	}
	describeServices(ch)
}

// Collect implements prometheus.Collector.
func (m *Metrics) Collect(ch chan<- prometheus.Metric) {
	s := m.src.Status()
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	gauge(buildInfo, 1, s.Version, runtime.Version())
	gauge(upSeconds, float64(s.UptimeSeconds))
	gauge(aliveDesc, number(s.Alive))
	ch <- prometheus.MustNewConstMetric(syncPasses, prometheus.CounterValue, float64(s.Sync.Generation))
	gauge(syncDuration, s.Sync.DurationSeconds)
	gauge(syncFailing, number(s.Sync.LastError != ""))
	for _, src := range s.Sources {
		gauge(sourceErrors, float64(lines(src.Error)), src.Name)
		gauge(sourceSynced, number(src.Synced), src.Name)
	}
	for _, c := range s.Capabilities {
		gauge(capability, number(c.Supported), c.Name)
	}
	countServices(s, gauge)
	m.mu.Lock()
	defer m.mu.Unlock()
	m.services.collect(s.Services, ch)
}

// countServices shows every data plane and state, also those nobody is in: a
// series that comes and goes is hard to alert on.
func countServices(s plan.Status, gauge func(*prometheus.Desc, float64, ...string)) {
	planes := map[plan.DataPlane]int{}
	states := map[plan.State]int{}
	endpoints := map[[2]string]int{}
	for i := range s.Services {
		planes[s.Services[i].DataPlane]++
		states[s.Services[i].State]++
		for _, e := range s.Services[i].Endpoints {
			endpoints[[2]string{e.Health, truth(e.Usable)}]++
		}
	}
	for _, p := range []plan.DataPlane{plan.Userspace, plan.IPTables, plan.IPVS, plan.None} {
		gauge(servicesDesc, float64(planes[p]), string(p))
	}
	for _, st := range []plan.State{
		plan.StateUserspace, plan.StateQualifying, plan.StateOffloaded,
		plan.StateRecalled, plan.StatePinned, plan.StateRejecting, plan.StateExcluded,
	} {
		gauge(statesDesc, float64(states[st]), string(st))
	}
	for _, health := range []string{"up", "down", "unknown"} {
		for _, usable := range []string{"true", "false"} {
			gauge(endpointsDesc, float64(endpoints[[2]string{health, usable}]), health, usable)
		}
	}
}

func number(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

func truth(b bool) string {
	if b {
		return "true"
	}
	return "false"
}

func lines(s string) int {
	if s = strings.TrimSpace(s); s == "" {
		return 0
	}
	return strings.Count(s, "\n") + 1
}
