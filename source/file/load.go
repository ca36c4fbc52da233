package file

import (
	"errors"
	"fmt"

	"kproxy.dev/kproxy/service"
)

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
