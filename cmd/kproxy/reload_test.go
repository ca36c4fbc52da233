package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/urfave/cli/v2"

	"kproxy.dev/kproxy/config"
)

// A running kproxy takes over what it can, keeps what was good, and asks for a
// restart for all else.
func TestReload(t *testing.T) {
	outsideOfPods(t)
	const good = fileHead + "clientConnection: {kubeconfig: /k}\n"
	name := writeFile(t, "config.conf", good)
	err := withFlags(t, []string{"--config", name}, func(c *cli.Context) {
		cfg, err := configureValid(c)
		if err != nil {
			t.Fatal(err)
		}
		var log bytes.Buffer
		s := &settled{
			configure: func() (configured, error) { return configureValid(c) },
			log:       slog.New(slog.NewTextHandler(&log, nil)), level: new(slog.LevelVar),
		}
		s.now.Store(&cfg)
		for _, step := range []struct {
			name, text string
			logged     string // a part of what is logged; empty for nothing
			problem    string
			restart    string
			level      slog.Level
			profiling  bool
		}{
			{"as it was", good, "", "", "", slog.LevelInfo, false},
			{"a comment", good + "# so\n", "in nothing that has an effect", "", "", slog.LevelInfo, false},
			{"an ignored field", good + "portRange: 1-2\n", "in nothing that has an effect", "", "", slog.LevelInfo, false},
			{"log level and profiles", good + "logging: {verbosity: 4}\nenableProfiling: true\n", `v from \"info\" to \"4\"`, "", "", slog.LevelDebug, true},
			{"nonsense", good + "mode: [\n", "the last good one stays in force", "config.conf:4: did not find expected", "", slog.LevelDebug, true},
			{"the same nonsense", good + "mode: [\n", "", "config.conf:4: did not find expected", "", slog.LevelDebug, true},
			{"not valid", good + "mode: nft\n", "the last good one stays in force", `config.conf:4: mode: "nft" is not a mode`, "", slog.LevelDebug, true},
			{"good again", good, "is good again", "", "", slog.LevelInfo, false},
			{"another mode", good + "mode: ipvs\nlogging: {verbosity: 4}\n", "", "", `mode from "auto" to "ipvs"`, slog.LevelInfo, false},
		} {
			log.Reset()
			if err := os.WriteFile(name, []byte(step.text), 0o644); err != nil {
				t.Fatal(err)
			}
			err := s.reload()
			var changed *errChanged
			if step.restart == "" && err != nil || step.restart != "" && (!errors.As(err, &changed) || !strings.Contains(err.Error(), step.restart)) {
				t.Errorf("%s: it says %v, want a restart for %q", step.name, err, step.restart)
			}
			if got := log.String(); (got == "") != (step.logged == "") || !strings.Contains(got, step.logged) {
				t.Errorf("%s: logged %q, want %q", step.name, got, step.logged)
			}
			if row := s.source()[0]; row.Name != name || row.Synced != (step.problem == "") || !strings.Contains(row.Error, step.problem) || (row.Error == "") != row.Synced {
				t.Errorf("%s: status says %+v, want %q", step.name, row, step.problem)
			}
			if s.level.Level() != step.level || s.profiling() != step.profiling {
				t.Errorf("%s: level %s, profiles %t, want %s, %t", step.name, s.level.Level(), s.profiling(), step.level, step.profiling)
			}
		}
	})
	if err != nil {
		t.Error(err)
	}
}

// A ConfigMap's volume is changed by pointing the link ..data elsewhere; the file itself, a
// link through it, stays as it is. The change is noticed, and at once when asked for.
func TestFollow(t *testing.T) {
	outsideOfPods(t)
	for name, every := range map[string]time.Duration{"by looking": time.Millisecond, "when asked": time.Hour} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			link := func(to string) {
				next := filepath.Join(dir, "..data_tmp")
				if err := errors.Join(os.Symlink(to, next), os.Rename(next, filepath.Join(dir, "..data"))); err != nil {
					t.Fatal(err)
				}
			}
			for version, text := range map[string]string{"..1": "enableProfiling: false\n", "..2": "enableProfiling: true\n"} {
				text = fileHead + "clientConnection: {kubeconfig: /k}\n" + text
				if err := errors.Join(os.Mkdir(filepath.Join(dir, version), 0o755), os.WriteFile(filepath.Join(dir, version, "config.conf"), []byte(text), 0o644)); err != nil {
					t.Fatal(err)
				}
			}
			link("..1")
			err := withFlags(t, []string{"--config", filepath.Join(dir, "..data", "config.conf")}, func(c *cli.Context) {
				cfg, err := configureValid(c)
				if err != nil {
					t.Fatal(err)
				}
				asked := make(chan os.Signal, 1)
				s := &settled{configure: func() (configured, error) { return configureValid(c) }, log: slog.New(slog.DiscardHandler), level: new(slog.LevelVar), reread: asked}
				s.now.Store(&cfg)
				ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
				defer cancel()
				done := make(chan struct{})
				go func() {
					defer close(done)
					s.follow(ctx, every, func(err error) { t.Errorf("it stops: %v", err) })
				}()
				link("..2")
				asked <- os.Interrupt
				for !s.profiling() && sleep(ctx, time.Millisecond) {
				}
				link("..1")
				if every == time.Hour {
					asked <- os.Interrupt
				}
				for s.profiling() && sleep(ctx, time.Millisecond) {
				}
				if ctx.Err() != nil {
					t.Error("the change isn't noticed")
				}
				cancel()
				<-done
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
}

// A file that vanishes is no reason to stop.
func TestReloadWithoutTheFile(t *testing.T) {
	name := writeFile(t, "config.conf", fileHead+"clientConnection: {kubeconfig: /k}\n")
	err := withFlags(t, []string{"--config", name}, func(c *cli.Context) {
		cfg, err := configureValid(c)
		if err != nil {
			t.Fatal(err)
		}
		s := &settled{configure: func() (configured, error) { return configureValid(c) }, log: slog.New(slog.DiscardHandler)}
		s.now.Store(&cfg)
		if err := os.Remove(name); err != nil {
			t.Fatal(err)
		}
		if err := s.reload(); err != nil || !strings.HasSuffix(s.source()[0].Error, "no such file or directory") {
			t.Errorf("it says %v, status %+v", err, s.source())
		}
	})
	if err != nil {
		t.Error(err)
	}
}

func TestConfigzShowsBothForms(t *testing.T) {
	outsideOfPods(t)
	err := withFlags(t, []string{"--manifests", "/m", "--mode", "ipvs", "--ipvs-tcp-timeout", "20m"}, func(c *cli.Context) {
		cfg, err := configureValid(c)
		if err != nil {
			t.Fatal(err)
		}
		s := &settled{}
		s.now.Store(&cfg)
		if s.source() != nil {
			t.Error("there is no file, but a row about it")
		}
		for form, want := range map[bool]string{true: `"tcpTimeout":"20m0s"`, false: `"manifests":["/m"]`} {
			b, err := json.Marshal(configz{s, form})
			if err != nil || !strings.Contains(string(b), want) || !strings.Contains(string(b), `"mode":"ipvs"`) {
				t.Errorf("kube-proxy's form %t: lacks %s: %s, %v", form, want, b, err)
			}
		}
	})
	if err != nil {
		t.Error(err)
	}
}

// Anybody may raise the score, and setting what is set already costs nothing.
func TestAdjustOOMScore(t *testing.T) {
	const name = "/proc/self/oom_score_adj"
	read := func() int {
		t.Helper()
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		n, err := strconv.Atoi(strings.TrimSpace(string(text)))
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	log := slog.New(slog.DiscardHandler)
	was := read()
	adjustOOMScore(config.Default(), log)
	if got := read(); got != was {
		t.Errorf("nothing is asked for: from %d to %d", was, got)
	}
	higher := min(was+1, 1000)
	for range 2 {
		adjustOOMScore(config.Config{OOMScoreAdj: &higher}, log)
		if got := read(); got != higher {
			t.Errorf("%d is asked for: got %d", higher, got)
		}
	}
}
