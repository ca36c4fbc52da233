package web

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	dto "github.com/prometheus/client_model/go"

	"kproxy.dev/kproxy/plan"
)

// services are n service ports from svc-00000 on with two endpoints each, which
// have all carried so many connections.
func services(from, to int, total uint64) []plan.ServiceStatus {
	var out []plan.ServiceStatus
	for i := from; i < to; i++ {
		s := plan.ServiceStatus{
			Namespace: "ns", Name: fmt.Sprintf("svc-%05d", i), Protocol: "TCP",
			DataPlane: plan.IPTables, State: plan.StateOffloaded, Cause: plan.CauseQualified,
			Connections: plan.Connections{Active: 2, Total: 2 * total, BytesIn: total},
		}
		for j := range 2 {
			a := netip.AddrFrom4([4]byte{10, byte(i >> 8), byte(i), byte(j + 1)})
			s.Endpoints = append(s.Endpoints, plan.EndpointStatus{
				Address: netip.AddrPortFrom(a, 80), Health: "up", Usable: true, ActiveConnections: 1, TotalConnections: total,
			})
		}
		out = append(out, s)
	}
	return out
}

// family is one family of a scrape: how many series, the one of the others (-1
// if there is none), and the sum of all.
type family struct {
	series int
	other  float64
	sum    float64
}

func scrape(t *testing.T, reg prometheus.Gatherer, name string) family {
	t.Helper()
	families, err := prometheus.Gatherers{reg}.Gather() // which finds series that occur twice, or aren't what their family is
	if err != nil {
		t.Fatal(err)
	}
	out := family{other: -1}
	for _, f := range families {
		if f.GetName() != name {
			continue
		}
		for _, m := range f.GetMetric() {
			v := m.GetCounter().GetValue() + m.GetGauge().GetValue()
			out.series++
			out.sum += v
			for _, l := range m.GetLabel() {
				if l.GetName() == "service" && l.GetValue() == "other" {
					out.other = v
				}
			}
		}
	}
	return out
}

// TestSeriesAreBounded: a node with very many services has a bounded number of
// series, and nothing that was counted is lost, counted twice or runs backwards.
func TestSeriesAreBounded(t *testing.T) {
	src := &fakeSource{}
	c := metricsOf(src)
	c.Services, c.Endpoints = 10, 15
	reg := NewMetrics(prometheus.NewPedanticRegistry(), c)
	for _, step := range []struct {
		name                         string
		services                     []plan.ServiceStatus
		ports, endpoints             family
		sharedPorts, sharedEndpoints float64
	}{
		{"at first", services(0, 14, 100), family{11, 800, 2800}, family{16, 1300, 2800}, 4, 13},
		{"nothing happened", services(0, 14, 100), family{11, 800, 2800}, family{16, 1300, 2800}, 4, 13},
		{"three more each", services(0, 14, 103), family{11, 824, 2884}, family{16, 1339, 2884}, 4, 13},
		{"those with series deleted, others keep sharing", services(5, 14, 103), family{6, 824, 1854}, family{6, 1339, 1854}, 4, 13},
	} {
		src.status.Services = step.services
		if got := scrape(t, reg, "kproxy_service_connections_total"); got != step.ports {
			t.Errorf("%s: ports %+v, want %+v", step.name, got, step.ports)
		}
		if got := scrape(t, reg, "kproxy_endpoint_connections_total"); got != step.endpoints {
			t.Errorf("%s: endpoints %+v, want %+v", step.name, got, step.endpoints)
		}
		if got, want := scrape(t, reg, "kproxy_service_endpoints").sum, float64(2*len(step.services)); got != want {
			t.Errorf("%s: %g endpoints, want %g", step.name, got, want)
		}
		want := fmt.Sprintf(`
# HELP kproxy_metrics_shared Service ports, or endpoints, beyond the limit: they share the series labelled other.
# TYPE kproxy_metrics_shared gauge
kproxy_metrics_shared{object="endpoint"} %g
kproxy_metrics_shared{object="service"} %g
`, step.sharedEndpoints, step.sharedPorts)
		if err := testutil.GatherAndCompare(reg, strings.NewReader(want), "kproxy_metrics_shared"); err != nil {
			t.Errorf("%s: %v", step.name, err)
		}
	}
}

// TestOthersKeepTheirSum: what those who share have carried stays in the sum when
// they are deleted, when others take their place, and when one begins anew.
func TestOthersKeepTheirSum(t *testing.T) {
	src := &fakeSource{}
	c := metricsOf(src)
	c.Services = 5
	reg := NewMetrics(prometheus.NewPedanticRegistry(), c)
	for _, step := range []struct {
		name     string
		services []plan.ServiceStatus
		want     family
	}{
		{"room for all", services(0, 5, 10), family{5, -1, 100}},
		{"two in the place of two", services(2, 7, 10), family{5, -1, 100}},
		{"and back", services(0, 5, 10), family{5, -1, 100}},
		{"two more", services(0, 7, 10), family{6, 40, 140}},
		{"the two deleted", services(0, 5, 10), family{6, 40, 140}},
		{"all deleted", nil, family{1, 40, 40}},
		{"others, in their place", services(2, 9, 1), family{6, 44, 54}},
		{"they begin anew", services(2, 9, 0), family{6, 44, 44}},
		{"and carry", services(2, 9, 2), family{6, 52, 72}},
	} {
		src.status.Services = step.services
		if got := scrape(t, reg, "kproxy_service_connections_total"); got != step.want {
			t.Errorf("%s: %+v, want %+v", step.name, got, step.want)
		}
	}
}

// TestScrapesThatOverlap: one whose counters are older than those of another doesn't take them for begun anew.
func TestScrapesThatOverlap(t *testing.T) {
	src := &fakeSource{status: plan.Status{Services: services(0, 1, 10)}}
	c := metricsOf(src)
	c.Services = 0
	began := make(chan bool, 3)
	c.Summary = func() (plan.Status, plan.ServiceRows) {
		began <- true
		st, rows := summaryOf(src)()
		if st.Services[0].Connections.Total == 20 { // the first: the second is to be done before
			time.Sleep(200 * time.Millisecond)
		}
		return st, rows
	}
	reg := NewMetrics(prometheus.NewPedanticRegistry(), c)
	first := make(chan bool)
	go func() {
		_, _ = reg.Gather()
		close(first)
	}()
	<-began
	time.Sleep(50 * time.Millisecond)
	src.mu.Lock()
	src.status.Services = services(0, 1, 11)
	src.mu.Unlock()
	_, _ = reg.Gather()
	<-first
	if got, want := scrape(t, reg, "kproxy_service_connections_total"), (family{1, 22, 22}); got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
}

// TestAnswersStandUntilTheyAreWritten: a scrape doesn't use what another one still writes.
func TestAnswersStandUntilTheyAreWritten(t *testing.T) {
	src := &fakeSource{status: plan.Status{Services: services(0, 1, 10)}}
	m := transaction{NewMetrics(prometheus.NewPedanticRegistry(), metricsOf(src))}
	gather := func(total uint64) (value func() float64, done func()) {
		src.change(func(st *plan.Status) { st.Services = services(0, 1, total) })
		families, done, err := m.Gather()
		if err != nil {
			t.Fatal(err)
		}
		i := slices.IndexFunc(families, func(f *dto.MetricFamily) bool { return f.GetName() == "kproxy_service_connections_total" })
		return families[i].GetMetric()[0].GetCounter().GetValue, done
	}
	first, over := gather(10)
	second, _ := gather(11)
	if first() != 20 || second() != 22 {
		t.Errorf("two at once say %v and %v, want 20 and 22", first(), second())
	}
	over()
	third, _ := gather(12)
	if second() != 22 || third() != 24 {
		t.Errorf("once one is written, another one says %v and the next %v, want 22 and 24", second(), third())
	}
}

// TestNoSeriesOfTheirOwn: with a limit of 0, only the sums are there.
func TestNoSeriesOfTheirOwn(t *testing.T) {
	c := metricsOf(&fakeSource{status: plan.Status{Services: services(0, 7, 10)}})
	c.Services = 0
	reg := NewMetrics(prometheus.NewPedanticRegistry(), c)
	for name, want := range map[string]family{
		"kproxy_service_connections_total":   {1, 140, 140},
		"kproxy_service_endpoints_usable":    {1, 14, 14},
		"kproxy_service_connections_active":  {1, 14, 14},
		"kproxy_endpoint_connections_total":  {1, 140, 140},
		"kproxy_endpoint_connections_active": {1, 14, 14},
		"kproxy_service_info":                {0, -1, 0},
		"kproxy_endpoint_up":                 {0, -1, 0},
	} {
		if got := scrape(t, reg, name); got != want {
			t.Errorf("%s: %+v, want %+v", name, got, want)
		}
	}
}

// TestServiceSeries: every series of a service port and of its endpoints, as they
// are printed.
func TestServiceSeries(t *testing.T) {
	s := services(0, 1, 10)
	s[0].Port = "http"
	s[0].Connections.Failed, s[0].Connections.Retried, s[0].Connections.BytesOut, s[0].Offloads, s[0].Recalls = 3, 4, 5, 7, 6
	s[0].Endpoints = s[0].Endpoints[:1]
	s[0].Endpoints[0].Failures, s[0].Endpoints[0].BytesIn, s[0].Endpoints[0].BytesOut = 1, 2, 3
	s = append(s, plan.ServiceStatus{
		Namespace: "ns", Name: "unknown", Protocol: "UDP", DataPlane: plan.Userspace, State: plan.StateQualifying, Cause: plan.CauseFew,
		Endpoints: []plan.EndpointStatus{{Address: netip.MustParseAddrPort("[fd00::1]:53"), Health: "unknown"}},
	})
	reg := NewMetrics(prometheus.NewPedanticRegistry(), metricsOf(&fakeSource{status: plan.Status{Services: s}}))
	families, err := prometheus.Gatherers{reg}.Gather()
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]float64{}
	for _, f := range families {
		name, ok := strings.CutPrefix(f.GetName(), "kproxy_")
		if !ok || !strings.HasPrefix(name, "service_") && !strings.HasPrefix(name, "endpoint_") {
			continue
		}
		for _, m := range f.GetMetric() {
			key := name
			for _, l := range m.GetLabel() {
				key += " " + l.GetValue()
			}
			got[key] = m.GetCounter().GetValue() + m.GetGauge().GetValue()
		}
	}
	for key := range got {
		if strings.HasPrefix(key, "service_states") || strings.HasPrefix(key, "service_reasons") {
			delete(got, key)
		}
	}
	const web, dns = " ns http TCP svc-00000", " ns  UDP unknown"
	const e1, e2 = " 10.0.0.1:80 ns http TCP svc-00000", " [fd00::1]:53 ns  UDP unknown"
	want := map[string]float64{
		"service_connections_total" + web: 20, "service_connections_failed_total" + web: 3, "service_connections_retried_total" + web: 4,
		"service_received_bytes_total" + web: 10, "service_sent_bytes_total" + web: 5, "service_offloads_total" + web: 7, "service_recalls_total" + web: 6,
		"service_connections_active" + web: 2, "service_endpoints" + web: 1, "service_endpoints_usable" + web: 1,
		"service_info iptables ns http TCP qualified svc-00000 offloaded": 1,
		"service_connections_total" + dns:                                 0, "service_connections_failed_total" + dns: 0, "service_connections_retried_total" + dns: 0,
		"service_received_bytes_total" + dns: 0, "service_sent_bytes_total" + dns: 0, "service_offloads_total" + dns: 0, "service_recalls_total" + dns: 0,
		"service_connections_active" + dns: 0, "service_endpoints" + dns: 1, "service_endpoints_usable" + dns: 0,
		"service_info userspace ns  UDP few-connections unknown qualifying": 1,
		"endpoint_connections_total" + e1:                                   10, "endpoint_failures_total" + e1: 1, "endpoint_received_bytes_total" + e1: 2, "endpoint_sent_bytes_total" + e1: 3,
		"endpoint_connections_active" + e1: 1, "endpoint_usable" + e1: 1, "endpoint_up" + e1: 1,
		"endpoint_connections_total" + e2: 0, "endpoint_failures_total" + e2: 0, "endpoint_received_bytes_total" + e2: 0, "endpoint_sent_bytes_total" + e2: 0,
		"endpoint_connections_active" + e2: 0, "endpoint_usable" + e2: 0,
		"endpoint_ejections_total refused": 0, "endpoint_ejections_total silent": 0, // of all
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("series (-want +got):\n%s", diff)
	}
}

// BenchmarkScrape measures what a scrape of 5,000 service ports with three endpoints
// each costs beside the status: with the default limits, and with series for all.
func BenchmarkScrape(b *testing.B) {
	all := services(0, many(5000), 100)
	for i := range all {
		third := all[i].Endpoints[0]
		third.Address = netip.AddrPortFrom(third.Address.Addr(), 81)
		all[i].Endpoints = append(all[i].Endpoints, third)
	}
	src := &fakeSource{status: plan.Status{Services: all}}
	for name, limits := range map[string][2]int{"bounded": {500, 1000}, "all": {5000, 15000}} {
		b.Run(name, func(b *testing.B) {
			c := metricsOf(src)
			c.Services, c.Endpoints = limits[0], limits[1]
			reg := NewMetrics(prometheus.NewRegistry(), c)
			h := API(APIConfig{Source: src, Recorder: NewRecorder(DefaultRecorderConfig(src)), Gatherer: reg})
			for b.Loop() {
				if w := get(h, "/metrics"); w.Code != 200 {
					b.Fatalf("status %d", w.Code)
				}
			}
		})
	}
}
