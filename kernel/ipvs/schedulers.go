package ipvs

import (
	"log/slog"
	"maps"
	"slices"
	"time"

	"kproxy.dev/kproxy/service"
)

// schedulerProbes holds what trying the kernel's schedulers told. Trying one may load a
// module, so each name that services ask for is tried once, and again after
// retryScheduler only if it can't be used. One goroutine uses it; the zero value tries
// none, and takes every one to work.
type schedulerProbes struct {
	try    func(name string) error // nil where there is no IPVS
	log    *slog.Logger
	always []string // asked for whatever services want

	seen  *service.Snapshot
	named []string          // what seen's services ask for
	known map[string]string // why each can't be used, empty if it can; never modified
	tried time.Time         // when the last of those that can't was tried
}

// retryScheduler is how long one that can't be used isn't tried again: its
// module may be installed any time.
const retryScheduler = time.Minute

// of returns what is known of the schedulers that services of a snapshot ask
// for. Unless they ask for a new one it costs next to nothing.
func (s *schedulerProbes) of(snapshot *service.Snapshot, now time.Time) map[string]string {
	if s.try == nil {
		return nil
	}
	if snapshot != s.seen {
		s.seen, s.named = snapshot, namedSchedulers(snapshot)
	}
	due := now.Sub(s.tried) >= retryScheduler
	for _, names := range [][]string{s.always, s.named} {
		for _, name := range names {
			if why, known := s.known[name]; !known || why != "" && due {
				s.learn(name, now)
			}
		}
	}
	return s.known
}

// learn tries a scheduler.
func (s *schedulerProbes) learn(name string, now time.Time) {
	was, known := s.known[name]
	why := ""
	if err := s.try(name); err != nil {
		why, s.tried = err.Error(), now
	}
	if known && why == was {
		return
	}
	if why != "" {
		s.log.Warn("a scheduler of IPVS can't be used", "scheduler", name, "reason", why)
	} else if known {
		s.log.Info("a scheduler of IPVS can be used now", "scheduler", name)
	}
	next := map[string]string{}
	maps.Copy(next, s.known)
	next[name] = why
	s.known = next // plans have the old one
}

func namedSchedulers(snapshot *service.Snapshot) []string {
	if snapshot == nil {
		return nil
	}
	names := map[string]bool{}
	for p := range snapshot.All() {
		if p.Scheduler != "" {
			names[p.Scheduler] = true
		}
	}
	return slices.Sorted(maps.Keys(names))
}
