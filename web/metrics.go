package web

import (
	"maps"
	"net/netip"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/prometheus/client_golang/prometheus"

	"kproxy.dev/kproxy/health"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// MetricsConfig says what Metrics shows.
type MetricsConfig struct {
	// Summary returns the status without service ports, and those as the plan has them, in order of their keys, with
	// what makes a row of one. A row is good until the next.
	Summary func() (st plan.Status, services []*plan.Service, row func(*plan.Service) *plan.ServiceStatus)
	Figures func() plan.Figures
	// Services and Endpoints bound how many service ports and endpoints have series
	// of their own; the others share one.
	Services, Endpoints int
}

// Metrics turns the status into metrics at every scrape, so there is one truth
// and nothing to keep in step. It is safe for concurrent use.
type Metrics struct {
	cfg MetricsConfig

	mu        sync.Mutex // scrapes may overlap; the series must not
	services  series[plan.ServiceStatus]
	endpoints series[plan.EndpointStatus]
	kept      map[service.Key]*kept // of every service port
}

// NewMetrics returns the metrics that c says, registered with reg.
func NewMetrics(reg prometheus.Registerer, c MetricsConfig) *Metrics {
	m := &Metrics{cfg: c, kept: map[service.Key]*kept{}}
	m.services = series[plan.ServiceStatus]{columns: serviceColumns, limit: c.Services}
	m.endpoints = series[plan.EndpointStatus]{columns: endpointColumns, limit: c.Endpoints}
	reg.MustRegister(m)
	return m
}

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc(name, help, labels, nil)
}

// sender sends metrics to a registry. Labels are names and values in turn.
type sender chan<- prometheus.Metric

func (ch sender) gauge(name, help string, v float64, labels ...string) {
	ch.send(prometheus.GaugeValue, name, help, v, labels)
}

func (ch sender) counter(name, help string, v float64, labels ...string) {
	ch.send(prometheus.CounterValue, name, help, v, labels)
}

func (ch sender) send(kind prometheus.ValueType, name, help string, v float64, labels []string) {
	var names, values []string
	for i := 0; i < len(labels); i += 2 {
		names, values = append(names, labels[i]), append(values, labels[i+1])
	}
	ch <- prometheus.MustNewConstMetric(desc(name, help, names...), kind, v, values...)
}

// Describe implements prometheus.Collector. Metrics has no list beside what it collects:
// a registry checks what it gets.
func (m *Metrics) Describe(chan<- *prometheus.Desc) {}

// Collect implements prometheus.Collector.
func (m *Metrics) Collect(ch chan<- prometheus.Metric) {
	m.mu.Lock() // first: counters of before others' would look as if they began anew
	defer m.mu.Unlock()
	st, services, row := m.cfg.Summary()
	f := m.cfg.Figures()
	send := sender(ch)
	collectProcess(st, send)
	collectNode(&f, send)
	m.forget(services)
	m.services.begin()
	m.endpoints.begin()
	n := census{map[plan.DataPlane]int{}, map[plan.State]int{}, map[plan.Cause]int{}, map[standing]int{}}
	for _, s := range services {
		r, o := row(s), m.services.assign(m.kept[s.Port.Key], true)
		n.add(r)
		var labels []string
		if o.own {
			labels = []string{r.Namespace, r.Name, r.Port, r.Protocol}
			m.services.send(send, r, labels)
			ch <- prometheus.MustNewConstMetric(serviceInfo, prometheus.GaugeValue, 1, append(labels, string(r.DataPlane), string(r.State), string(r.Cause))...)
		} else {
			m.services.share(o, r)
		}
		for i := range r.Endpoints {
			e := &r.Endpoints[i]
			was := o.endpoints[e.Address]
			is := m.endpoints.assign(was, o.own)
			if is != nil && is.own {
				m.endpoints.send(send, e, append(labels, e.Address.String()))
			} else {
				is = m.endpoints.share(is, e)
			}
			if is != was {
				if o.endpoints == nil {
					o.endpoints = map[netip.AddrPort]*kept{}
				}
				o.endpoints[e.Address] = is
			}
		}
	}
	n.collect(send)
	m.services.sendShared(send, serviceLabels)
	m.endpoints.sendShared(send, endpointLabels)
	for _, n := range []struct {
		object        string
		limit, shared int
	}{{"service", m.cfg.Services, m.services.sharing}, {"endpoint", m.cfg.Endpoints, m.endpoints.sharing}} {
		send.gauge("kproxy_metrics_limit", "So many services, or endpoints, have series of their own at most.", float64(n.limit), "object", n.object)
		send.gauge("kproxy_metrics_shared", "Service ports, or endpoints, beyond the limit: they share the series labelled other.", float64(n.shared), "object", n.object)
	}
}

// forget drops what is kept of others than these: that makes room. It costs little beside their rows.
func (m *Metrics) forget(services []*plan.Service) {
	for _, s := range services {
		o := m.kept[s.Port.Key]
		if o == nil {
			o = &kept{}
			m.kept[s.Port.Key] = o
		}
		o.found = true
		if len(o.endpoints) == 0 {
			continue
		}
		for i := range s.Endpoints {
			if e := o.endpoints[s.Endpoints[i].Address]; e != nil {
				e.found = true
			}
		}
	}
	maps.DeleteFunc(m.kept, func(_ service.Key, o *kept) bool {
		maps.DeleteFunc(o.endpoints, func(_ netip.AddrPort, e *kept) bool { return m.endpoints.isGone(e) })
		return m.services.isGone(o)
	})
}

func collectProcess(s plan.Status, send sender) {
	send.gauge("kproxy_build_info", "Always 1; the labels say what is running.", 1, "version", s.Version, "goversion", runtime.Version())
	send.gauge("kproxy_uptime_seconds", "Time since start.", float64(s.UptimeSeconds))
	send.gauge("kproxy_alive", "1 while the heartbeat holds, so that new connections may come to userspace.", number(s.Alive))
	send.gauge("kproxy_ready", "1 while new connections to every service are carried; the status says why not.", number(s.Ready))
	send.counter("kproxy_syncs_total", "Passes of the reconcile loop that took effect.", float64(s.Sync.Generation))
	send.gauge("kproxy_sync_duration_seconds", "Duration of the last pass of the reconcile loop.", s.Sync.DurationSeconds)
	send.gauge("kproxy_sync_failing", "1 while the last pass of the reconcile loop failed.", number(s.Sync.LastError != ""))
	send.gauge("kproxy_endpoints_ejected", "Endpoints that passive health keeps from getting new connections of this node.", float64(s.PassiveHealth.Ejected))
	send.gauge("kproxy_nodes_silent", "Nodes two endpoints of which, or more, are ejected for silence.", float64(len(s.PassiveHealth.Nodes)))
	send.gauge("kproxy_isolated", "1 while most endpoints of other nodes are silent to this one, so that none of them is ejected.", number(s.PassiveHealth.Isolated != nil))
	collectSources(s.Sources, send)
	can := map[string]bool{}
	for _, c := range s.Capabilities {
		before, known := can[c.Name]
		can[c.Name] = c.Supported && (before || !known)
	}
	for name, all := range can {
		send.gauge("kproxy_capability", "1 if this host can do it; the status says why not.", number(all), "name", name)
	}
}

// collectSources takes sources of one name for one: a folder may be given twice,
// and a series that is there twice would be left out.
func collectSources(sources []plan.SourceStatus, send sender) {
	errs, synced, saved := map[string]int{}, map[string]bool{}, map[string]float64{}
	for _, src := range sources {
		before, known := synced[src.Name]
		synced[src.Name] = src.Synced && (before || !known)
		errs[src.Name] += lines(src.Error)
		if !src.Saved.IsZero() {
			saved[src.Name] = seconds(src.Saved)
		}
	}
	for name, all := range synced {
		send.gauge("kproxy_source_errors", "Problems in what a source holds now.", float64(errs[name]), "source", name)
		send.gauge("kproxy_source_synced", "1 once a source has been read.", number(all), "source", name)
		send.gauge("kproxy_source_saved_timestamp_seconds", "As of when what is served was saved, where the source couldn't be read since the start; else 0.", saved[name], "source", name)
	}
}

// census counts the service ports and endpoints of each kind.
type census struct {
	planes    map[plan.DataPlane]int
	states    map[plan.State]int
	reasons   map[plan.Cause]int
	endpoints map[standing]int
}

type standing struct {
	health string
	usable bool
}

func (n *census) add(s *plan.ServiceStatus) {
	n.planes[s.DataPlane]++
	n.states[s.State]++
	n.reasons[s.Cause]++
	for i := range s.Endpoints {
		n.endpoints[standing{s.Endpoints[i].Health, s.Endpoints[i].Usable}]++
	}
}

// collect shows every data plane and state, also empty ones: a
// series that comes and goes is hard to alert on.
func (n *census) collect(send sender) {
	for _, p := range plan.DataPlanes {
		send.gauge("kproxy_services", "Service ports by the data plane that carries their new connections.", float64(n.planes[p]), "dataplane", string(p))
	}
	for _, st := range []plan.State{
		plan.StateUserspace, plan.StateQualifying, plan.StateOffloaded,
		plan.StateRecalled, plan.StatePinned, plan.StateRejecting, plan.StateExcluded,
	} {
		send.gauge("kproxy_service_states", "Service ports by state.", float64(n.states[st]), "state", string(st))
	}
	for _, c := range plan.Causes {
		send.gauge("kproxy_service_reasons", "Service ports by the reason for their data plane and state.", float64(n.reasons[c]), "reason", string(c))
	}
	for _, health := range []string{"up", "down", "unknown"} {
		for _, usable := range []bool{true, false} {
			send.gauge("kproxy_endpoints", "Endpoints by health, usable or not.", float64(n.endpoints[standing{health, usable}]), "health", health, "usable", strconv.FormatBool(usable))
		}
	}
}

func number(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

func lines(s string) int {
	if s = strings.TrimSpace(s); s == "" {
		return 0
	}
	return strings.Count(s, "\n") + 1
}

// collectNode sends what kproxy has in the kernel and does there, beyond kube-proxy's metrics.
func collectNode(f *plan.Figures, send sender) {
	for loop, n := range map[string]uint64{"portal": f.PassFailures, "rules": f.RuleFailures} {
		send.counter("kproxy_sync_failures_total", "Passes that failed: of the loop that decides and updates the redirect sets, or of the one that programs rules.", float64(n), "loop", loop)
	}
	for object, n := range map[string]uint64{"sets": f.SetRepairs, "rules": f.RuleRepairs} {
		send.counter("kproxy_repairs_total", "Times that somebody else had changed what is kproxy's in the kernel.", float64(n), "object", object)
	}
	for object, n := range map[string]uint64{"chain": f.Writes.Chains, "rule": f.Writes.Rules, "set_entry": f.Writes.Entries, "virtual_server": f.Writes.Virtuals} {
		send.counter("kproxy_kernel_writes_total", "Objects written into the kernel or deleted from it: rules in chains that were written, entries of sets, virtual and real servers.", float64(n), "object", object)
	}
	for name, n := range f.Sets {
		send.gauge("kproxy_set_entries", "Entries of kproxy's ipsets; KPROXY-AFF stands for all sets of session affinity.", float64(n), "set", name)
	}
	send.counter("kproxy_steered_packets_total", "Packets that began a connection and that rules sent to userspace.", float64(f.Steered))
	send.counter("kproxy_refused_packets_total", "Packets that rules refused, to services without a usable endpoint or without a live kproxy.", float64(f.Refused))
	for i, family := range ipFamilies {
		send.gauge("kproxy_virtual_servers", "Virtual servers that are kproxy's.", float64(f.VirtualServers[i]), "ip_family", family)
		send.gauge("kproxy_real_servers", "Real servers that get new connections.", float64(f.RealServers[i]), "ip_family", family)
	}
	send.gauge("kproxy_real_servers_draining", "Real servers that only keep the connections they have.", float64(f.Draining))
	byCause(send, "kproxy_offloads_total", "Moves of service ports from userspace into the kernel, by reason.", f.Offloads, plan.OffloadCauses)
	byCause(send, "kproxy_recalls_total", "Moves of service ports from the kernel back to userspace, by reason.", f.Recalls, plan.RecallCauses)
	send.counter("kproxy_catch_ups_total", "Times that userspace stood in for a service port until the kernel's rules had followed a change.", float64(f.CatchUps))
	for _, reason := range []string{health.Silent, health.Refused} {
		send.counter("kproxy_endpoint_ejections_total", "Endpoints that passive health ejected, by what they did to its probes.", float64(f.Ejections[reason]), "reason", reason)
	}
	send.counter("kproxy_dead_connections_reset_total", "Connections that were reset because their endpoint had left and its host was silent.", float64(f.Resets))
	send.gauge("kproxy_conntrack_entries", "Entries in this network namespace's conntrack table.", float64(f.Conntrack.Count))
	send.gauge("kproxy_conntrack_entries_limit", "Entries that the conntrack table can hold.", float64(f.Conntrack.Max))
	send.counter("kproxy_conntrack_event_overflows_total", "Times that flows ended faster than they could be counted.", float64(f.ConntrackOverflows))
	for i, protocol := range []string{"TCP", "UDP"} {
		send.gauge("kproxy_userspace_descriptors", "File descriptors that forwarding in userspace uses.", float64(f.Descriptors[i].Count), "protocol", protocol)
		send.gauge("kproxy_userspace_descriptors_limit", "File descriptors that forwarding in userspace may use.", float64(f.Descriptors[i].Max), "protocol", protocol)
		send.gauge("kproxy_userspace_descriptors_waiting", "Listeners that accept no connection until a file descriptor is free.", float64(f.DescriptorWaits[i]), "protocol", protocol)
		for r, n := range f.Shed[i] {
			send.counter("kproxy_userspace_shed_total", "Connections and sessions in userspace that had to end to make room for others, by reason.", float64(n), "protocol", protocol, "reason", plan.ShedReasons[r])
		}
	}
	for _, r := range plan.Resources {
		send.gauge("kproxy_userspace_exhausted", "1 while forwarding in userspace lacks room: clients wait, are refused, or others end for them.", number(slices.Contains(f.Exhausted, r)), "resource", string(r))
	}
}

// byCause sends a counter for every cause there was, and for the usual ones also
// before: a series that begins with 1 has no increase.
func byCause(send sender, name, help string, counts map[plan.Cause]uint64, usual []plan.Cause) {
	for _, c := range plan.Causes {
		if n, ok := counts[c]; ok || slices.Contains(usual, c) {
			send.counter(name, help, float64(n), "reason", string(c))
		}
	}
}
