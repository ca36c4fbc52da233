package web

import (
	"maps"
	"net/http"
	"net/netip"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	dto "github.com/prometheus/client_model/go"

	"kproxy.dev/kproxy/health"
	"kproxy.dev/kproxy/plan"
)

// MetricsConfig says what Metrics shows.
type MetricsConfig struct {
	// Summary returns the status without service ports, and those.
	Summary func() (plan.Status, plan.ServiceRows)
	Figures func() plan.Figures
	// Services and Endpoints bound how many service ports and endpoints have series
	// of their own; the others share one.
	Services, Endpoints int
}

// Metrics turns the status into metrics at every scrape, so there is one truth
// and nothing to keep in step. It is safe for concurrent use.
type Metrics struct {
	cfg MetricsConfig
	reg prometheus.Gatherer

	mu        sync.Mutex // scrapes may overlap; the series must not
	services  series[plan.ServiceStatus]
	info      series[plan.ServiceStatus]
	endpoints series[plan.EndpointStatus]
	kept      []*keptService // of every service port, in order
	room      *room          // of the scrape that is under way, or of one that is over
}

// keptService holds what is remembered of a service port between scrapes.
type keptService struct {
	kept
	of        *plan.Service // at the last scrape
	standing  [3]string     // that info shows: data plane, state and cause
	info      []*dto.LabelPair
	endpoints map[netip.AddrPort]*kept

	// Of one that shares its series: what the last scrape added to them. It adds the same while neither it nor what it
	// has carried changes, as of most of thousands.
	added   *contribution
	carried plan.Connections
}

// contribution holds what a service port and its endpoints add to shared series and to the census.
type contribution struct {
	services, endpoints gauges
	census              endpointCensus
}

// NewMetrics returns the metrics that c says beside those of a registry.
func NewMetrics(reg *prometheus.Registry, c MetricsConfig) *Metrics {
	m := &Metrics{cfg: c, reg: reg}
	m.services = series[plan.ServiceStatus]{columns: serviceColumns, names: serviceLabels, limit: c.Services}
	m.info = series[plan.ServiceStatus]{columns: []column[plan.ServiceStatus]{serviceInfo}}
	m.endpoints = series[plan.EndpointStatus]{columns: endpointColumns, names: endpointLabels, limit: c.Endpoints}
	reg.MustRegister(m)
	return m
}

// Gather implements [prometheus.Gatherer].
func (m *Metrics) Gather() ([]*dto.MetricFamily, error) {
	out, _, err := transaction{m}.Gather()
	return out, err
}

// serveMetrics answers with what g gathers.
func serveMetrics(g prometheus.Gatherer) http.Handler {
	t := prometheus.ToTransactionalGatherer(g)
	if m, ok := g.(*Metrics); ok {
		t = transaction{m}
	}
	return promhttp.HandlerForTransactional(t, promhttp.HandlerOpts{ErrorHandling: promhttp.ContinueOnError})
}

// transaction gathers metrics that are good until they have been written.
type transaction struct{ *Metrics }

// Gather implements [prometheus.TransactionalGatherer]. The series of service ports and of endpoints, thousands, come beside the
// registry, which would check each and compare it with all others: the tests do.
func (m transaction) Gather() ([]*dto.MetricFamily, func(), error) {
	m.mu.Lock() // first: counters of before others' would look as if they began anew
	defer m.mu.Unlock()
	if m.room == nil {
		m.room = &room{}
	}
	r := m.room
	r.used = 0
	out, err := m.reg.Gather()
	for _, f := range slices.Concat(m.services.families, m.info.families, m.endpoints.families) {
		if len(f.Metric) > 0 {
			out = append(out, f)
		}
	}
	m.services.families, m.info.families, m.endpoints.families = nil, nil, nil // the caller's
	slices.SortFunc(out, func(a, b *dto.MetricFamily) int { return strings.Compare(a.GetName(), b.GetName()) })
	m.room = nil
	return out, func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.room = r
	}, err
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
	ch <- prometheus.MustNewConstMetric(prometheus.NewDesc(name, help, names, nil), kind, v, values...)
}

// Describe implements prometheus.Collector. Metrics has no list beside what it collects:
// a registry checks what it gets.
func (m *Metrics) Describe(chan<- *prometheus.Desc) {}

// Collect implements prometheus.Collector, for Gather.
func (m *Metrics) Collect(ch chan<- prometheus.Metric) {
	st, rows := m.cfg.Summary()
	f := m.cfg.Figures()
	send := sender(ch)
	collectProcess(st, send)
	collectNode(&f, send)
	m.follow(rows.Services)
	m.services.begin(m.room)
	m.info.begin(m.room)
	m.endpoints.begin(m.room)
	n := census{planes: map[plan.DataPlane]int{}, states: map[plan.State]int{}, reasons: map[plan.Cause]int{}}
	for i, s := range rows.Services {
		n.planes[s.DataPlane]++
		n.states[s.State]++
		n.reasons[s.Cause]++
		o, carried := m.kept[i], rows.Connections(i)
		full := m.services.own >= m.services.limit // else it may get series of its own
		if full && o.added != nil && o.carried == carried {
			m.services.shared.add(&o.added.services)
			m.endpoints.shared.add(&o.added.endpoints)
			n.endpoints.add(&o.added.census)
			continue
		}
		services, endpoints := m.services.shared, m.endpoints.shared
		is := m.collectService(o, rows.Row(i))
		n.endpoints.add(&is)
		if o.carried, o.added = carried, nil; o.labels == nil {
			o.added = &contribution{m.services.shared.minus(services), m.endpoints.shared.minus(endpoints), is}
		}
	}
	n.collect(send)
	m.services.sendShared()
	m.endpoints.sendShared()
	for _, n := range []struct {
		object        string
		limit, shared int
	}{{"service", m.cfg.Services, m.services.shared.objects}, {"endpoint", m.cfg.Endpoints, m.endpoints.shared.objects}} {
		send.gauge("kproxy_metrics_limit", "So many services, or endpoints, have series of their own at most.", float64(n.limit), "object", n.object)
		send.gauge("kproxy_metrics_shared", "Service ports, or endpoints, beyond the limit: they share the series labelled other.", float64(n.shared), "object", n.object)
	}
}

// collectService adds a service port and its endpoints to the series, and returns how its endpoints are.
func (m *Metrics) collectService(o *keptService, r *plan.ServiceStatus) (n endpointCensus) {
	m.services.assign(&o.kept, true, func() []string { return []string{r.Namespace, r.Port, r.Protocol, r.Name} })
	if o.labels != nil {
		m.services.send(r, o.labels)
		m.info.send(r, o.infoOf(r))
	} else {
		m.services.share(&o.kept, r)
	}
	for i := range r.Endpoints {
		e := &r.Endpoints[i]
		n[slices.Index(healths, e.Health)][int(number(e.Usable))]++
		was := o.endpoints[e.Address]
		is := m.endpoints.assign(was, o.labels != nil, func() []string {
			return []string{e.Address.String(), r.Namespace, r.Port, r.Protocol, r.Name}
		})
		if is != nil && is.labels != nil {
			m.endpoints.send(e, is.labels)
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
	return n
}

// infoOf returns the labels that say where the service port stands.
func (o *keptService) infoOf(r *plan.ServiceStatus) []*dto.LabelPair {
	if is := [3]string{string(r.DataPlane), string(r.State), string(r.Cause)}; is != o.standing {
		o.standing = is
		o.info = pairs(infoLabels, is[0], r.Namespace, r.Port, r.Protocol, is[2], r.Name, is[1])
	}
	return o.info
}

// follow drops what is kept of others than these, which are in order as those before: that makes room.
func (m *Metrics) follow(services []*plan.Service) {
	old := m.kept
	m.kept = make([]*keptService, len(services))
	for i, s := range services {
		for len(old) > 0 && old[0].of.Port.Key.Compare(s.Port.Key) < 0 {
			m.drop(old[0])
			old = old[1:]
		}
		if len(old) == 0 || old[0].of.Port.Key != s.Port.Key {
			m.kept[i] = &keptService{of: s}
			continue
		}
		o := old[0]
		m.kept[i], old = o, old[1:]
		if o.of == s {
			continue
		}
		o.of, o.added = s, nil
		gone := maps.Clone(o.endpoints)
		for i := range s.Endpoints {
			delete(gone, s.Endpoints[i].Address)
		}
		for a, e := range gone {
			m.endpoints.release(e)
			delete(o.endpoints, a)
		}
	}
	for _, o := range old {
		m.drop(o)
	}
}

func (m *Metrics) drop(o *keptService) {
	m.services.release(&o.kept)
	for _, e := range o.endpoints {
		m.endpoints.release(e)
	}
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
	endpoints endpointCensus
}

// healths lists the values of an endpoint's Health.
var healths = []string{"up", "down", "unknown"}

// endpointCensus counts endpoints by their health, in the order of healths, and by whether they are usable.
type endpointCensus [3][2]int32

func (n *endpointCensus) add(m *endpointCensus) {
	for i := range n {
		n[i][0] += m[i][0]
		n[i][1] += m[i][1]
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
	for i, health := range healths {
		for k, n := range n.endpoints[i] {
			send.gauge("kproxy_endpoints", "Endpoints by health, usable or not.", float64(n), "health", health, "usable", strconv.FormatBool(k == 1))
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
