package e2e

import (
	"bytes"
	"os"
	"strconv"
	"syscall"
	"testing"
	"time"
)

// TestStoppedWhileStarting: whenever SIGTERM comes, kproxy ends in good order,
// also while it is still finding out what the host can do.
func TestStoppedWhileStarting(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	w.must(m.Write(w.manifests))
	for i := range 20 {
		cmd := command(t, "run", "--mode", string(mode), "--manifests", w.manifests, "--socket", w.socket(),
			"--state-dir", w.dir+"/state"+strconv.Itoa(i), "--hostname-override", "node", "--drain-timeout", "100ms")
		var log bytes.Buffer
		cmd.Stderr = &log
		w.must(w.net.Node.Do(cmd.Start))
		w.eventually(10*time.Second, "the control socket, which is opened first", func() error {
			_, err := os.Stat(w.socket())
			return err
		})
		time.Sleep(time.Duration(i) * within(15*time.Millisecond))
		w.must(cmd.Process.Signal(syscall.SIGTERM))
		if err := cmd.Wait(); err != nil {
			t.Errorf("SIGTERM while kproxy starts: %v, want exit status 0\n%s", err, &log)
		}
	}
}
