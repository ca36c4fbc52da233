package main

import (
	"os"
	"os/exec"
	"testing"
)

// Who asks for a version of Kubernetes that isn't built here reads which are.
func TestUnknownKubernetes(t *testing.T) {
	for _, version := range []string{"foo", "1.12", "1.3", "1.35.4", "*"} {
		cmd := exec.Command("../kube/setup.sh", "conformance")
		cmd.Env = append(os.Environ(), "KUBERNETES="+version)
		out, err := cmd.CombinedOutput()
		want := `KUBERNETES: no minor version "` + version + `" is built here; there are 1.35, 1.36, 1.37` + "\n"
		if cmd.ProcessState.ExitCode() != 2 || string(out) != want {
			t.Errorf("setup.sh: %v, %s, want exit status 2 and %s", err, out, want)
		}
	}
}
