package e2e

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// metrics are the samples of /metrics, as they are printed.
func (w *world) metrics() (map[string]float64, error) {
	resp, err := w.net.Node.HTTPClient(within(5 * time.Second)).Get("http://127.0.0.1:10249/metrics")
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	out := map[string]float64{}
	lines := bufio.NewScanner(resp.Body)
	for lines.Scan() {
		line := lines.Text()
		if at := strings.LastIndex(line, " "); at > 0 && !strings.HasPrefix(line, "#") { // labels may have spaces
			if out[line[:at]], err = strconv.ParseFloat(line[at+1:], 64); err != nil {
				return nil, err
			}
		}
	}
	return out, lines.Err()
}

// metric waits until a metric is as it should be.
func (w *world) metric(name string, right func(float64) bool) {
	w.Helper()
	w.eventually(20*time.Second, "metric "+name, func() error {
		m, err := w.metrics()
		if v, ok := m[name]; err == nil && (!ok || !right(v)) {
			err = fmt.Errorf("there %v, %g", ok, v)
		}
		return err
	})
}

// tables returns the tables whose rules kproxy counts.
func tables() []string {
	if kernelPlane == plan.NFTables {
		return []string{"kproxy"}
	}
	return []string{"nat", "filter"}
}

// TestKubeProxyMetrics: what kube-proxy's dashboards look at follows what happens.
func TestKubeProxyMetrics(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	m.InternalLocal = true
	w.must(m.Write(w.manifests))
	w.start()
	positive := func(v float64) bool { return v > 0 }
	is := func(want float64) func(float64) bool { return func(v float64) bool { return v == want } }
	w.pin("web", "line", service.PreferKernel)
	w.metric(`kubeproxy_sync_proxy_rules_duration_seconds_count{ip_family="IPv6"}`, positive)
	w.metric(`kubeproxy_sync_proxy_rules_last_timestamp_seconds{ip_family="IPv4"}`, positive)
	w.metric(`kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds{ip_family="IPv4"}`, positive)
	for _, table := range tables() {
		w.metric(`kubeproxy_sync_proxy_rules_iptables_total{ip_family="IPv6",table="`+table+`"}`, positive)
	}
	w.metric("kubeproxy_sync_proxy_rules_service_changes_total", is(1))
	w.metric("kubeproxy_sync_proxy_rules_endpoint_changes_total", is(1))
	w.metric("kubeproxy_sync_proxy_rules_service_changes_pending", is(0))
	w.metric(`kubeproxy_sync_proxy_rules_no_local_endpoints_total{ip_family="IPv4",traffic_policy="internal"}`, is(0))
	for i := range m.Endpoints {
		m.Endpoints[i].Node = "another"
	}
	w.must(m.Write(w.manifests))
	w.metric(`kubeproxy_sync_proxy_rules_no_local_endpoints_total{ip_family="IPv4",traffic_policy="internal"}`, is(3)) // its ports
	w.metric("kubeproxy_sync_proxy_rules_service_changes_total", is(1))
	w.metric("kubeproxy_sync_proxy_rules_endpoint_changes_total", is(2))
	w.metric("kubeproxy_sync_proxy_rules_endpoint_changes_pending", is(0))
	w.metric(`kubeproxy_sync_proxy_rules_iptables_restore_failures_total{ip_family="IPv4"}`, is(0))
}

// watchCounters scrapes again and again until the function it returns is called,
// which fails the test where a counter ran backwards from one scrape to the next.
func (w *world) watchCounters() (stop func()) {
	ctx, cancel := context.WithCancel(w.ctx)
	var done sync.WaitGroup
	done.Go(func() {
		last := map[string]float64{}
		for scrapes := 1; ctx.Err() == nil; scrapes++ {
			now, err := w.metrics()
			if err != nil {
				continue // kproxy is starting, or the test has ended
			}
			for name, v := range now {
				metric, _, _ := strings.Cut(name, "{")
				if was, known := last[name]; known && v < was && isCounter(metric) {
					w.Errorf("counter %s ran back from %g to %g in scrape %d", name, was, v, scrapes)
				}
			}
			last = now
			select {
			case <-ctx.Done():
			case <-time.After(within(20 * time.Millisecond)):
			}
		}
	})
	return func() { cancel(); done.Wait() }
}

// isCounter goes by names, except where kube-proxy's gauges are called like counters.
func isCounter(metric string) bool {
	switch metric {
	case "kubeproxy_sync_proxy_rules_iptables_total", "kubeproxy_sync_proxy_rules_no_local_endpoints_total":
		return false
	}
	for _, end := range []string{"_total", "_count", "_sum", "_bucket"} {
		if strings.HasSuffix(metric, end) {
			return true
		}
	}
	return false
}

// sumOf adds up the series of a metric that have all the labels, written as in a
// scrape.
func (w *world) sumOf(metric string, labels ...string) (sum float64, series int) {
	w.Helper()
	m, err := w.metrics()
	w.must(err)
	for name, v := range m {
		if head, rest, _ := strings.Cut(name, "{"); head == metric && !slices.ContainsFunc(labels, func(l string) bool { return !strings.Contains(rest, l) }) {
			sum += v
			series++
		}
	}
	return sum, series
}

// becomes waits until a sum is what it should be.
func (w *world) becomes(want float64, metric string, labels ...string) {
	w.Helper()
	w.eventually(20*time.Second, fmt.Sprintf("%s%v to become %g", metric, labels, want), func() error {
		if got, n := w.sumOf(metric, labels...); got != want {
			return fmt.Errorf("%d series, together %g", n, got)
		}
		return nil
	})
}

// TestMetricsFollowConnections: what a service carries is counted in userspace and
// in the kernel, by service and by endpoint, and goes on being counted when it
// moves to and fro; no counter ever runs backwards.
func TestMetricsFollowConnections(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	w.must(m.Write(w.manifests))
	w.start()
	stop := w.watchCounters()
	const line = `port="line",protocol="TCP",service="web"`
	carried := 0.0
	var held []*lab.Held
	for i, to := range []service.Preference{service.PreferUserspace, service.PreferKernel, service.PreferUserspace, service.PreferKernel} {
		w.pin("web", "line", to)
		for _, target := range frontends(m) {
			w.noneFailed(fmt.Sprintf("move %d", i), w.burst(target, 10))
			held = append(held, w.hold(target))
		}
		carried += 22
		w.becomes(carried, "kproxy_service_connections_total", line)
		w.becomes(carried, "kproxy_endpoint_connections_total", line)
		w.becomes(float64(len(held)), "kproxy_service_connections_active", line)
		w.becomes(float64(len(held)), "kproxy_endpoint_connections_active", line)
		plane := map[service.Preference]plan.DataPlane{service.PreferUserspace: plan.Userspace, service.PreferKernel: w.plane}[to]
		w.becomes(1, "kproxy_service_info", `service="web"`, `port="line"`, fmt.Sprintf("dataplane=%q", plane), `reason="pinned"`, `state="pinned"`)
	}
	w.becomes(2, "kproxy_offloads_total", `reason="pinned"`)
	w.becomes(1, "kproxy_recalls_total", `reason="pinned"`)
	w.becomes(2, "kproxy_service_offloads_total", line)
	w.becomes(1, "kproxy_service_recalls_total", line)
	w.becomes(float64(len(m.Endpoints)*2), "kproxy_endpoint_up", line) // of both families
	w.becomes(float64(len(m.Endpoints)*2), "kproxy_service_endpoints_usable", line)
	for _, way := range []string{"received", "sent"} {
		all, _ := w.sumOf("kproxy_service_"+way+"_bytes_total", line)
		each, n := w.sumOf("kproxy_endpoint_"+way+"_bytes_total", line)
		if all < carried || each < carried || n != len(m.Endpoints)*2 {
			t.Errorf("%s: %g bytes by service, %g by %d endpoints, after %g connections", way, all, each, n, carried)
		}
	}
	w.unbroken("while they are counted", held...)
	w.must(os.Remove(m.Path(w.manifests)))
	w.becomes(0, "kproxy_service_connections_total")
	stop()
	if left := w.seriesOf("web"); len(left) > 0 {
		t.Errorf("series of a service that was deleted: %v", left)
	}
}

// seriesOf are the names of the series of a service and its endpoints.
func (w *world) seriesOf(name string) []string {
	w.Helper()
	m, err := w.metrics()
	w.must(err)
	var out []string
	for series := range maps.Keys(m) {
		if strings.Contains(series, fmt.Sprintf("service=%q", name)) {
			out = append(out, series)
		}
	}
	return out
}

// TestMetricsOfTrouble: endpoints that fail are counted with what became of the
// connections, and a recall with its reason; what others damage in the kernel,
// with its repair.
func TestMetricsOfTrouble(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	w.must(m.Write(w.manifests))
	w.start("--health-check", "off")
	stop := w.watchCounters()
	const line = `port="line",protocol="TCP",service="web"`
	w.ask(w.net.Client, "tcp", frontends(m)[0])
	w.await("web", "line", w.plane, plan.StateOffloaded)
	w.becomes(1, "kproxy_offloads_total", `reason="qualified"`)
	w.must(w.net.Backend("b1").Fail(w.ctx, lab.Refuse))
	tr := w.traffic("tcp", frontends(m)[0], 60)
	w.awaitUnused("web", "line", "10.2.0.2")
	w.becomes(1, "kproxy_endpoint_ejections_total", `reason="refused"`)
	w.becomes(1, "kproxy_endpoints_ejected")
	w.must(w.net.Backend("b1").Fail(w.ctx, lab.Healthy))
	w.becomes(0, "kproxy_endpoints_ejected")
	w.pin("web", "line", service.PreferUserspace)
	w.must(w.net.Backend("b1").Fail(w.ctx, lab.Refuse))
	w.eventually(20*time.Second, "retries", func() error {
		retried, _ := w.sumOf("kproxy_service_connections_retried_total", line)
		failures, _ := w.sumOf("kproxy_endpoint_failures_total", line, `endpoint="10.2.0.2:9000"`)
		if retried == 0 || failures < retried {
			return fmt.Errorf("%g retried, %g failures of the endpoint", retried, failures)
		}
		return nil
	})
	tr.Stop()
	for _, b := range w.net.Backends {
		w.must(b.Fail(w.ctx, lab.Refuse))
	}
	w.burst(frontends(m)[0], 3)
	w.eventually(20*time.Second, "failed connections", func() error {
		if failed, _ := w.sumOf("kproxy_service_connections_failed_total", line); failed == 0 {
			return fmt.Errorf("none")
		}
		return nil
	})
	before, _ := w.sumOf("kproxy_service_connections_failed_total", line)
	w.pin("web", "line", service.PreferKernel)
	refused := w.burst(frontends(m)[0], 3).Failed()
	w.eventually(20*time.Second, "the kernel's failed connections", func() error {
		failed, _ := w.sumOf("kproxy_service_connections_failed_total", line)
		failures, _ := w.sumOf("kproxy_endpoint_failures_total", line)
		if len(refused) == 0 || failed < before+float64(len(refused)) || failures < failed {
			return fmt.Errorf("%d clients were refused; %g failed, %g before; %g failures of endpoints", len(refused), failed, before, failures)
		}
		return nil
	})
	if up, n := w.sumOf("kproxy_endpoint_up"); up > 0 || n > len(w.net.Backends) {
		t.Errorf("without a health check %d endpoints have one, %g of them up; want only those that are ejected, and down", n, up)
	}
	w.becomes(0, "kproxy_repairs_total")
	sets, rules := "ipset flush KPROXY-USER-4", "iptables -t nat -F KPROXY-SERVICES"
	if kernelPlane == plan.NFTables {
		sets, rules = "nft flush set ip kproxy userspace", "nft flush chain ip kproxy services"
	}
	w.inflict(variant, sets)
	repaired := 0.0
	if kernelPlane == plan.NFTables { // in which one look finds what is damaged of either
		w.becomes(1, "kproxy_repairs_total", `object="rules"`)
		repaired = 1
	} else {
		w.becomes(1, "kproxy_repairs_total", `object="sets"`)
	}
	w.settled() // or one repair mends both
	w.inflict(variant, rules)
	w.eventually(20*time.Second, "a repair of rules", func() error {
		if n, _ := w.sumOf("kproxy_repairs_total", `object="rules"`); n <= repaired {
			return fmt.Errorf("%g", n)
		}
		return nil
	})
	stop()
}

// TestMetricsOfTheKernel: sets, virtual servers, conntrack and descriptors are
// what the kernel has.
func TestMetricsOfTheKernel(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	w.must(m.Write(w.manifests))
	w.start()
	w.pin("web", "line", service.PreferKernel)
	w.pin("web", "http", service.PreferUserspace)
	w.pin("web", "datagram", service.PreferUserspace)
	userspace := `set="KPROXY-USER-4"`
	if kernelPlane == plan.NFTables {
		userspace = `set="ip kproxy userspace"`
	}
	w.becomes(2, "kproxy_set_entries", userspace)
	w.pin("web", "http", service.PreferKernel)
	w.becomes(1, "kproxy_set_entries", userspace)
	ports, reals := 0.0, 0.0
	if w.plane == plan.IPVS { // in both families
		ports, reals = float64(2*len(m.Ports)), float64(2*len(m.Ports)*len(m.Endpoints))
	}
	w.becomes(ports, "kproxy_virtual_servers")
	w.becomes(reals, "kproxy_real_servers")
	held := w.hold(frontends(m)[0])
	for _, name := range []string{
		"kproxy_conntrack_entries", "kproxy_conntrack_entries_limit", "kproxy_userspace_descriptors_limit", `kproxy_kernel_writes_total{object="rule"}`,
		`kproxy_kernel_writes_total{object="set_entry"}`, `kubeproxy_sync_proxy_rules_iptables_total{ip_family="IPv4",table="` + tables()[0] + `"}`,
	} {
		metric, label, _ := strings.Cut(strings.TrimSuffix(name, "}"), "{")
		if v, n := w.sumOf(metric, label); v <= 0 {
			t.Errorf("%s: %d series, together %g; want something", name, n, v)
		}
	}
	w.pin("web", "http", service.PreferUserspace)
	rows, err := w.client.Connections(w.ctx, "")
	w.must(err)
	used := 0.0
	for _, r := range rows {
		if r.DataPlane == plan.Userspace && r.Protocol == "TCP" {
			used += 2 // a socket to the client, one to the endpoint
		}
	}
	if v, _ := w.sumOf("kproxy_userspace_descriptors", `protocol="TCP"`); v < used {
		t.Errorf("%g descriptors in use, connections in userspace alone have %g", v, used)
	}
	w.unbroken("meanwhile", held)
	w.stop()
	w.startAgain() // and adopts what is there: it has nothing to write
	w.becomes(ports, "kproxy_virtual_servers")
	w.becomes(reals, "kproxy_real_servers")
	w.metric(`kubeproxy_sync_proxy_rules_iptables_total{ip_family="IPv4",table="`+tables()[0]+`"}`, func(v float64) bool { return v > 0 })
	w.becomes(0, "kproxy_offloads_total")
}

// TestMetricsWithinLimits: beyond the limit, services share one series, which
// keeps what those carried that are gone.
func TestMetricsWithinLimits(t *testing.T) {
	w := newWorld(t)
	first, second := newManifest("a", 10, w.net.Backends...), newManifest("b", 11, w.net.Backends...)
	w.must(first.Write(w.manifests))
	w.must(second.Write(w.manifests))
	w.start("--metrics-service-limit", fmt.Sprint(len(first.Ports)), "--metrics-endpoint-limit", "1")
	stop := w.watchCounters()
	w.noneFailed("a", w.burst(frontends(first)[0], 5))
	w.noneFailed("b", w.burst(frontends(second)[0], 7))
	w.becomes(5, "kproxy_service_connections_total", `service="a"`)
	w.becomes(7, "kproxy_service_connections_total", `service="other"`)
	w.becomes(12, "kproxy_service_connections_total")
	w.becomes(12, "kproxy_endpoint_connections_total")
	w.becomes(float64(len(second.Ports)), "kproxy_metrics_shared", `object="service"`)
	w.becomes(float64(2*len(first.Ports)*len(first.Endpoints)*2-1), "kproxy_metrics_shared", `object="endpoint"`)
	w.must(os.Remove(second.Path(w.manifests)))
	w.becomes(0, "kproxy_metrics_shared", `object="service"`)
	w.becomes(12, "kproxy_service_connections_total")
	if own := w.seriesOf("b"); len(own) > 0 {
		t.Errorf("series beyond the limit: %v", own)
	}
	stop()
}

// scraped holds what one scrape brought.
type scraped struct {
	text string
	wire int // bytes, compressed
	took time.Duration
}

// scrape asks for /metrics as Prometheus does: compressed.
func (w *world) scrape() (scraped, error) {
	start := time.Now()
	c := http.Client{Timeout: within(30 * time.Second), Transport: &http.Transport{
		DisableKeepAlives: true, DisableCompression: true,
		DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
			return w.net.Node.Dial(ctx, network, address)
		},
	}}
	req, err := http.NewRequestWithContext(w.ctx, http.MethodGet, "http://127.0.0.1:10249/metrics", nil)
	if err != nil {
		return scraped{}, err
	}
	req.Header.Set("Accept", "text/plain;version=0.0.4;q=0.5,*/*;q=0.1")
	req.Header.Set("Accept-Encoding", "gzip")
	resp, err := c.Do(req)
	if err != nil {
		return scraped{}, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK || resp.Header.Get("Content-Encoding") != "gzip" {
		return scraped{}, fmt.Errorf("%s, encoded as %q", resp.Status, resp.Header.Get("Content-Encoding"))
	}
	wire := &counted{r: resp.Body}
	z, err := gzip.NewReader(wire)
	if err != nil {
		return scraped{}, err
	}
	text, err := io.ReadAll(z)
	return scraped{string(text), wire.n, time.Since(start)}, err
}

// counted counts what is read.
type counted struct {
	r io.Reader
	n int
}

func (c *counted) Read(b []byte) (int, error) {
	n, err := c.r.Read(b)
	c.n += n
	return n, err
}

// TestScrapesOfManyServices: with 5,000 services of three endpoints, two scrapes
// at a time are answered in full, with the usual limits and with series for
// everything. How long they take is in the log.
func TestScrapesOfManyServices(t *testing.T) {
	t.Parallel()
	const many = 5000
	for _, tt := range []struct {
		name                string
		args                []string
		services, endpoints int // series of each
		offloaded           bool
	}{
		{"kernel", []string{"--offload-min-connections", "0"}, 501, 1001, true},
		{"userspace", []string{"--mode", "userspace"}, 501, 1001, false},
		{"all series", []string{"--mode", "userspace", "--metrics-service-limit", "10000", "--metrics-endpoint-limit", "100000"}, many, 3 * many, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newLoneWorld(t)
			var endpoints []netip.Addr
			for _, b := range w.net.Backends {
				endpoints = append(endpoints, b.Addresses[0])
			}
			write(t, filepath.Join(w.manifests, "many.yaml"), manyServices(many, endpoints...))
			w.start(tt.args...)
			if tt.offloaded {
				w.eventually(3*time.Minute, "all to be offloaded", func() error { return w.allIn(w.plane, many) })
			}
			w.scrapeTwice(tt.services, tt.endpoints)
			w.ask(w.net.Client, "tcp", netip.AddrPortFrom(nthService(many-1), 80))
		})
	}
}

// allIn reports whether so many services are in a data plane.
func (w *world) allIn(plane plan.DataPlane, want int) error {
	sleep(500 * time.Millisecond)
	m, err := w.metrics()
	if got := m[fmt.Sprintf("kproxy_services{dataplane=%q}", plane)]; err == nil && got != float64(want) {
		err = fmt.Errorf("%g are in %s", got, plane)
	}
	return err
}

// scrapeTwice scrapes one at a time, and then two at once.
func (w *world) scrapeTwice(services, endpoints int) {
	w.Helper()
	for _, scrapers := range []int{1, 2} {
		got := make([]scraped, scrapers)
		errs := make([]error, scrapers)
		var all sync.WaitGroup
		for i := range scrapers {
			all.Go(func() { got[i], errs[i] = w.scrape() })
		}
		all.Wait()
		w.must(errors.Join(errs...))
		for i, s := range got {
			w.Logf("scrape %d of %d: %s, %d bytes on the wire, %d of text, %d series",
				i+1, scrapers, s.took.Round(time.Millisecond), s.wire, len(s.text), strings.Count(s.text, "\n"))
			if n := strings.Count(s.text, "\nkproxy_service_connections_total{"); n != services {
				w.Errorf("scrape %d of %d: %d series of services, want %d", i+1, scrapers, n, services)
			}
			if n := strings.Count(s.text, "\nkproxy_endpoint_connections_total{"); n != endpoints {
				w.Errorf("scrape %d of %d: %d series of endpoints, want %d", i+1, scrapers, n, endpoints)
			}
			if !strings.HasSuffix(s.text, "\n") {
				w.Errorf("scrape %d of %d was cut short", i+1, scrapers)
			}
		}
	}
}

// kubeProxysGauges are gauges that kube-proxy calls like counters. Dashboards know
// them by these names, so they stay, and promtool says so of each.
var kubeProxysGauges = []string{
	`kubeproxy_sync_proxy_rules_iptables_total non-counter metrics should not have "_total" suffix`,
	`kubeproxy_sync_proxy_rules_no_local_endpoints_total non-counter metrics should not have "_total" suffix`,
}

// TestMetricsAreInOrder: promtool finds nothing to complain about in what a live
// kproxy exports, in mode userspace and in the one under test; and everything that
// the dashboard and the alerts in deploy/ ask for is there.
func TestMetricsAreInOrder(t *testing.T) {
	t.Parallel()
	promtool := promtoolPath(t)
	for _, mode := range []plan.Mode{plan.ModeUserspace, mode} {
		t.Run(string(mode), func(t *testing.T) {
			w := newWorld(t)
			m := newManifest("web", 10, w.net.Backends...)
			w.must(m.Write(w.manifests))
			w.start("--mode", string(mode))
			if mode != plan.ModeUserspace {
				w.pin("web", "line", service.PreferKernel)
			}
			for _, target := range frontends(m) {
				w.ask(w.net.Client, "tcp", target)
			}
			w.metric(`kproxy_endpoint_up{endpoint="10.2.0.2:9000",namespace="default",port="line",protocol="TCP",service="web"}`, func(v float64) bool { return v == 1 })
			got, err := w.scrape()
			w.must(err)
			if problems := checkMetrics(t, promtool, got.text); !cmp.Equal(problems, kubeProxysGauges) {
				t.Errorf("promtool check metrics (-want +got):\n%s", cmp.Diff(kubeProxysGauges, problems))
			}
			exported, asked := namesIn(got.text), asked(t)
			for _, name := range asked {
				if !exported[name] {
					t.Errorf("deploy/monitoring asks for %s, which isn't exported", name)
				}
			}
			for name := range exported {
				if strings.HasPrefix(name, "kproxy_") && !slices.Contains(asked, name) {
					t.Errorf("%s is exported, and nothing in deploy/monitoring shows it", name)
				}
			}
		})
	}
}

// promtoolPath returns the path of promtool, which test/setup.sh has fetched. It skips
// the test if there is none.
func promtoolPath(t *testing.T) string {
	t.Helper()
	cmd := exec.Command("../monitoring/promtool.sh")
	out, err := cmd.Output()
	if err != nil {
		t.Skipf("no promtool: %v; test/setup.sh test fetches it", err)
	}
	return strings.TrimSpace(string(out))
}

// checkMetrics returns the problems that promtool finds in a scrape, sorted.
func checkMetrics(t *testing.T, promtool, text string) []string {
	t.Helper()
	cmd := exec.Command(promtool, "check", "metrics")
	cmd.Stdin = strings.NewReader(text)
	var said bytes.Buffer
	cmd.Stdout, cmd.Stderr = &said, &said
	err := cmd.Run()
	problems := slices.Sorted(strings.Lines(said.String()))
	for i := range problems {
		problems[i] = strings.TrimSpace(problems[i])
	}
	if err != nil && len(problems) == 0 {
		t.Fatalf("promtool check metrics: %v", err)
	}
	return problems
}

// namesIn are the names of the metrics of a scrape: of families, and of a
// histogram's parts.
func namesIn(text string) map[string]bool {
	out := map[string]bool{}
	for _, m := range regexp.MustCompile(`(?m)^(?:# TYPE )?([a-z0-9_]+)[{ ]`).FindAllStringSubmatch(text, -1) {
		out[m[1]] = true
	}
	return out
}

// asked are the metrics that occur in deploy/monitoring.
func asked(t *testing.T) []string {
	t.Helper()
	seen := map[string]bool{}
	for _, file := range []string{"rules.yaml", "dashboard.json"} {
		text, err := os.ReadFile(filepath.Join("../../deploy/monitoring", file))
		if err != nil {
			t.Fatal(err)
		}
		names := regexp.MustCompile(`\b(?:kproxy|kubeproxy|process|go)_[a-z0-9_]+\b`).FindAllString(string(text), -1)
		if len(names) == 0 {
			t.Fatalf("no metrics in %s", file)
		}
		for _, name := range names {
			seen[name] = true
		}
	}
	var out []string
	for name := range seen {
		out = append(out, name)
	}
	slices.Sort(out)
	return out
}
