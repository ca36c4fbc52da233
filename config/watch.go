package config

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/fsnotify/fsnotify"
)

const (
	// quiet is how long after the last event a file is taken to be written.
	quiet = 100 * time.Millisecond
	// look is how often to look without any event: the file may lie behind a link
	// to elsewhere, on a network file system, or its directory may not exist yet.
	look = 5 * time.Second
)

// Watch calls changed whenever the file named name may have changed, until ctx
// is done: after events, when poked, and from time to time, so that most calls
// are for nothing. The directory is watched, not the file, which is replaced and not
// written to: by editors, and in a ConfigMap's volume by way of its link ..data.
func Watch(ctx context.Context, name string, log *slog.Logger, poke <-chan os.Signal, changed func()) {
	watch(ctx, name, look, log, poke, changed)
}

// watch is Watch with how often to look.
func watch(ctx context.Context, name string, every time.Duration, log *slog.Logger, poke <-chan os.Signal, changed func()) {
	var events chan fsnotify.Event
	var lost chan error
	w, err := fsnotify.NewWatcher()
	if err == nil {
		defer w.Close()
		err = w.Add(filepath.Dir(name))
		events, lost = w.Events, w.Errors
	}
	if err != nil {
		log.Info("the configuration file can't be watched; it is looked at from time to time instead", "file", name, "every", every, "error", err)
	}
	tick := time.NewTicker(every)
	defer tick.Stop()
	written := time.NewTimer(0) // it may have changed since it was read
	defer written.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-events:
			written.Reset(quiet)
			continue
		case <-lost:
			written.Reset(quiet)
			continue
		case <-tick.C:
		case <-poke:
		case <-written.C:
		}
		changed()
	}
}
