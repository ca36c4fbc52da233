package kube

import (
	"os"
	"path/filepath"
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
	for _, folder := range folders {
		out, err := w.kubectl(w.ctx, "apply", "--dry-run=server", "--validate=strict", "-k", folder)
		if err != nil {
			t.Errorf("kubectl apply --dry-run=server -k %s: %v\n%s", folder, err, out)
			continue
		}
		t.Logf("%s:\n%s", folder, out)
	}
}
