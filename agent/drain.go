package agent

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// drained is since when this node is drained (`kproxy drain`), in a file, so that it stays so after a restart. Its methods aren't
// safe for concurrent use.
type drained struct {
	path  string
	since atomic.Pointer[time.Time] // nil if it isn't
}

// drainFile is the file's name in --state-dir.
const drainFile = "drained.json"

type drainRecord struct {
	Since time.Time `json:"since"`
}

// read takes what the file in dir says. One that can't be read or understood means since now: someone has drained this node.
func (d *drained) read(dir string) {
	d.path = filepath.Join(dir, drainFile)
	raw, err := os.ReadFile(d.path)
	if errors.Is(err, fs.ErrNotExist) {
		d.since.Store(nil)
		return
	}
	var r drainRecord
	if err != nil || json.Unmarshal(raw, &r) != nil || r.Since.IsZero() {
		r.Since = time.Now()
	}
	d.since.Store(&r.Since)
}

// set drains the node, or ends that. Nothing changes unless the file was written.
func (d *drained) set(on bool) error {
	was := d.since.Load()
	switch {
	case on == (was != nil):
		return nil
	case !on:
		if err := os.Remove(d.path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("end drain: %w", err)
		}
		d.since.Store(nil)
		return nil
	}
	r := drainRecord{time.Now().UTC()}
	raw, err := json.Marshal(r)
	if err == nil {
		err = replaceFile(d.path, append(raw, '\n'))
	}
	if err != nil {
		return fmt.Errorf("drain: %w", err)
	}
	d.since.Store(&r.Since)
	return nil
}

// Drain has load balancers leave this node out, and moves new connections of all services that the kernel can serve
// to it, or ends that. Connections that there are go on, and what only userspace serves is served.
func (a *Agent) Drain(on bool) error {
	if a.current.Load() == nil {
		return errStarting
	}
	if err := a.orders.take(func() error { return a.drained.set(on) }); err != nil {
		return err
	}
	a.log.Info("drained by kproxy drain", "on", on)
	a.kick()
	return nil
}

// Drained reports whether it is.
func (a *Agent) Drained() bool { return a.isSetUp.Load() && a.drained.since.Load() != nil }

// drainStatus is nil if the node isn't drained; p is the current plan.
func (a *Agent) drainStatus(p *plan.Plan) *plan.Drain {
	since := a.drained.since.Load()
	if since == nil {
		return nil
	}
	out := &plan.Drain{Since: *since}
	kept := map[service.Key]bool{}
	for _, s := range p.Services {
		if s.DataPlane == plan.Userspace {
			kept[s.Port.Key] = true
			out.Kept = append(out.Kept, s.Port.Key.String())
		}
	}
	for _, c := range a.userspace.Connections() {
		if c.Protocol == service.TCP && (c.Started.Before(*since) || !kept[c.Service]) {
			out.Left++
		}
	}
	return out
}
