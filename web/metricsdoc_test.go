package web

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"kproxy.dev/kproxy/plan"
)

func documentation(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile("../docs/metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// exportedMetric is what a registry says of a metric.
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

// TestMetricsAreDocumented: docs/metrics.md has a row for each of kproxy's own
// metrics, with its type and labels, and no other.
func TestMetricsAreDocumented(t *testing.T) {
	row := regexp.MustCompile("(?m)^\\| `(kproxy_[a-z_]+)(?:\\{([a-z_, ]+)\\})?` \\| ([a-z]+) \\|")
	documented := map[string]exportedMetric{}
	for _, m := range row.FindAllStringSubmatch(documentation(t), -1) {
		documented[m[1]] = exportedMetric{m[3], m[2]}
	}
	reg := prometheus.NewRegistry()
	NewMetrics(reg, metricsOf(shop()))
	if diff := cmp.Diff(documented, gathered(t, reg), cmp.AllowUnexported(exportedMetric{})); diff != "" {
		t.Errorf("metrics (-documented +exported):\n%s", diff)
	}
}

// TestReasonsAreDocumented: docs/metrics.md explains every cause, in order.
func TestReasonsAreDocumented(t *testing.T) {
	_, section, _ := strings.Cut(documentation(t), "### Reasons\n")
	section, _, _ = strings.Cut(section, "\n## ")
	var documented []plan.Cause
	for _, m := range regexp.MustCompile("(?m)^\\| `([a-z-]+)` \\|").FindAllStringSubmatch(section, -1) {
		documented = append(documented, plan.Cause(m[1]))
	}
	if diff := cmp.Diff(documented, plan.Causes); diff != "" {
		t.Errorf("reasons (-documented +those there are):\n%s", diff)
	}
}
