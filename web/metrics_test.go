package web

import (
	"os"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

func TestMetrics(t *testing.T) {
	reg := NewMetrics(prometheus.NewPedanticRegistry(), metricsOf(shop()))
	want := `
# HELP kproxy_alive 1 while the heartbeat holds, so that new connections may come to userspace.
# TYPE kproxy_alive gauge
kproxy_alive 1
# HELP kproxy_endpoints Endpoints by health, usable or not.
# TYPE kproxy_endpoints gauge
kproxy_endpoints{health="down",usable="false"} 3
kproxy_endpoints{health="down",usable="true"} 0
kproxy_endpoints{health="unknown",usable="false"} 0
kproxy_endpoints{health="unknown",usable="true"} 0
kproxy_endpoints{health="up",usable="false"} 0
kproxy_endpoints{health="up",usable="true"} 3
# HELP kproxy_services Service ports by the data plane that carries their new connections.
# TYPE kproxy_services gauge
kproxy_services{dataplane="iptables"} 1
kproxy_services{dataplane="ipvs"} 0
kproxy_services{dataplane="nftables"} 0
kproxy_services{dataplane="none"} 0
kproxy_services{dataplane="userspace"} 2
# HELP kproxy_source_errors Problems in what a source holds now.
# TYPE kproxy_source_errors gauge
kproxy_source_errors{source="manifests"} 2
# HELP kproxy_service_connections_failed_total Connections that found no endpoint that answers.
# TYPE kproxy_service_connections_failed_total counter
kproxy_service_connections_failed_total{namespace="shop",port="",protocol="TCP",service="cart"} 2
kproxy_service_connections_failed_total{namespace="shop",port="http",protocol="TCP",service="web"} 2
kproxy_service_connections_failed_total{namespace="shop",port="http3",protocol="UDP",service="web"} 2
# HELP kproxy_sync_duration_seconds Duration of the last pass of the reconcile loop.
# TYPE kproxy_sync_duration_seconds gauge
kproxy_sync_duration_seconds 0.25
`
	names := []string{
		"kproxy_alive", "kproxy_endpoints", "kproxy_services", "kproxy_source_errors", "kproxy_sync_duration_seconds",
		"kproxy_service_connections_failed_total",
	}
	if err := testutil.GatherAndCompare(reg, strings.NewReader(want), names...); err != nil {
		t.Error(err)
	}
	if problems, err := testutil.GatherAndLint(reg); err != nil || len(problems) > 0 {
		t.Errorf("lint: %v %v", problems, err)
	}
}

// TestNamesThatOccurTwice: a folder given twice is one source, and what a host
// lacks in one place it lacks.
func TestNamesThatOccurTwice(t *testing.T) {
	src := shop()
	src.status.Sources = append(src.status.Sources, plan.SourceStatus{Name: "manifests", Error: "c.yaml:1: what"},
		plan.SourceStatus{Name: "https://192.0.2.1:6443", Error: "away", Saved: time.Unix(1790000000, 0)})
	src.status.Capabilities = append(src.status.Capabilities, plan.Capability{Name: "iptables"})
	reg := NewMetrics(prometheus.NewPedanticRegistry(), metricsOf(src))
	want := `
# HELP kproxy_capability 1 if this host can do it; the status says why not.
# TYPE kproxy_capability gauge
kproxy_capability{name="iptables"} 0
kproxy_capability{name="ipvs"} 0
# HELP kproxy_source_errors Problems in what a source holds now.
# TYPE kproxy_source_errors gauge
kproxy_source_errors{source="https://192.0.2.1:6443"} 1
kproxy_source_errors{source="manifests"} 3
# HELP kproxy_source_saved_timestamp_seconds As of when what is served was saved, where the source couldn't be read since the start; else 0.
# TYPE kproxy_source_saved_timestamp_seconds gauge
kproxy_source_saved_timestamp_seconds{source="https://192.0.2.1:6443"} 1.79e+09
kproxy_source_saved_timestamp_seconds{source="manifests"} 0
# HELP kproxy_source_synced 1 once a source has been read.
# TYPE kproxy_source_synced gauge
kproxy_source_synced{source="https://192.0.2.1:6443"} 0
kproxy_source_synced{source="manifests"} 0
`
	if err := testutil.GatherAndCompare(reg, strings.NewReader(want), "kproxy_capability", "kproxy_source_errors", "kproxy_source_synced", "kproxy_source_saved_timestamp_seconds"); err != nil {
		t.Error(err)
	}
}

// metricsOf returns what metrics of src need.
func metricsOf(src Source) MetricsConfig {
	return MetricsConfig{Summary: summaryOf(src), Figures: kubeProxyFigures, Services: 500, Endpoints: 1000}
}

// summaryOf is the status of src as Metrics reads it, with all rows in the same room. What plans say of a service port is the
// same value until it changes.
func summaryOf(src Source) func() (plan.Status, plan.ServiceRows) {
	before := map[service.Key]*plan.Service{}
	return func() (plan.Status, plan.ServiceRows) {
		st := src.Status()
		rows := map[*plan.Service]plan.ServiceStatus{}
		var services []*plan.Service
		for _, r := range st.Services {
			protocol, _ := service.ParseProtocol(r.Protocol)
			s := &plan.Service{Port: &service.Port{Key: service.Key{Namespace: r.Namespace, Name: r.Name, Port: r.Port, Protocol: protocol}}, DataPlane: r.DataPlane, State: r.State, Cause: r.Cause}
			for _, e := range r.Endpoints {
				s.Endpoints = append(s.Endpoints, plan.Endpoint{Endpoint: &service.Endpoint{Address: e.Address}, Usable: e.Usable})
			}
			if was := before[s.Port.Key]; reflect.DeepEqual(was, s) {
				s = was
			}
			before[s.Port.Key] = s
			rows[s] = r
			services = append(services, s)
		}
		var row plan.ServiceStatus
		return st, plan.ServiceRows{
			Services:    services,
			Connections: func(i int) plan.Connections { return rows[services[i]].Connections },
			Row: func(i int) *plan.ServiceStatus {
				room := row.Endpoints[:0]
				row = rows[services[i]]
				row.Endpoints = append(room, row.Endpoints...)
				return &row
			},
		}
	}
}

func documentation(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile("../docs/metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// exportedMetric holds what a registry says of a metric.
type exportedMetric struct{ kind, labels string }

// gathered are the metrics of a registry by name.
func gathered(t *testing.T, reg prometheus.Gatherer) map[string]exportedMetric {
	t.Helper()
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]exportedMetric{}
	for _, f := range families {
		var labels []string
		for _, l := range f.GetMetric()[0].GetLabel() {
			labels = append(labels, l.GetName())
		}
		slices.Sort(labels)
		out[f.GetName()] = exportedMetric{strings.ToLower(f.GetType().String()), strings.Join(labels, ", ")}
	}
	return out
}

// TestMetricsAreDocumented: docs/metrics.md has a line for each of kproxy's own
// metrics, with its type and labels, and no other.
func TestMetricsAreDocumented(t *testing.T) {
	row := regexp.MustCompile("(?m)^- `(kproxy_[a-z_]+)(?:\\{([a-z_, ]+)\\})?` \\(([a-z]+)\\): ")
	documented := map[string]exportedMetric{}
	for _, m := range row.FindAllStringSubmatch(documentation(t), -1) {
		documented[m[1]] = exportedMetric{m[3], m[2]}
	}
	reg := NewMetrics(prometheus.NewRegistry(), metricsOf(shop()))
	if diff := cmp.Diff(documented, gathered(t, reg), cmp.AllowUnexported(exportedMetric{})); diff != "" {
		t.Errorf("metrics (-documented +exported):\n%s", diff)
	}
}

// TestReasonsAreDocumented: docs/metrics.md explains every cause, in order.
func TestReasonsAreDocumented(t *testing.T) {
	_, section, _ := strings.Cut(documentation(t), "### Reasons\n")
	section, _, _ = strings.Cut(section, "\n## ")
	var documented []plan.Cause
	for _, m := range regexp.MustCompile("(?m)^- `([a-z-]+)` \\(").FindAllStringSubmatch(section, -1) {
		documented = append(documented, plan.Cause(m[1]))
	}
	if diff := cmp.Diff(documented, plan.Causes); diff != "" {
		t.Errorf("reasons (-documented +those there are):\n%s", diff)
	}
}

func TestNodeMetrics(t *testing.T) {
	c := metricsOf(shop())
	c.Figures = func() plan.Figures {
		return plan.Figures{
			Sets: map[string]int{"KPROXY-AFF": 5, "KPROXY-USER-4": 7}, VirtualServers: [2]int{3, 2}, RealServers: [2]int{9, 4}, Draining: 1,
			Writes: plan.Writes{Chains: 2, Rules: 11, Entries: 13, Virtuals: 17}, PassFailures: 19, RuleFailures: 23, RuleRepairs: 29, SetRepairs: 31,
			Offloads: map[plan.Cause]uint64{plan.CauseQualified: 37},
			Recalls:  map[plan.Cause]uint64{plan.CauseFlapping: 41, plan.CausePanic: 43}, CatchUps: 47,
			Conntrack: plan.Usage{Count: 53, Max: 59}, ConntrackOverflows: 61,
			Descriptors: [2]plan.Usage{{Count: 67, Max: 71}, {Count: 73, Max: 79}}, DescriptorWaits: [2]int{1, 0}, Steered: 83, Refused: 89,
			Ejections: map[string]uint64{"silent": 107}, Resets: 109, Exhausted: []plan.Resource{plan.Sessions}, Shed: [2][4]uint64{{83, 89, 97, 101}, {3: 103}},
		}
	}
	reg := NewMetrics(prometheus.NewPedanticRegistry(), c)
	text := get(API(APIConfig{Source: shop(), Recorder: NewRecorder(DefaultRecorderConfig(shop())), Gatherer: reg}), "/metrics").Body.String()
	want := map[string]string{
		"kproxy_set_entries": `{set="KPROXY-AFF"} 5
{set="KPROXY-USER-4"} 7`,
		"kproxy_virtual_servers": `{ip_family="IPv4"} 3
{ip_family="IPv6"} 2`,
		"kproxy_real_servers": `{ip_family="IPv4"} 9
{ip_family="IPv6"} 4`,
		"kproxy_steered_packets_total": " 83",
		"kproxy_refused_packets_total": " 89",
		"kproxy_real_servers_draining": " 1",
		"kproxy_kernel_writes_total": `{object="chain"} 2
{object="rule"} 11
{object="set_entry"} 13
{object="virtual_server"} 17`,
		"kproxy_sync_failures_total": `{loop="portal"} 19
{loop="rules"} 23`,
		"kproxy_repairs_total": `{object="rules"} 29
{object="sets"} 31`,
		"kproxy_offloads_total": `{reason="pinned"} 0
{reason="qualified"} 37`,
		"kproxy_recalls_total": `{reason="endpoints-down"} 43
{reason="endpoints-flapping"} 41
{reason="kernel-cannot"} 0
{reason="pinned"} 0
{reason="rules-failed"} 0`,
		"kproxy_catch_ups_total": " 47",
		"kproxy_endpoint_ejections_total": `{reason="refused"} 0
{reason="silent"} 107`,
		"kproxy_dead_connections_reset_total":    " 109",
		"kproxy_conntrack_entries":               " 53",
		"kproxy_conntrack_entries_limit":         " 59",
		"kproxy_conntrack_event_overflows_total": " 61",
		"kproxy_userspace_descriptors": `{protocol="TCP"} 67
{protocol="UDP"} 73`,
		"kproxy_userspace_descriptors_limit": `{protocol="TCP"} 71
{protocol="UDP"} 79`,
		"kproxy_userspace_descriptors_waiting": `{protocol="TCP"} 1
{protocol="UDP"} 0`,
		"kproxy_userspace_exhausted": `{resource="descriptors"} 0
{resource="memory"} 0
{resource="sessions"} 1`,
		"kproxy_userspace_shed_total": `{protocol="TCP",reason="client_share"} 89
{protocol="TCP",reason="idle"} 101
{protocol="TCP",reason="reset"} 83
{protocol="TCP",reason="service_share"} 97
{protocol="UDP",reason="client_share"} 0
{protocol="UDP",reason="idle"} 103
{protocol="UDP",reason="reset"} 0
{protocol="UDP",reason="service_share"} 0`,
	}
	all := make(chan prometheus.Metric, 1000)
	f := c.Figures()
	collectNode(&f, all)
	close(all)
	descs := map[string]bool{}
	for m := range all {
		descs[m.Desc().String()] = true
	}
	if len(want) != len(descs) {
		t.Errorf("%d metrics are tested of %d", len(want), len(descs))
	}
	for name, samples := range want {
		var got []string
		for line := range strings.Lines(text) {
			if sample, ok := strings.CutPrefix(line, name); ok && strings.ContainsAny(sample[:1], " {") {
				got = append(got, strings.TrimSuffix(sample, "\n"))
			}
		}
		if strings.Join(got, "\n") != samples {
			t.Errorf("%s:\n%s\nwant\n%s", name, strings.Join(got, "\n"), samples)
		}
	}
}
