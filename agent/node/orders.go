package node

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
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/config"
	"kproxy.dev/kproxy/service"
)

// Orders takes or refuses what users ask for by commands (pins, a drain), which is kept in files that a successor reads. The
// zero value takes it.
type Orders struct {
	Pins    *Pins
	Drained Drained

	mu      sync.Mutex
	stopped bool
}

// Take carries one out, one at a time.
func (o *Orders) Take(carryOut func() error) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.stopped {
		return errors.New("another kproxy is taking over at this moment, and would miss this; ask again in a few seconds")
	}
	return carryOut()
}

// Stop has orders refused, or ends that.
func (o *Orders) Stop(on bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.stopped = on
}

// Open reads what users have asked for of this node from the files in dir, which it creates.
func (o *Orders) Open(dir string) (err error) {
	o.Drained.read(dir)
	o.Pins, err = openPins(dir)
	return err
}

// Pins are the data planes users hold services in (`kproxy pin`), kept in a
// file so that they survive a restart. Safe for concurrent use.
type Pins struct {
	Path    string
	Problem string // with the file that was found; the pins in it don't hold

	mu      sync.Mutex                         // orders writers of the file, and guards what follows
	byPort  map[service.Key]service.Preference // replaced, never modified
	changed []service.Key                      // since the last Get
}

// pinRecord is one line of the file.
type pinRecord struct {
	Namespace  string             `json:"namespace"`
	Name       string             `json:"name"`
	Port       string             `json:"port"`
	Protocol   service.Protocol   `json:"protocol"`
	Preference service.Preference `json:"preference"`
}

// openPins reads the pins from dir, which it creates. A file that can't be read or
// understood keeps no service from being served: there are no pins then, Problem says
// so, and the file is kept aside.
func openPins(dir string) (*Pins, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, &config.Problem{Flag: "state-dir", What: fmt.Sprintf("the directory can't be made: %v; choose another", err)}
	}
	p := &Pins{Path: filepath.Join(dir, pinsFile), byPort: map[service.Key]service.Preference{}}
	raw, err := os.ReadFile(p.Path)
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
func (p *Pins) parse(raw []byte) error {
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
func (p *Pins) setAside(why error) {
	aside := p.Path + ".unusable"
	remedy := fmt.Sprintf("it is kept as %s: pin again what shall be pinned", aside)
	if err := os.Rename(p.Path, aside); err != nil {
		remedy = fmt.Sprintf("it can't be set aside either: %v", err)
	}
	p.Problem = fmt.Sprintf("no service is pinned, as %s can't be used: %v; %s", p.Path, why, remedy)
}

// Get returns the pins in force, in a map that isn't modified, and marks those that
// were set since the last call.
func (p *Pins) Get(dirty map[service.Key]bool) map[service.Key]service.Preference {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, k := range p.changed {
		dirty[k] = true
	}
	p.changed = nil
	return p.byPort
}

// Set pins every key; PreferAuto unpins. Nothing changes unless the file was written.
func (p *Pins) Set(keys []service.Key, pref service.Preference) error {
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
func (p *Pins) write(m map[service.Key]service.Preference) error {
	records := make([]pinRecord, 0, len(m))
	for _, k := range slices.SortedFunc(maps.Keys(m), service.Key.Compare) {
		records = append(records, pinRecord{k.Namespace, k.Name, k.Port, k.Protocol, m[k]})
	}
	raw, err := json.MarshalIndent(records, "", "  ")
	if err != nil {
		return err
	}
	return ReplaceFile(p.Path, append(raw, '\n'))
}

// Drained is since when this node is drained (`kproxy drain`), in a file, so that it stays so after a restart. Its methods aren't
// safe for concurrent use.
type Drained struct {
	path  string
	Since atomic.Pointer[time.Time] // nil if it isn't
}

type drainRecord struct {
	Since time.Time `json:"since"`
}

// read takes what the file in dir says. One that can't be read or understood means since now: someone has drained this node.
func (d *Drained) read(dir string) {
	d.path = filepath.Join(dir, drainFile)
	raw, err := os.ReadFile(d.path)
	if errors.Is(err, fs.ErrNotExist) {
		d.Since.Store(nil)
		return
	}
	var r drainRecord
	if err != nil || json.Unmarshal(raw, &r) != nil || r.Since.IsZero() {
		r.Since = time.Now()
	}
	d.Since.Store(&r.Since)
}

// Set drains the node, or ends that. Nothing changes unless the file was written.
func (d *Drained) Set(on bool) error {
	was := d.Since.Load()
	switch {
	case on == (was != nil):
		return nil
	case !on:
		if err := os.Remove(d.path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("end drain: %w", err)
		}
		d.Since.Store(nil)
		return nil
	}
	r := drainRecord{time.Now().UTC()}
	raw, err := json.Marshal(r)
	if err == nil {
		err = ReplaceFile(d.path, append(raw, '\n'))
	}
	if err != nil {
		return fmt.Errorf("drain: %w", err)
	}
	d.Since.Store(&r.Since)
	return nil
}

// The files in --state-dir.
const (
	pinsFile  = "pins.json"
	drainFile = "drained.json"
	// APIStateFile has what the Kubernetes API said last.
	APIStateFile = "api-state.zip"
	// EjectionsFile has what is ejected: the next kproxy of this node begins with that.
	EjectionsFile = "ejected.json"
	// FlowsFile says which endpoints clients have. A kproxy leaves it that ends with no other one taking over.
	FlowsFile = "flows.cbor"
)

// StateFiles are all of them.
var StateFiles = []string{pinsFile, drainFile, APIStateFile, EjectionsFile, FlowsFile}

// ReplaceFile replaces a file by rename, so a crash leaves the old or the new one, and
// has both on the disk before it returns: a rename can get there before the content.
func ReplaceFile(path string, content []byte) error {
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
