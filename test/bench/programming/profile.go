package main

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"time"
)

// cpuProfile takes a CPU profile of kproxy until the returned function is called,
// if one is asked for.
func (r *rig) cpuProfile(p *proxy, name string) (stop func()) {
	if r.profiles == "" || p.kind != kproxy {
		return func() {}
	}
	// The server cuts a profile off when its client goes, and sends nothing: so the
	// case that is profiled waits for the end.
	ctx, cancel := context.WithTimeout(context.Background(), r.deadline)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			text, err := r.get(ctx, "/debug/pprof/profile?seconds="+profileTime(name))
			if err == nil {
				r.keepProfile(p, "cpu-"+name, text)
				return
			}
			if ctx.Err() != nil || !p.process.Running() {
				return
			}
			time.Sleep(10 * time.Millisecond) // it doesn't listen yet
		}
	}()
	return func() {
		<-done
		cancel()
	}
}

// profileTime is how many seconds of a case are profiled.
func profileTime(name string) string {
	if name == "start" {
		return "10"
	}
	return "12"
}

// heapProfile writes what is alive at the end of a turn.
func (r *rig) heapProfile(ctx context.Context, p *proxy) {
	if r.profiles == "" || p.kind != kproxy {
		return
	}
	text, err := r.get(ctx, "/debug/pprof/heap?gc=1")
	if err != nil {
		r.say("%s: %v", p.name, err)
		return
	}
	r.keepProfile(p, "heap", text)
}

func (r *rig) keepProfile(p *proxy, name string, text []byte) {
	err := os.MkdirAll(r.profiles, 0o755)
	err = errors.Join(err, os.WriteFile(filepath.Join(r.profiles, p.name+"-"+name+".pprof"), text, 0o644))
	if err != nil {
		r.say("keep profile: %v", err)
	}
}
