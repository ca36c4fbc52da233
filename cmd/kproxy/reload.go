package main

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"kproxy.dev/kproxy/config"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/source/strict"
)

// settled is the configuration in force. With --config it follows the file:
// what a running kproxy can take over it takes over; for the rest the process
// ends in good order, for its supervisor to start it again. Its methods are
// safe for concurrent use.
type settled struct {
	configure func() (configured, error) // valid
	log       *slog.Logger
	lines     *lastLines // of log
	level     *slog.LevelVar
	reread    <-chan os.Signal // has the file read again at once

	now     atomic.Pointer[configured]
	problem atomic.Pointer[string] // with what the file holds now; nil if there is none
}

// errChanged ends a kproxy whose configuration has changed. As kube-proxy does
// then, it fails: there are supervisors that start only what has failed again.
type errChanged struct{ changes []string }

func (e *errChanged) Error() string {
	return "the configuration has changed, and takes a restart: " + strings.Join(e.changes, "; ")
}

// lookEvery is how often the file is looked at.
const lookEvery = time.Second

// follow applies changes of the file until ctx is done. One that it sees twice is taken: before,
// the file may be half written. A change that takes a restart is handed to stop.
func (s *settled) follow(ctx context.Context, every time.Duration, stop context.CancelCauseFunc) {
	name := s.now.Load().File
	if name == "" {
		return
	}
	tick := time.NewTicker(every)
	defer tick.Stop()
	taken := string(s.now.Load().file.Data)
	for seen := taken; ; {
		asked := false
		select {
		case <-ctx.Done():
			return
		case <-s.reread:
			asked = true
		case <-tick.C:
		}
		data, _ := strict.Read(name) // reload says what is wrong
		twice := string(data) == seen
		if seen = string(data); asked || twice && seen != taken {
			taken = seen
			if err := s.reload(); err != nil {
				stop(err)
			}
		}
	}
}

// reload reads the file again. What isn't valid leaves the last good one in force.
func (s *settled) reload() error {
	next, err := s.configure()
	if err != nil {
		what := err.Error()
		if was := s.problem.Swap(&what); was == nil || *was != what {
			s.log.Error("the configuration file can't be taken; the last good one stays in force", "problem", what)
		}
		return nil
	}
	if s.problem.Swap(nil) != nil {
		s.log.Info("the configuration file is good again", "file", next.File)
	}
	was := s.now.Load()
	var restart []string
	var live []config.Change
	for _, c := range was.Changes(next.Config) {
		if c.Live {
			live = append(live, c)
		} else {
			restart = append(restart, c.String())
		}
	}
	if len(restart) > 0 {
		return &errChanged{restart}
	}
	s.now.Store(&next)
	for _, c := range live {
		s.log.Info("the configuration has changed", "what", c.String())
	}
	if len(live) > 0 {
		s.level.Set(next.LogLevel())
		adjustOOMScore(next.Config, s.log)
	} else if string(was.file.Data) != string(next.file.Data) {
		s.log.Info("the configuration file has changed, but in nothing that has an effect", "file", next.File)
	}
	return nil
}

// profiling reports whether profiles are served now.
func (s *settled) profiling() bool { return s.now.Load().Profiling }

// source is a line of the status about the file, nil without one.
func (s *settled) source() []plan.SourceStatus {
	name := s.now.Load().File
	if name == "" {
		return nil
	}
	row := plan.SourceStatus{Name: name, Synced: true}
	if p := s.problem.Load(); p != nil {
		row.Synced, row.Error = false, *p
	}
	return []plan.SourceStatus{row}
}

// configz marshals to what /configz shows: the configuration in force at that moment.
type configz struct {
	*settled
	kubeProxy bool // in kube-proxy's form
}

func (c configz) MarshalJSON() ([]byte, error) {
	now := c.now.Load().Config
	if c.kubeProxy {
		return json.Marshal(now.KubeProxy())
	}
	return json.Marshal(now)
}

// adjustOOMScore writes this process's oom_score_adj (proc(5)). It may be raised
// by anyone, but lowered only with CAP_SYS_RESOURCE. Who runs kproxy with less
// has the container runtime set it.
func adjustOOMScore(cfg config.Config, log *slog.Logger) {
	const file = "/proc/self/oom_score_adj"
	if cfg.OOMScoreAdj == nil {
		return
	}
	want := strconv.Itoa(*cfg.OOMScoreAdj)
	if has, err := os.ReadFile(file); err == nil && strings.TrimSpace(string(has)) == want {
		return
	}
	if err := os.WriteFile(file, []byte(want), 0); err != nil {
		log.Info("oom_score_adj stays as it is; to lower it takes CAP_SYS_RESOURCE", "wanted", want, "error", fmt.Sprint(err))
	}
}
