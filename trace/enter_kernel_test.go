package trace

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestWhatIsNoNamespace: a path that leads to something else is refused without being opened: a FIFO would keep the request for ever.
func TestWhatIsNoNamespace(t *testing.T) {
	dir := t.TempDir()
	fifo, file := filepath.Join(dir, "fifo"), filepath.Join(dir, "file")
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{fifo, file, dir, "/dev/null", filepath.Join(dir, "nothing")} {
		err := inside(path, func() error { t.Errorf("%s was entered", path); return nil })
		if err == nil || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: %v, want an error that names it", path, err)
		}
	}
	if os.Geteuid() != 0 {
		t.Skip("needs root to enter a namespace")
	}
	entered := false
	if err := inside("/proc/self/ns/net", func() error { entered = true; return nil }); err != nil || !entered {
		t.Errorf("the own namespace: entered %v, %v", entered, err)
	}
}
