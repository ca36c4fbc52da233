package agent

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"iter"
	"maps"
	"os"
	"slices"
	"time"

	"kproxy.dev/kproxy/agent/node"
	"kproxy.dev/kproxy/health"
	"kproxy.dev/kproxy/plan"
)

// ejectionsAge bounds the file's age: an older one is left unread, and its endpoints are probed anew once clients meet silence.
const ejectionsAge = 5 * time.Minute

// savedEjection is an item of the file.
type savedEjection struct {
	health.Endpoint
	health.Ejection
}

// readEjections returns nothing where there is no file, or none that is young enough.
func readEjections(path string) (map[health.Endpoint]*health.Ejection, error) {
	info, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) || err == nil && time.Since(info.ModTime()) > ejectionsAge {
		return nil, nil
	}
	raw, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var list []savedEjection
	if err := json.Unmarshal(raw, &list); err != nil {
		return nil, fmt.Errorf("read %s, which is written anew at the next ejection: %w", path, err)
	}
	out := make(map[health.Endpoint]*health.Ejection, len(list))
	for i := range list {
		out[list[i].Endpoint] = &list[i].Ejection
	}
	return out, nil
}

// ejectionsChanged is called by the detector.
func (a *Agent) ejectionsChanged(changed []health.Endpoint) {
	p := &a.passive
	p.mu.Lock()
	p.changed = append(p.changed, changed...)
	now, was := p.View(), p.counted
	if p.ejected == nil {
		p.ejected = map[string]uint64{}
	}
	for _, at := range changed {
		if e := now.Of(at); e != nil && e != was.Of(at) {
			p.ejected[e.Reason]++
		}
	}
	p.counted = now
	p.mu.Unlock()
	a.announceNodes(was, now)
	a.kick()
	select {
	case p.save <- struct{}{}:
	default:
	}
}

// announceNodes tells of nodes that have fallen silent or are back, this one's isolation included.
func (a *Agent) announceNodes(was, now *health.Ejections) {
	var events []plan.Event
	add := func(warning bool, reason, action, message string) {
		events = append(events, plan.Event{Time: time.Now(), Kind: "health", Message: message})
		if a.record != nil {
			a.record.Event("", "", warning, reason, action, message)
		}
	}
	before, _ := was.Silences()
	after, isolated := now.Silences()
	for _, name := range slices.Sorted(maps.Keys(after)) {
		if _, known := before[name]; !known {
			add(true, "NodeSilent", "Eject", after[name]+" to this node")
		}
	}
	for _, name := range slices.Sorted(maps.Keys(before)) {
		if _, still := after[name]; !still {
			add(false, "NodeAnswers", "Uneject", "node "+name+" answers this node again")
		}
	}
	switch _, wasIsolated := was.Silences(); {
	case isolated != "" && wasIsolated == "":
		add(true, "NodeIsolated", "EjectNothing", isolated)
	case isolated == "" && wasIsolated != "":
		add(false, "NodeIsolated", "Eject", "other nodes' endpoints answer this node again")
	}
	a.events.publish(events)
}

// write writes the file.
func (p *passiveHealth) write() error {
	list, view := []savedEjection{}, p.View()
	for _, at := range view.All() {
		list = append(list, savedEjection{at, *view.Of(at)})
	}
	raw, err := json.Marshal(list)
	if err != nil {
		return err
	}
	return node.ReplaceFile(p.file, raw)
}

// ejections returns what is ejected, and marks the service ports that have an endpoint which wasn't, or isn't any more.
func (a *Agent) ejections(p *plan.Plan) *health.Ejections {
	if a.passive.Detector == nil {
		return nil
	}
	h := &a.passive
	h.mu.Lock()
	changed := h.changed
	h.changed = nil
	view := h.View() // has what the changes are about
	h.mu.Unlock()
	if len(changed) == 0 || p == nil {
		return view
	}
	is := make(map[health.Endpoint]bool, len(changed))
	for _, at := range changed {
		is[at] = true
	}
	for _, s := range p.Services {
		for i := range s.Endpoints {
			if is[health.Endpoint{Protocol: s.Port.Protocol, Address: s.Endpoints[i].Address}] {
				a.dirty[s.Port.Key] = true
				break
			}
		}
	}
	return view
}

// mayBeEjected yields the endpoints of the plan that may be.
func (a *Agent) mayBeEjected() iter.Seq2[health.Endpoint, string] {
	return func(yield func(health.Endpoint, string) bool) {
		p := a.current.Load()
		if p == nil {
			return
		}
		for _, s := range p.Services {
			for i := range s.Endpoints {
				e := &s.Endpoints[i]
				if s.MayBeEjected(e) && !yield(health.Endpoint{Protocol: s.Port.Protocol, Address: e.Address}, e.Node) {
					return
				}
			}
		}
	}
}
