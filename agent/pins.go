package agent

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"kproxy.dev/kproxy/service"
)

// pins are the data planes users hold services in (`kproxy pin`), kept in a
// file so that they survive a restart. Safe for concurrent use.
type pins struct {
	path string

	mu     sync.Mutex                         // orders writers of the file, and guards byPort
	byPort map[service.Key]service.Preference // replaced, never modified
}

// pinsFile is the file's name in --state-dir.
const pinsFile = "pins.json"

// pinRecord is one line of the file.
type pinRecord struct {
	Namespace  string             `json:"namespace"`
	Name       string             `json:"name"`
	Port       string             `json:"port"`
	Protocol   service.Protocol   `json:"protocol"`
	Preference service.Preference `json:"preference"`
}

// openPins reads the pins from dir, which it creates. A file that can't be
// understood is an error: ignoring it would move services that a user pinned.
func openPins(dir string) (*pins, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("create state directory: %w (choose another with --state-dir)", err)
	}
	p := &pins{path: filepath.Join(dir, pinsFile), byPort: map[service.Key]service.Preference{}}
	raw, err := os.ReadFile(p.path)
	if errors.Is(err, fs.ErrNotExist) {
		return p, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read pins: %w", err)
	}
	var records []pinRecord
	if err := json.Unmarshal(raw, &records); err != nil {
		return nil, fmt.Errorf("read pins %s: %w (mend the file, or delete it to unpin every service)", p.path, err)
	}
	for _, r := range records {
		p.byPort[service.Key{Namespace: r.Namespace, Name: r.Name, Port: r.Port, Protocol: r.Protocol}] = r.Preference
	}
	return p, nil
}

// get returns the pins in force, in a map that nobody modifies: as long as they
// are the same, so is the map.
func (p *pins) get() map[service.Key]service.Preference {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.byPort
}

// set pins every key; PreferAuto unpins. Nothing changes unless the file was written.
func (p *pins) set(keys []service.Key, pref service.Preference) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	next := maps.Clone(p.byPort)
	for _, k := range keys {
		if pref == service.PreferAuto {
			delete(next, k)
		} else {
			next[k] = pref
		}
	}
	if err := p.write(next); err != nil {
		return fmt.Errorf("write pins: %w", err)
	}
	p.byPort = next
	return nil
}

// write replaces the file by rename, so a crash leaves the old or the new one.
func (p *pins) write(m map[service.Key]service.Preference) error {
	records := make([]pinRecord, 0, len(m))
	for _, k := range slices.SortedFunc(maps.Keys(m), service.Key.Compare) {
		records = append(records, pinRecord{k.Namespace, k.Name, k.Port, k.Protocol, m[k]})
	}
	raw, err := json.MarshalIndent(records, "", "  ")
	if err != nil {
		return err
	}
	tmp := p.path + ".new"
	if err := os.WriteFile(tmp, append(raw, '\n'), 0o644); err != nil {
		return err
	}
	return os.Rename(tmp, p.path)
}
