package node

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"kproxy.dev/kproxy/service"
)

var web = service.Key{Namespace: "shop", Name: "web", Port: "http", Protocol: service.TCP}

// TestPinsSurvive: what was pinned is there after a restart, what was unpinned isn't.
func TestPinsSurvive(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	p, err := openPins(dir)
	if err != nil {
		t.Fatal(err)
	}
	dns := service.Key{Namespace: "kube-system", Name: "dns", Protocol: service.UDP}
	if err := errors.Join(p.Set([]service.Key{web, dns}, service.PreferUserspace), p.Set([]service.Key{dns}, service.PreferAuto)); err != nil {
		t.Fatal(err)
	}
	again, err := openPins(dir)
	if err != nil {
		t.Fatal(err)
	}
	want := map[service.Key]service.Preference{web: service.PreferUserspace}
	if diff := cmp.Diff(want, again.Get(map[service.Key]bool{})); diff != "" {
		t.Errorf("pins after a restart (-want +got):\n%s", diff)
	}
}

// TestUnusablePinsAreSetAside: they keep nobody from being served, nothing of them
// holds, and they aren't lost.
func TestUnusablePinsAreSetAside(t *testing.T) {
	good := `{"namespace":"shop","name":"web","protocol":"tcp","preference":"userspace"}`
	for name, content := range map[string]string{
		"empty": "", "zeros, as after a crash": strings.Repeat("\x00", 512), "cut off": "[" + good,
		"another type": "{}", "no data plane": "[" + good + "," + strings.Replace(good, "userspace", "moon", 1) + "]",
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			path := filepath.Join(dir, pinsFile)
			if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
				t.Fatal(err)
			}
			p, err := openPins(dir)
			if err != nil {
				t.Fatalf("kproxy doesn't start: %v", err)
			}
			if len(p.Get(map[service.Key]bool{})) != 0 || !strings.Contains(p.Problem, path+" can't be used") || !strings.Contains(p.Problem, path+".unusable") {
				t.Errorf("pins %v, problem %q; want none, and both names", p.Get(map[service.Key]bool{}), p.Problem)
			}
			if kept, err := os.ReadFile(path + ".unusable"); err != nil || string(kept) != content {
				t.Errorf("kept %q, %v; want %q", kept, err, content)
			}
			if err := p.Set([]service.Key{web}, service.PreferKernel); err != nil {
				t.Fatal(err)
			}
			if p, err = openPins(dir); err != nil || p.Problem != "" || len(p.Get(map[service.Key]bool{})) != 1 {
				t.Errorf("after a pin and a restart: pins %v, problem %q, %v", p.Get(map[service.Key]bool{}), p.Problem, err)
			}
		})
	}
}

// TestPinsThatCantBeWrittenDontHold: a pin that would be lost isn't made.
func TestPinsThatCantBeWrittenDontHold(t *testing.T) {
	dir := t.TempDir()
	p, err := openPins(dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	if err := p.Set([]service.Key{web}, service.PreferKernel); err == nil || len(p.Get(map[service.Key]bool{})) != 0 {
		t.Errorf("error %v, pins %v; want an error and no pin", err, p.Get(map[service.Key]bool{}))
	}
}

// TestCleanupForgetsOrders: whatever users have asked for is in a file that clean-up removes.
func TestCleanupForgetsOrders(t *testing.T) {
	dir := t.TempDir()
	p, err := openPins(dir)
	if err != nil {
		t.Fatal(err)
	}
	var d Drained
	d.read(dir)
	if err := errors.Join(p.Set([]service.Key{web}, service.PreferKernel), d.Set(true)); err != nil {
		t.Fatal(err)
	}
	files, err := os.ReadDir(dir)
	if err != nil || len(files) != 2 {
		t.Fatalf("files %v, %v", files, err)
	}
	for _, f := range files {
		if !slices.Contains(StateFiles, f.Name()) {
			t.Errorf("%s stays: the next kproxy on this node goes by it", f.Name())
		}
	}
}

// TestReplaceFileOnAFullDisk: the old file stays, and nothing else is left that takes room.
func TestReplaceFileOnAFullDisk(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state")
	if err := ReplaceFile(path, []byte("old")); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/dev/full", path+".new"); err != nil { // full(4): every write says ENOSPC
		t.Fatal(err)
	}
	if err := ReplaceFile(path, []byte("new")); !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("error %v, want that there is no room", err)
	}
	if left, err := filepath.Glob(path + "*"); err != nil || len(left) != 1 {
		t.Errorf("left are %v (%v)", left, err)
	}
	if got, err := os.ReadFile(path); err != nil || string(got) != "old" {
		t.Errorf("the file holds %q (%v)", got, err)
	}
}

// TestOrders: what users ask for isn't carried out while a successor has read what they had, and is again if that fails.
func TestOrders(t *testing.T) {
	var o Orders
	carried := 0
	order := func() error { return o.Take(func() error { carried++; return nil }) }
	o.Stop(true)
	if err := order(); err == nil || !strings.Contains(err.Error(), "another kproxy is taking over") || carried != 0 {
		t.Errorf("meanwhile %d are carried out (%v)", carried, err)
	}
	o.Stop(false)
	if err := order(); err != nil || carried != 1 {
		t.Errorf("afterwards %d are carried out (%v)", carried, err)
	}
}
