package agent

import (
	"fmt"
	"time"

	"kproxy.dev/kproxy/plan"
)

// NotReady says why new connections to some service may not be carried yet, or are
// no longer; it is empty while they all are. That takes a plan of everything that the
// source says, the sets and rules that lead to userspace, a forwarder that serves, and
// the rules beneath: those of each service have been written, or failed with a reason
// that the service's status gives, and userspace serves it meanwhile.
func (a *Agent) NotReady() string {
	if why := a.notReady(); why != "" {
		return why
	}
	a.wasReady.Store(true)
	return ""
}

// everReady reports whether kproxy is ready or has been.
func (a *Agent) everReady() bool { return a.wasReady.Load() || a.NotReady() == "" }

func (a *Agent) notReady() string {
	if !a.isSetUp.Load() {
		return "kproxy is still setting up"
	}
	st, _ := a.sync.get()
	if st.Generation == 0 {
		if st.LastError != "" {
			return "the first pass failed: " + st.LastError
		}
		for _, s := range a.source.Status() {
			if !s.Synced {
				return fmt.Sprintf("source %s hasn't been read as a whole yet", s.Name)
			}
		}
		return "the first pass isn't done yet"
	}
	r := a.programmer.report()
	switch {
	case !r.written && r.lastErr != nil:
		return fmt.Sprintf("the kernel's rules can't be written: %v", r.lastErr)
	case !r.written:
		return "the kernel's rules aren't written yet"
	case !a.heart.served.Load():
		return "the forwarder doesn't serve yet"
	case !a.heart.alive.Load():
		return "the forwarder doesn't serve: its heartbeat failed, or it is being stopped"
	}
	return a.arrivals.notReady()
}

// syncStatus joins what the two loops say: an error of the slow one is an
// error of the sync, although the services it concerns are served in userspace.
// No pass counts as a success before kproxy has been ready.
func (a *Agent) syncStatus() plan.SyncStatus {
	s, _ := a.sync.get()
	if !a.everReady() {
		s.LastSuccess = time.Time{}
	}
	if err := a.programmer.report().lastErr; err != nil && s.LastError == "" {
		s.LastError = err.Error()
	}
	if err := a.staleFlows.report(); err != nil && s.LastError == "" {
		s.LastError = fmt.Sprintf("delete stale conntrack entries: %v", err)
	}
	return s
}

// LastSync returns when the last pass succeeded, zero until kproxy has been ready,
// and since when a change waits for one, zero if none waits.
func (a *Agent) LastSync() (success, pendingSince time.Time) {
	s, pending := a.sync.get()
	if !a.everReady() {
		return time.Time{}, pending
	}
	return s.LastSuccess, pending
}
