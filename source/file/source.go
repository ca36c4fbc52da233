package file

import (
	"cmp"
	"context"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"time"

	"github.com/fsnotify/fsnotify"

	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/service/wake"
	"kproxy.dev/kproxy/source"
)

// The times of a Source.
const (
	quietTime = 50 * time.Millisecond  // without an event before a change is read
	burstTime = 500 * time.Millisecond // at the latest, while events go on
	// pollTime bounds how long a change stays unnoticed that makes no event: of a
	// file that a link leads to, of a directory's parents, on network file systems,
	// or without inotify at all.
	pollTime = time.Second
)

// Config says what a Source reads.
type Config struct {
	Paths  []string // files and directories, the first takes precedence
	Node   string   // the node this kproxy runs on
	Logger *slog.Logger
	// NodeAddresses are this node's; empty for those of its Node object.
	NodeAddresses []netip.Addr
}

// Source watches manifests. All methods are safe for concurrent use; Run is to
// be called once.
type Source struct {
	cfg     Config
	changed chan struct{}
	reread  chan struct{}
	current atomic.Pointer[published]
}

type published struct {
	snapshot *service.Snapshot
	status   []source.Status
}

// New returns a Source that reads nothing before Run. A nil Logger discards.
func New(cfg Config) *Source {
	cfg.Logger = cmp.Or(cfg.Logger, slog.New(slog.DiscardHandler))
	return &Source{cfg: cfg, changed: make(chan struct{}, 1), reread: make(chan struct{}, 1)}
}

// Snapshots receives a value after every change of Latest. Changes that come
// before the last one was received are one.
func (s *Source) Snapshots() <-chan struct{} { return s.changed }

// Latest returns what the manifests say, nil before they were read once.
func (s *Source) Latest() *service.Snapshot {
	if p := s.current.Load(); p != nil {
		return p.snapshot
	}
	return nil
}

// Status returns the state of each path, in the order of Config.Paths.
func (s *Source) Status() []source.Status {
	if p := s.current.Load(); p != nil {
		return p.status
	}
	out := make([]source.Status, len(s.cfg.Paths))
	for i, path := range s.cfg.Paths {
		out[i].Name = path
	}
	return out
}

// Reread has every file read again, whether or not it seems changed.
func (s *Source) Reread() { wake.Up(s.reread) }

// Run reads the manifests and follows their changes until ctx is done. Nothing
// that happens to files ends it; it returns nil.
func (s *Source) Run(ctx context.Context) error {
	st := newStore(s.cfg.Paths, s.note)
	var events <-chan fsnotify.Event
	var lost <-chan error // events
	w, err := fsnotify.NewWatcher()
	if err != nil {
		s.cfg.Logger.Warn("manifests can't be watched; they are looked at from time to time", "every", pollTime, "error", err)
	} else {
		defer w.Close()
		events, lost = w.Events, w.Errors
	}
	poll := time.NewTicker(pollTime)
	defer poll.Stop()
	for all := true; ; {
		if err == nil {
			watch(w, s.cfg.Paths) // before they are read: a later change makes an event
		}
		s.update(st, all)
		all = false
		select {
		case <-ctx.Done():
			return nil
		case <-s.reread:
			all = true
			continue
		case <-events:
		case <-lost:
		case <-poll.C:
		}
		settle(ctx, events)
	}
}

// watch has inotify report changes in the directories of paths: in each itself, or in
// the one that a file is in. Only directories are watched: a watch on a file is lost when
// an editor replaces it by renaming another over it. Where that fails, the directory is
// missing, or a change is found by the next poll.
func watch(w *fsnotify.Watcher, paths []string) {
	var dirs []string
	for _, path := range paths {
		if info, err := os.Stat(path); err != nil || !info.IsDir() {
			path = filepath.Dir(path)
		}
		if dir, err := filepath.EvalSymlinks(path); err == nil {
			_ = w.Add(dir) // does nothing for one that is watched
			dirs = append(dirs, dir)
		}
	}
	for _, dir := range w.WatchList() {
		if !slices.Contains(dirs, dir) { // a link led to it
			_ = w.Remove(dir)
		}
	}
}

// settle waits until no event has come for quietTime, for burstTime at most: a file that
// is being written is read when its writer has finished.
func settle(ctx context.Context, events <-chan fsnotify.Event) {
	burst := time.After(burstTime)
	for {
		select {
		case <-ctx.Done():
			return
		case <-burst:
			return
		case <-time.After(quietTime):
			return
		case <-events:
		}
	}
}

func (s *Source) note(what string) { s.cfg.Logger.Info("manifest", "note", what) }

// update reads what changed, with all every file, and publishes it.
func (s *Source) update(st *store, all bool) {
	if !st.scan(all) && s.current.Load() != nil {
		return
	}
	before, last := s.Status(), s.Latest()
	snapshot, problems := st.build(s.cfg.Node, s.cfg.NodeAddresses...)
	snapshot = snapshot.Sharing(last)
	s.current.Store(&published{snapshot: snapshot, status: st.status(problems)})
	s.logNew(before)
	if last != nil && last.Hash() == snapshot.Hash() {
		return // only what is said about files is new
	}
	wake.Up(s.changed)
}

// logMost is how many problems of one path are logged at a time; one mistake
// that a program made is in every object. The status has them all.
const logMost = 20

// logNew logs what is wrong now and wasn't before.
func (s *Source) logNew(before []source.Status) {
	known := map[string]bool{}
	for _, st := range before {
		for _, e := range st.Errors {
			known[e] = true
		}
	}
	for _, st := range s.Status() {
		n := 0
		for _, e := range st.Errors {
			if known[e] {
				continue
			}
			if n++; n <= logMost {
				s.cfg.Logger.Warn("manifest", "problem", e)
			}
		}
		if n > logMost {
			s.cfg.Logger.Warn("manifest", "path", st.Name, "further problems", n-logMost)
		}
	}
}
