package e2e

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"kproxy.dev/kproxy/service"
)

// TestConfigurationFile: flags win over the file of --config, a change that a
// running kproxy can take over it takes over, a broken file changes nothing,
// and any other change ends the process, which costs no connection.
func TestConfigurationFile(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	w.must(m.Write(w.manifests))
	file := filepath.Join(w.dir, "config.conf")
	write := func(rest string) {
		t.Helper()
		const head = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nclientConnection: {kubeconfig: /no/such/file}\nmode: ipvs\n"
		w.must(os.WriteFile(file+".new", []byte(head+rest), 0o644))
		w.must(os.Rename(file+".new", file))
	}
	// The source of the status that is about the file.
	state := func(wantError string) func() error {
		return func() error {
			st, err := w.client.Status(w.ctx)
			if err != nil {
				return err
			}
			for _, s := range st.Sources {
				if s.Name == file && s.Synced == (wantError == "") && strings.Contains(s.Error, wantError) && (s.Error == "") == s.Synced {
					return nil
				}
			}
			return fmt.Errorf("sources %+v, want %q of %s", st.Sources, wantError, file)
		}
	}
	logged := func(what string) func() error {
		return func() error {
			if !strings.Contains(w.proxy.Log(), what) {
				return errors.New("not in the log")
			}
			return nil
		}
	}

	write("ipvs: {syncPeriod: 30s}\n")
	w.start("--config", file)
	w.eventually(5*time.Second, "the status to name the file", state(""))
	for _, line := range []string{"config.conf:4: mode: \\\"ipvs\\\": ignored: --mode is given", "config.conf:5: ipvs.syncPeriod: \\\"30s\\\": ignored: "} {
		if err := logged(line)(); err != nil {
			t.Errorf("%q: %v", line, err)
		}
	}
	w.pin("web", "line", service.PreferKernel)
	inKernel := w.hold(frontends(m)[0])
	tr := w.traffic("tcp", frontends(m)[0], 60)

	write("enableProfiling: true\n")
	w.eventually(5*time.Second, "profiles to be on", logged("enableProfiling from"))
	write("mode: twice\n")
	w.eventually(5*time.Second, "the broken file to be noticed", state(file+":5: mode: given twice"))
	w.must(w.proxy.Signal(syscall.SIGHUP)) // rereads, and finds it as broken
	write("enableProfiling: true\n")
	w.eventually(5*time.Second, "the file to be good again", state(""))
	if !w.proxy.Running() {
		t.Fatal("kproxy has ended over a file that it can go on with")
	}

	write("iptables: {masqueradeAll: true}\n")
	var exit *exec.ExitError
	if err := w.proxy.Wait(w.ctx); !errors.As(err, &exit) || exit.ExitCode() != 1 {
		t.Errorf("it ended with %v, want exit status 1", err)
	}
	if what := `masqueradeAll from "false" to "true"`; logged(what)() != nil {
		t.Errorf("it doesn't say %s", what)
	}
	sleep(300 * time.Millisecond)
	w.startAgain()
	sleep(300 * time.Millisecond)
	w.noneFailed("across the change of the configuration", tr.Stop())
	w.unbroken("across the change of the configuration", inKernel)
}
