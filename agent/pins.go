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

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/config"
	"kproxy.dev/kproxy/service"
)

// pins are the data planes users hold services in (`kproxy pin`), kept in a
// file so that they survive a restart. Safe for concurrent use.
type pins struct {
	path    string
	problem string // with the file that was found; the pins in it don't hold

	mu      sync.Mutex                         // orders writers of the file, and guards what follows
	byPort  map[service.Key]service.Preference // replaced, never modified
	changed []service.Key                      // since the last get
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

// openPins reads the pins from dir, which it creates. A file that can't be read or
// understood keeps no service from being served: there are no pins then, problem says
// so, and the file is kept aside.
func openPins(dir string) (*pins, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, &config.Problem{Flag: "state-dir", What: fmt.Sprintf("the directory can't be made: %v; choose another", err)}
	}
	p := &pins{path: filepath.Join(dir, pinsFile), byPort: map[service.Key]service.Preference{}}
	raw, err := os.ReadFile(p.path)
	if errors.Is(err, fs.ErrNotExist) {
		return p, nil
	}
	if err == nil {
		err = p.parse(raw)
	}
	if err != nil {
		p.setAside(err)
	}
	return p, nil
}

// parse takes the pins from the file's content, all or none.
func (p *pins) parse(raw []byte) error {
	var records []pinRecord
	if len(raw) == 0 {
		return errors.New("it is empty")
	}
	if err := json.Unmarshal(raw, &records); err != nil {
		return err
	}
	m := map[service.Key]service.Preference{}
	for _, r := range records {
		if r.Preference != service.PreferUserspace && r.Preference != service.PreferKernel {
			return fmt.Errorf("%q of %s/%s is no data plane to pin to", r.Preference, r.Namespace, r.Name)
		}
		m[service.Key{Namespace: r.Namespace, Name: r.Name, Port: r.Port, Protocol: r.Protocol}] = r.Preference
	}
	p.byPort = m
	return nil
}

// setAside gives a file that can't be used, because of why, another name.
func (p *pins) setAside(why error) {
	aside := p.path + ".unusable"
	remedy := fmt.Sprintf("it is kept as %s: pin again what shall be pinned", aside)
	if err := os.Rename(p.path, aside); err != nil {
		remedy = fmt.Sprintf("it can't be set aside either: %v", err)
	}
	p.problem = fmt.Sprintf("no service is pinned, as %s can't be used: %v; %s", p.path, why, remedy)
}

// get returns the pins in force, in a map that isn't modified, and marks those that
// were set since the last call.
func (p *pins) get(dirty map[service.Key]bool) map[service.Key]service.Preference {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, k := range p.changed {
		dirty[k] = true
	}
	p.changed = nil
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
	p.byPort, p.changed = next, append(p.changed, keys...)
	return nil
}

// write replaces the file.
func (p *pins) write(m map[service.Key]service.Preference) error {
	records := make([]pinRecord, 0, len(m))
	for _, k := range slices.SortedFunc(maps.Keys(m), service.Key.Compare) {
		records = append(records, pinRecord{k.Namespace, k.Name, k.Port, k.Protocol, m[k]})
	}
	raw, err := json.MarshalIndent(records, "", "  ")
	if err != nil {
		return err
	}
	return replaceFile(p.path, append(raw, '\n'))
}

// replaceFile replaces a file by rename, so a crash leaves the old or the new one, and
// has both on the disk before it returns: a rename can get there before the content.
func replaceFile(path string, content []byte) error {
	tmp := path + ".new"
	if err := writeSynced(tmp, content); err != nil {
		os.Remove(tmp) // the disk may be full
		return err
	}
	if err := os.Rename(tmp, path); err != nil {
		return err
	}
	return syncDirectory(filepath.Dir(path))
}

func writeSynced(path string, content []byte) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o644)
	if err != nil {
		return err
	}
	_, err = f.Write(content)
	if err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}

// syncDirectory writes a directory's entries to the disk. Some file systems have no
// such thing and say EINVAL (fsync(2)).
func syncDirectory(path string) error {
	d, err := os.Open(path)
	if err != nil {
		return err
	}
	if err = d.Sync(); errors.Is(err, unix.EINVAL) {
		err = nil
	}
	return errors.Join(err, d.Close())
}
