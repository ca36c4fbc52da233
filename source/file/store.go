package file

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/source"
	"kproxy.dev/kproxy/source/strict"
)

// store holds what the files say. It is owned by one goroutine.
type store struct {
	paths []string
	files map[string]*manifestFile // by name
	order []string                 // names, in the order in which files take precedence
	state map[string]pathState     // by configured path
	note  func(string)             // logs what happens to files besides problems
}

// manifestFile holds what is known of one file.
type manifestFile struct {
	path      string // the configured path it was found at
	signature signature
	settled   bool // signature is older than racy: a change since then shows in it
	sum       [sha256.Size]byte
	read      bool      // sum is of a content that was read
	manifest  manifest  // the last valid content, which is in force
	problems  []Problem // of the content that is on disk now
}

// pathState holds what is known of a configured path.
type pathState struct {
	seen bool  // it has been read at least once
	err  error // of the last attempt
}

// newStore returns an empty store; a nil note logs nothing.
func newStore(paths []string, note func(string)) *store {
	if note == nil {
		note = func(string) {}
	}
	return &store{paths: paths, files: map[string]*manifestFile{}, state: map[string]pathState{}, note: note}
}

// scan lists every path again and reads what changed; with all, it reads
// every file, whatever its signature says. It reports whether anything is
// different from before.
func (s *store) scan(all bool) (changed bool) {
	order, present, absolute := []string{}, map[string]bool{}, map[string]bool{}
	for _, path := range s.paths {
		files, err := list(path)
		changed = s.setPath(path, err) || changed
		if err != nil && !gone(err) {
			files = s.known(path) // out of reach is not deleted
		}
		for _, f := range files {
			if abs, err := filepath.Abs(f.name); err == nil {
				if absolute[abs] {
					continue // found at an earlier path
				}
				absolute[abs] = true
			}
			present[f.name] = true
			order = append(order, f.name)
			changed = s.read(f, all) || changed
		}
	}
	for name := range s.files {
		if !present[name] {
			delete(s.files, name)
			s.note(name + ": gone, and its objects with it")
			changed = true
		}
	}
	s.order = order
	return changed
}

// known returns the files that were found at path before.
func (s *store) known(path string) (out []found) {
	for _, name := range s.order {
		if s.files[name].path == path {
			out = append(out, found{name: name, path: path})
		}
	}
	return out
}

// setPath records the outcome of listing path, and reports whether it is another.
func (s *store) setPath(path string, err error) bool {
	was, known := s.state[path]
	s.state[path] = pathState{seen: was.seen || err == nil, err: err}
	return !known || (was.err == nil) != (err == nil) || err != nil && strict.Cause(was.err).Error() != strict.Cause(err).Error()
}

// read reads one file if it may have changed, and reports whether it did.
func (s *store) read(f found, all bool) bool {
	m := s.files[f.name]
	isNew := m == nil
	if isNew {
		m = &manifestFile{path: f.path}
		s.files[f.name] = m
	}
	if f.info == nil && f.err == nil {
		return false // its directory is out of reach
	}
	var sig signature
	if f.err == nil {
		sig = signatureOf(f.info)
		if m.read && m.settled && !all && sig == m.signature {
			return false
		}
	}
	data, err := strict.Read(f.file)
	if err != nil {
		return s.unreadable(f.name, m, err) || isNew
	}
	m.signature, m.settled = sig, f.err == nil && time.Since(time.Unix(0, max(sig.mtime, sig.ctime))) > racy
	sum := sha256.Sum256(data)
	if m.read && sum == m.sum {
		return false
	}
	m.read, m.sum = true, sum
	s.parsed(f.name, m, data)
	return true
}

// unreadable records that m can't be read. A link that leads nowhere is a file
// that is gone; anything else keeps what is in force.
func (s *store) unreadable(name string, m *manifestFile, err error) bool {
	problem := Problem{File: name, Message: strict.Cause(err).Error()}
	if !m.read && len(m.problems) == 1 && m.problems[0] == problem {
		return false
	}
	m.read, m.problems = false, []Problem{problem}
	if gone(err) {
		m.manifest = manifest{}
	}
	return true
}

// parsed puts a file's new content in force if it is valid.
func (s *store) parsed(name string, m *manifestFile, data []byte) {
	parsed, problems := parse(name, data)
	m.problems = problems
	if len(problems) > 0 {
		return
	}
	m.manifest = parsed
	for _, p := range parsed.skipped {
		s.note(p.String())
	}
}

// position says where an object is defined.
type position struct {
	file string
	line int
}

func (p position) String() string { return fmt.Sprintf("%s:%d", p.file, p.line) }

// build converts what is in force. The problems are those of all files in the
// order of precedence, by line, files that can't be read included.
func (s *store) build(node string, addresses ...netip.Addr) (*service.Snapshot, []Problem) {
	var problems []Problem
	objects := source.Objects{NodeAddresses: addresses}
	positions := map[id]position{}
	for _, name := range s.order {
		f := s.files[name]
		problems = append(problems, f.problems...)
		if len(f.problems) == 0 {
			problems = append(problems, f.manifest.advice...)
		}
		for _, o := range f.manifest.objects {
			if first, dup := positions[o.id()]; dup {
				problems = append(problems, Problem{File: name, Line: o.line,
					Message: fmt.Sprintf("%s: defined a second time; the one at %s is in force", o.id(), first)})
				continue
			}
			positions[o.id()] = position{name, o.line}
			collect(&objects, o)
		}
	}
	problems = append(problems, unmatched(&objects, positions)...)
	objects.Where = func(svc *corev1.Service) string {
		return positions[id{"Service", svc.Namespace, svc.Name}].String()
	}
	return source.Build(objects, node), problems
}

func collect(objects *source.Objects, o object) {
	switch o := o.Object.(type) {
	case *corev1.Service:
		objects.Services = append(objects.Services, o)
	case *discoveryv1.EndpointSlice:
		objects.EndpointSlices = append(objects.EndpointSlices, o)
	case *source.Endpoints:
		objects.Endpoints = append(objects.Endpoints, o)
	case *corev1.Node:
		objects.Nodes = append(objects.Nodes, o)
	}
}

// status sorts problems by the configured path they belong to.
func (s *store) status(problems []Problem) []source.Status {
	var out []source.Status
	for _, path := range s.paths {
		st := s.state[path]
		one := source.Status{Name: path, Synced: st.seen}
		if st.err != nil {
			one.Errors = append(one.Errors, Problem{File: path, Message: strict.Cause(st.err).Error()}.String())
		}
		for _, p := range problems {
			if f := s.files[p.File]; f != nil && f.path == path {
				one.Errors = append(one.Errors, p.String())
			}
		}
		out = append(out, one)
	}
	return out
}

// Load reads the manifests at paths once and returns what a proxy on the node
// named node would serve, and everything wrong with the files. Files with
// problems of their own contribute nothing. The error names paths that don't
// exist or can't be read; what the other paths hold is returned all the same.
func Load(paths []string, node string) (*service.Snapshot, []Problem, error) {
	s := newStore(paths, nil)
	s.scan(true)
	snapshot, problems := s.build(node)
	var unread []error
	for _, path := range paths {
		if err := s.state[path].err; err != nil {
			unread = append(unread, fmt.Errorf("read manifests: %w", err))
		}
	}
	return snapshot, problems, errors.Join(unread...)
}

// portID holds what endpoints and Services match their ports by.
type portID struct {
	name     string
	protocol corev1.Protocol
}

func (p portID) String() string { return fmt.Sprintf("%q/%s", p.name, p.protocol) }

// unmatched reports ports of endpoints that the Service doesn't have. In a
// cluster the controllers write both sides; by hand it's easy to name the port
// on one side only, and all that shows is a Service without endpoints.
func unmatched(o *source.Objects, positions map[id]position) []Problem {
	ports := map[id][]portID{}
	for _, svc := range o.Services {
		if !source.Serves(svc) {
			continue
		}
		k := id{"Service", svc.Namespace, svc.Name}
		for _, p := range svc.Spec.Ports {
			ports[k] = append(ports[k], portID{p.Name, p.Protocol})
		}
	}
	var problems []Problem
	match := func(from, svc id, field string, p portID) {
		has, known := ports[svc]
		if !known || slices.Contains(has, p) {
			return
		}
		at := positions[from]
		problems = append(problems, Problem{File: at.file, Line: at.line,
			Message: fmt.Sprintf("%s: %s: %s has no port %s, its ports are %s", from, field, svc, p, joinPorts(has))})
	}
	for _, s := range o.EndpointSlices {
		from := id{"EndpointSlice", s.Namespace, s.Name}
		svc := id{"Service", s.Namespace, s.Labels[discoveryv1.LabelServiceName]}
		for i, p := range s.Ports {
			if p.Name != nil && p.Protocol != nil {
				match(from, svc, fmt.Sprintf("ports[%d]", i), portID{*p.Name, *p.Protocol})
			}
		}
	}
	for _, e := range o.Endpoints {
		from, svc := id{"Endpoints", e.Namespace, e.Name}, id{"Service", e.Namespace, e.Name}
		for i, sub := range e.Subsets {
			for j, p := range sub.Ports {
				match(from, svc, fmt.Sprintf("subsets[%d].ports[%d]", i, j), portID{p.Name, p.Protocol})
			}
		}
	}
	return problems
}

func joinPorts(list []portID) string {
	names := make([]string, len(list))
	for i, p := range list {
		names[i] = p.String()
	}
	return strings.Join(names, ", ")
}
