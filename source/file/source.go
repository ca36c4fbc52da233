package file

import (
	"context"
	"log/slog"
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/fsnotify/fsnotify"

	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/source"
)

// The times of a Source.
const (
	quietTime = 50 * time.Millisecond  // without an event before a change is read
	burstTime = 500 * time.Millisecond // at the latest, while events go on
	// pollTime bounds how long a change stays unnoticed that makes no event: on
	// network file systems, behind links to links, or without inotify at all.
	pollTime = 5 * time.Second
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
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
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
func (s *Source) Reread() {
	select {
	case s.reread <- struct{}{}:
	default:
	}
}

// Run reads the manifests and follows their changes until ctx is done. Nothing
// that happens to files ends it; it returns nil.
func (s *Source) Run(ctx context.Context) error {
	r := runner{Source: s, store: newStore(s.cfg.Paths, s.note), wait: debounce{quiet: quietTime, most: burstTime}}
	w, err := newWatcher()
	if err != nil {
		s.cfg.Logger.Warn("watching manifests failed, looking at them from time to time instead", "every", pollTime, "error", err)
	} else {
		defer w.fs.Close()
		r.watcher = w
	}
	r.run(ctx)
	return nil
}

func (s *Source) note(what string) { s.cfg.Logger.Info("manifest", "note", what) }

// runner is the state of Run.
type runner struct {
	*Source
	store   *store
	watcher *watcher // nil without inotify
	wait    debounce
	warned  string // the last error of watching, so that it is said once
}

func (r *runner) run(ctx context.Context) {
	poll := time.NewTicker(pollTime)
	defer poll.Stop()
	defer r.wait.reset()
	var events chan fsnotify.Event
	var errors chan error
	if r.watcher != nil {
		events, errors = r.watcher.fs.Events, r.watcher.fs.Errors
	}
	r.update(true)
	for {
		select {
		case <-ctx.Done():
			return
		case ev := <-events:
			if r.watcher.matters(ev) {
				r.wait.touch()
			}
		case <-errors: // events were lost
			r.wait.touch()
		case <-r.wait.fired():
			r.wait.reset()
			r.update(true)
		case <-poll.C:
			if r.wait.fired() == nil { // or a file may be half written
				r.update(false)
			}
		case <-r.reread:
			r.update(true)
		}
	}
}

// update reads what changed and publishes it. Directories are watched before
// they are read: a change then either is in what was read or makes an event.
func (r *runner) update(all bool) {
	more := r.follow()
	changed := r.store.scan(all || more)
	if r.follow() { // a new link leads to a directory not watched until now
		changed = r.store.scan(true) || changed
	}
	if changed || r.current.Load() == nil {
		r.publish()
	}
}

func (r *runner) follow() bool {
	if r.watcher == nil {
		return false
	}
	more, err := r.watcher.follow(r.store.paths, r.store.order)
	if err != nil && err.Error() != r.warned {
		r.cfg.Logger.Warn("watching manifests failed, looking at them from time to time instead", "every", pollTime, "error", err)
		r.warned = err.Error()
	}
	return more
}

func (r *runner) publish() {
	before, last := r.Status(), r.Latest()
	snapshot, problems := r.store.build(r.cfg.Node, r.cfg.NodeAddresses...)
	snapshot = snapshot.Sharing(last)
	r.current.Store(&published{snapshot: snapshot, status: r.store.status(problems)})
	r.logNew(before)
	if last != nil && last.Hash() == snapshot.Hash() {
		return // only what is said about files is new
	}
	select {
	case r.changed <- struct{}{}:
	default:
	}
}

// logMost is how many problems of one path are logged at a time; one mistake
// that a program made is in every object. The status has them all.
const logMost = 20

// logNew logs what is wrong now and wasn't before.
func (r *runner) logNew(before []source.Status) {
	known := map[string]bool{}
	for _, st := range before {
		for _, e := range st.Errors {
			known[e] = true
		}
	}
	for _, st := range r.Status() {
		n := 0
		for _, e := range st.Errors {
			if known[e] {
				continue
			}
			if n++; n <= logMost {
				r.cfg.Logger.Warn("manifest", "problem", e)
			}
		}
		if n > logMost {
			r.cfg.Logger.Warn("manifest", "path", st.Name, "further problems", n-logMost)
		}
	}
}
