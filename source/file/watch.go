package file

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/fsnotify/fsnotify"
)

// interest says which names in a watched directory matter.
type interest struct {
	all   bool
	names map[string]bool
}

// watcher keeps a set of directories watched. Only directories are: a watch on
// a file is lost when an editor replaces it by renaming another over it.
type watcher struct {
	fs    *fsnotify.Watcher
	watch map[string]interest // by real path, since one inode has one watch
	nodes map[string]inode    // of the directories when they were added
}

// inode tells a directory from another that took its name.
type inode struct{ dev, ino uint64 }

func inodeOf(dir string) inode {
	info, err := os.Stat(dir)
	if err != nil {
		return inode{}
	}
	s := signatureOf(info)
	return inode{s.dev, s.ino}
}

func newWatcher() (*watcher, error) {
	w, err := fsnotify.NewWatcher()
	if err != nil {
		return nil, err
	}
	return &watcher{fs: w, nodes: map[string]inode{}}, nil
}

// follow watches what paths and files need. It reports whether a directory is
// watched now that wasn't before, whose files may have changed unnoticed.
func (w *watcher) follow(paths, files []string) (more bool, err error) {
	want := wanted(paths, files)
	have := map[string]bool{}
	for _, dir := range w.fs.WatchList() {
		// The watch on a deleted directory stays until the last process that
		// has it open lets go, while another may have taken its place.
		if _, ok := want[dir]; ok && w.nodes[dir] == inodeOf(dir) {
			have[dir] = true
			continue
		}
		_ = w.fs.Remove(dir) // fails when the directory is gone, and the watch with it
		delete(w.nodes, dir)
	}
	var errs []error
	for dir := range want {
		if have[dir] {
			continue
		}
		node := inodeOf(dir) // before, so that a swap in between is seen next time
		switch err := w.fs.Add(dir); {
		case err == nil:
			w.nodes[dir] = node
			more = true
		case !errors.Is(err, fs.ErrNotExist):
			errs = append(errs, err)
		}
	}
	w.watch = want
	return more, errors.Join(errs...)
}

// matters reports whether an event may concern a manifest.
func (w *watcher) matters(ev fsnotify.Event) bool {
	if _, watched := w.watch[ev.Name]; watched {
		return true // the directory itself was deleted, moved or changed its mode
	}
	in, ok := w.watch[filepath.Dir(ev.Name)]
	return ok && (in.all || in.names[filepath.Base(ev.Name)])
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// wanted returns the directories to watch: every configured directory, the
// parent of every configured path (which may be deleted and come back, and its
// parents with it), and where symbolic links stand and lead to. A ConfigMap
// volume changes by one of them.
func wanted(paths, files []string) map[string]interest {
	want := map[string]interest{}
	add := func(dir string, name string) {
		real, err := filepath.EvalSymlinks(dir)
		if err != nil {
			return // it has just gone; the watch on it said so
		}
		in := want[real]
		if in.names == nil {
			in.names = map[string]bool{}
		}
		if name == "" {
			in.all = true
		} else {
			in.names[name] = true
		}
		want[real] = in
	}
	for _, path := range paths {
		path, err := filepath.Abs(path)
		if err != nil {
			continue
		}
		if info, err := os.Stat(path); err == nil && info.IsDir() {
			add(path, "")
		}
		// The parent, or whatever exists of the way to it.
		missing := path
		for missing != filepath.Dir(missing) && !exists(filepath.Dir(missing)) {
			missing = filepath.Dir(missing)
		}
		add(filepath.Dir(missing), filepath.Base(missing))
		for p := path; p != filepath.Dir(p); p = filepath.Dir(p) {
			if info, err := os.Lstat(p); err == nil && info.Mode()&fs.ModeSymlink != 0 {
				add(filepath.Dir(p), filepath.Base(p))
			}
		}
	}
	for _, file := range files {
		if real, err := filepath.EvalSymlinks(file); err == nil && real != file {
			if real, err = filepath.Abs(real); err == nil {
				add(filepath.Dir(real), filepath.Base(real))
			}
		}
	}
	return want
}

// debounce turns a burst of events into one: it fires when quiet has passed
// since the last event, at the latest when most has passed since the first. A
// file that is being written is so read when its writer has finished.
type debounce struct {
	quiet, most time.Duration

	timer *time.Timer
	first time.Time
}

// touch notes an event.
func (d *debounce) touch() {
	now := time.Now()
	if d.timer == nil {
		d.first = now
		d.timer = time.NewTimer(d.quiet)
		return
	}
	d.timer.Reset(min(d.quiet, d.first.Add(d.most).Sub(now)))
}

// fired returns the channel that says that it is time. It has to be asked anew
// after every touch.
func (d *debounce) fired() <-chan time.Time {
	if d.timer == nil {
		return nil
	}
	return d.timer.C
}

// reset makes ready for the next burst.
func (d *debounce) reset() {
	if d.timer != nil {
		d.timer.Stop()
		d.timer = nil
	}
}
