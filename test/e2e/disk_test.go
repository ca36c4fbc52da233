package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/web"
)

// sourceSays waits until the status says something of where services come from, or no more.
func (w *world) sourceSays(what string, wanted bool) {
	w.Helper()
	w.eventually(time.Minute, fmt.Sprintf("the status to say %q: %v", what, wanted), func() error {
		st, err := w.client.Status(w.ctx)
		if err != nil {
			return err
		}
		var said []string
		for _, s := range st.Sources {
			said = append(said, s.Error)
		}
		if all := strings.Join(said, ""); strings.Contains(all, what) != wanted {
			return fmt.Errorf("it says %q", all)
		}
		return nil
	})
}

// TestDisk: what kproxy keeps on disk doesn't keep it from serving. With a full disk, pins and drains are refused, and the status says that
// the API's state isn't saved, until there is room. A saved state that is damaged isn't served when the API is away, and log and
// status say so.
func TestDisk(t *testing.T) {
	w := newWorld(t)
	dir := filepath.Join(w.dir, "state")
	w.must(os.Mkdir(dir, 0o755))
	w.must(unix.Mount("tmpfs", dir, "tmpfs", 0, "size=32k"))
	w.Cleanup(func() { w.must(unix.Unmount(dir, unix.MNT_DETACH)) })
	filler := filepath.Join(dir, "filler")
	if err := os.WriteFile(filler, make([]byte, 64<<10), 0o600); !errors.Is(err, unix.ENOSPC) {
		t.Fatalf("the disk isn't full: %v", err)
	}
	m := newManifest("web", 10, w.net.Backends...)
	at := frontends(m)[0]
	w.cluster = w.newCluster()
	w.must(w.cluster.set(m))

	w.start()
	w.ready()
	w.sourceSays("no space left on device", true)
	w.ask(w.net.Client, "tcp", at)
	_, pinned := w.client.Pin(w.ctx, web.PinRequest{Namespace: "default", Name: "web", Port: "line", Preference: service.PreferUserspace})
	for _, err := range []error{pinned, w.client.Drain(w.ctx, true)} {
		if err == nil || !strings.Contains(err.Error(), "no space left on device") {
			t.Errorf("what can't be kept is answered %v", err)
		}
	}
	w.takeOver() // nothing of that needs the disk
	w.must(os.Remove(filler))
	w.sourceSays("no space left on device", false)
	w.pin("web", "line", service.PreferUserspace)
	w.stop()

	file := onlyFile(w, filepath.Join(dir, "*.zip"))
	content, err := os.ReadFile(file)
	w.must(err)
	content[bytes.Index(content, []byte("services.pb"))+len("services.pb")+20] ^= 0xff // of what is compressed
	w.must(os.WriteFile(file, content, 0o600))
	w.cluster.stop()
	w.must(w.proxy.Start())
	w.sourceSays("it is damaged", true)
	if !strings.Contains(w.proxy.Log(), "no saved state can be served") {
		t.Error("the log doesn't say that a saved state was ignored")
	}
	w.must(w.cluster.start())
	w.ready()
	w.await("web", "line", plan.Userspace, plan.StatePinned)
	w.ask(w.net.Client, "tcp", at)
}

// onlyFile is the one that a pattern names.
func onlyFile(w *world, pattern string) string {
	w.Helper()
	files, err := filepath.Glob(pattern)
	if err != nil || len(files) != 1 {
		w.Fatalf("%s names %v (%v)", pattern, files, err)
	}
	return files[0]
}
