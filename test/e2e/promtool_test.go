package e2e

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

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

// promtoolPath is where promtool is, which test/setup.sh has fetched.
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
