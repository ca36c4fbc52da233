package kube

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"kproxy.dev/kproxy/plan"
)

// TestDeploy has the API server validate what is in deploy/, as kubectl
// --dry-run=server does, with every overlay.
func TestDeploy(t *testing.T) {
	w := newWorld(t, plan.ModeIPTables)
	folders := []string{"../../deploy"}
	overlays, err := os.ReadDir("../../deploy/overlays")
	w.must(err)
	for _, o := range overlays {
		folders = append(folders, filepath.Join("../../deploy/overlays", o.Name()))
	}
	folders = append(folders, overlay(t, "components/metrics"))
	for _, folder := range folders {
		out, err := w.kubectl(w.ctx, "apply", "--dry-run=server", "--validate=strict", "-k", folder)
		if err != nil {
			t.Errorf("kubectl apply --dry-run=server -k %s: %v\n%s", folder, err, out)
			continue
		}
		t.Logf("%s:\n%s", folder, out)
	}
	w.showsMonitoring()
}

// showsMonitoring: what the Prometheus operator is given comes out of kustomize
// whole. The API server here doesn't know its kinds.
func (w *world) showsMonitoring() {
	w.Helper()
	out, err := w.kubectl(w.ctx, "kustomize", overlay(w.T, "monitoring"))
	w.must(err)
	for _, want := range []string{"kind: PodMonitor", "kind: PrometheusRule", "name: kproxy-dashboard", "--metrics-bind-address=$(POD_IP)"} {
		if !strings.Contains(string(out), want) {
			w.Errorf("there is no %q in\n%s", want, out)
		}
	}
}

// overlay is a folder with deploy/base and one of the components in deploy/.
func overlay(t *testing.T, component string) string {
	t.Helper()
	dir := t.TempDir()
	deploy, err := filepath.Abs("../../deploy")
	if err != nil {
		t.Fatal(err)
	}
	to, err := filepath.Rel(dir, deploy)
	if err != nil {
		t.Fatal(err)
	}
	text := "resources: [" + to + "/base]\ncomponents: [" + to + "/" + component + "]\n"
	if err := os.WriteFile(filepath.Join(dir, "kustomization.yaml"), []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	return dir
}
