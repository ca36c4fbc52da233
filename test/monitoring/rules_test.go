package monitoring

import (
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"
)

var update = flag.Bool("update", false, "write prometheusrule.yaml from rules.yaml")

const folder = "../../deploy/monitoring"

// ruleFile is a file of Prometheus' rules.
type ruleFile struct {
	Groups []struct {
		Name  string `json:"name"`
		Rules []rule `json:"rules"`
	} `json:"groups"`
}

type rule struct {
	Alert       string            `json:"alert"`
	Expr        string            `json:"expr"`
	For         string            `json:"for,omitempty"`
	Labels      map[string]string `json:"labels,omitempty"`
	Annotations map[string]string `json:"annotations,omitempty"`
}

func read(t *testing.T, path string) []byte {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

func rules(t *testing.T) ruleFile {
	t.Helper()
	var f ruleFile
	if err := yaml.UnmarshalStrict(read(t, filepath.Join(folder, "rules.yaml")), &f); err != nil {
		t.Fatal(err)
	}
	return f
}

// promtool runs it and returns what it said; it fails the test if promtool does.
func promtool(t *testing.T, args ...string) string {
	t.Helper()
	path, err := exec.Command("./promtool.sh").Output()
	if err != nil {
		t.Skipf("no promtool: %v; test/setup.sh test fetches it", err)
	}
	out, err := exec.Command(strings.TrimSpace(string(path)), args...).CombinedOutput()
	if err != nil {
		t.Errorf("promtool %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return string(out)
}

// write puts a value into a file of YAML and returns its path.
func write(t *testing.T, folder, name string, v any) string {
	t.Helper()
	text, err := yaml.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(folder, name)
	if err := os.WriteFile(path, text, 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestRules(t *testing.T) {
	promtool(t, "check", "rules", filepath.Join(folder, "rules.yaml"))
	seen := map[string]bool{}
	for _, g := range rules(t).Groups {
		for _, r := range g.Rules {
			if seen[r.Alert] || !strings.HasPrefix(r.Alert, "KProxy") {
				t.Errorf("%s: not a name of its own that begins with KProxy", r.Alert)
			}
			seen[r.Alert] = true
			switch r.Labels["severity"] {
			case "critical", "warning", "info":
			default:
				t.Errorf("%s: severity %q", r.Alert, r.Labels["severity"])
			}
			for _, name := range []string{"summary", "description", "action"} {
				if text := r.Annotations[name]; text == "" || !strings.HasSuffix(text, ".") && !strings.HasSuffix(text, "?") {
					t.Errorf("%s: %s %q is no sentence", r.Alert, name, text)
				}
			}
		}
	}
}

// TestRulesFire: every alert fires on time series of its trouble, and on none that
// look like it. promtool compares all annotations, so those that don't depend on
// anything are left out here.
func TestRulesFire(t *testing.T) {
	dir := t.TempDir()
	f := rules(t)
	tests := read(t, "testdata/rules_test.yaml")
	for _, g := range f.Groups {
		for i := range g.Rules {
			r := &g.Rules[i]
			for _, name := range []string{"description", "action"} {
				if name == "action" || !strings.Contains(r.Annotations[name], "{{") {
					delete(r.Annotations, name)
				}
			}
			if !strings.Contains(string(tests), "alertname: "+r.Alert+"\n") {
				t.Errorf("no test has %s fire", r.Alert)
			}
		}
	}
	write(t, dir, "rules.yaml", f)
	if err := os.WriteFile(filepath.Join(dir, "rules_test.yaml"), tests, 0o644); err != nil {
		t.Fatal(err)
	}
	promtool(t, "test", "rules", filepath.Join(dir, "rules_test.yaml"))
}

const generated = `# rules.yaml for the Prometheus operator; go test ./test/monitoring -update writes it.
`

// TestPrometheusRule: the operator's object has the rules of the plain file.
func TestPrometheusRule(t *testing.T) {
	type object map[string]any
	want, err := yaml.Marshal(object{
		"apiVersion": "monitoring.coreos.com/v1", "kind": "PrometheusRule",
		"metadata": object{"name": "kproxy", "namespace": "kube-system", "labels": object{"k8s-app": "kproxy"}},
		"spec":     rules(t),
	})
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(folder, "prometheusrule.yaml")
	if *update {
		if err := os.WriteFile(path, append([]byte(generated), want...), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if diff := cmp.Diff(generated+string(want), string(read(t, path))); diff != "" {
		t.Errorf("%s isn't of rules.yaml, run go test ./test/monitoring -update (-want +got):\n%s", path, diff)
	}
}
