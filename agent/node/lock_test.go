package node

import (
	"os"
	"strconv"
	"strings"
	"testing"

	"kproxy.dev/kproxy/service/lockfile"
	"kproxy.dev/kproxy/test/kerneltest"
)

// TestLockNode: one at a time in a network namespace; nothing is left behind.
func TestLockNode(t *testing.T) {
	kerneltest.Namespace(t)
	lock, err := Lock()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Lock(); err == nil || !strings.Contains(err.Error(), "(process "+strconv.Itoa(os.Getpid())+") is already running") {
		t.Errorf("a second kproxy gets error %v, want one that names the first", err)
	}
	lockfile.Release(lock)
	again, err := Lock()
	if err != nil {
		t.Fatalf("after the first has ended: %v", err)
	}
	path, err := LockPath()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(path); err != nil {
		t.Errorf("while it is held: %v", err)
	}
	lockfile.Release(again)
	if _, err := os.Stat(path); !os.IsNotExist(err) {
		t.Errorf("after the end the file is still there (%v)", err)
	}
}
