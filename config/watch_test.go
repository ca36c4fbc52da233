package config

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// A ConfigMap's volume is changed by pointing the link ..data elsewhere; the
// file itself, a link through it, stays as it is. The change is noticed by its
// event: looking from time to time comes too late here.
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

	ctx, stop := context.WithTimeout(t.Context(), 20*time.Second)
	defer stop()
	seen, done := make(chan string), make(chan struct{})
	go func() {
		defer close(done)
		defer close(seen)
		watch(ctx, name, time.Hour, slog.New(slog.DiscardHandler), nil, func() {
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
	last := ""
	for last = range seen {
		if last == "..2" {
			break
		}
	}
	if last != "..2" {
		t.Errorf("the change isn't noticed: at last it read %q", last)
	}
	stop()
	<-done
}

// A directory that isn't there can't be watched, but looked for, again and again.
func TestWatchWithoutADirectory(t *testing.T) {
	ctx, stop := context.WithTimeout(t.Context(), 20*time.Second)
	defer stop()
	calls := 0
	watch(ctx, "/no/such/directory/config.conf", time.Millisecond, slog.New(slog.DiscardHandler), nil, func() {
		if calls++; calls == 3 {
			stop()
		}
	})
	if calls != 3 {
		t.Errorf("it looked %d times, want again and again", calls)
	}
}

// Who asks for it has the file looked at now.
func TestWatchWhenPoked(t *testing.T) {
	ctx, stop := context.WithTimeout(t.Context(), 20*time.Second)
	defer stop()
	poke, calls := make(chan os.Signal, 1), 0
	watch(ctx, "/no/such/directory/config.conf", time.Hour, slog.New(slog.DiscardHandler), poke, func() {
		if calls++; calls == 1 {
			poke <- os.Interrupt
		} else {
			stop()
		}
	})
	if calls != 2 {
		t.Errorf("it looked %d times, want at first and when asked", calls)
	}
}
