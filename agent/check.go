package agent

import (
	"kproxy.dev/kproxy/source/file"
)

// CheckReport is what `kproxy check` found.
type CheckReport struct {
	Services  int      // service ports
	Endpoints int      // of all of them
	Problems  []string // "file:line: what", in order of file and line
}

// Check reads manifests as `kproxy run` would and reports everything wrong
// with them. The error names paths that can't be read.
func Check(paths []string, node string) (CheckReport, error) {
	snapshot, problems, err := file.Load(paths, node)
	if err != nil {
		return CheckReport{}, err
	}
	r := CheckReport{Services: snapshot.Len()}
	for _, p := range problems {
		r.Problems = append(r.Problems, p.String())
	}
	for port, endpoints := range snapshot.All() {
		r.Endpoints += len(endpoints)
		for _, p := range port.Problems {
			r.Problems = append(r.Problems, port.Source+": "+p)
		}
	}
	return r, nil
}
