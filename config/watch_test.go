package config

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
)

// A ConfigMap's volume is changed by pointing the link ..data elsewhere; the
// file itself, a link through it, stays as it is.
func TestWatchNoticesAConfigMapChange(t *testing.T) {
	dir := t.TempDir()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, version := range []string{"..1", "..2"} {
		must(os.Mkdir(filepath.Join(dir, version), 0o755))
		must(os.WriteFile(filepath.Join(dir, version, "config.conf"), []byte(version), 0o644))
	}
	must(os.Symlink("..1", filepath.Join(dir, "..data")))
	name := filepath.Join(dir, "config.conf")
	must(os.Symlink("..data/config.conf", name))

	ctx, stop := context.WithCancel(t.Context())
	seen, done := make(chan string), make(chan struct{})
	go func() {
		defer close(done)
		Watch(ctx, name, slog.New(slog.DiscardHandler), nil, func() {
			data, err := os.ReadFile(name)
			if err != nil {
				t.Error(err)
			}
			select {
			case seen <- string(data):
			case <-ctx.Done():
			}
		})
	}()
	if got := <-seen; got != "..1" {
		t.Errorf("at first it reads %q", got)
	}
	must(os.Symlink("..2", filepath.Join(dir, "..data_tmp")))
	must(os.Rename(filepath.Join(dir, "..data_tmp"), filepath.Join(dir, "..data")))
	for got := range seen { // or the test's own time-out
		if got == "..2" {
			break
		}
	}
	stop()
	<-done
}

// A directory that isn't there can't be watched, but looked for.
func TestWatchWithoutADirectory(t *testing.T) {
	ctx, stop := context.WithCancel(t.Context())
	Watch(ctx, "/no/such/directory/config.conf", slog.New(slog.DiscardHandler), nil, stop)
}
