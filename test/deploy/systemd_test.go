package deploy

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"kproxy.dev/kproxy/config"
)

// TestSystemdUnit: the unit is what systemd takes, leaves kproxy the time it needs to drain, and the
// capabilities that the DaemonSet has.
func TestSystemdUnit(t *testing.T) {
	text, err := os.ReadFile("../../deploy/systemd/kproxy.service")
	if err != nil {
		t.Fatal(err)
	}
	set := map[string]string{}
	for line := range strings.Lines(string(text)) {
		if name, value, ok := strings.Cut(strings.TrimSpace(line), "="); ok && !strings.HasPrefix(name, "#") {
			set[name] = value
		}
	}
	if set["Type"] != "notify" {
		t.Errorf("the service's type is %q: others may start before it serves", set["Type"])
	}
	if d, err := time.ParseDuration(set["TimeoutStopSec"]); err != nil || d <= config.Default().DrainTimeout {
		t.Errorf("systemd kills it after %s (%v), while it drains for %s", d, err, config.Default().DrainTimeout)
	}
	pod, err := load(t).container("kproxy")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range pod.SecurityContext.Capabilities.Add {
		if !slices.Contains(strings.Fields(set["CapabilityBoundingSet"]), "CAP_"+string(c)) {
			t.Errorf("it hasn't the capability %s", c)
		}
	}

	program, err := exec.LookPath("systemd-analyze")
	if err != nil {
		t.Log("systemd-analyze isn't installed, so systemd itself wasn't asked")
		return
	}
	self, err := os.Executable() // there is no kproxy in /usr/local/bin
	if err != nil {
		t.Fatal(err)
	}
	unit := filepath.Join(t.TempDir(), "kproxy.service")
	if err := os.WriteFile(unit, []byte(strings.ReplaceAll(string(text), "/usr/local/bin/kproxy", self)), 0o644); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.CommandContext(t.Context(), program, "verify", unit).CombinedOutput(); err != nil || len(out) > 0 {
		t.Errorf("systemd-analyze verify: %v\n%s", err, out)
	}
}
