package agent

import (
	"slices"
	"strings"
	"time"

	"kproxy.dev/kproxy/config"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/source"
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
	ps := planesOf(config.Default()).assume() // by the last one, which needs nothing of the host that manifests could be wrong about
	p, _ := plan.Compute(nil, plan.Inputs{
		Now: time.Now(), Snapshot: snapshot, Policy: renderPolicy(RenderOptions{Mode: plan.Mode(ps[len(ps)-1].name)}),
		Caps: plan.Caps{Planes: ps.abilities(nil, time.Time{})},
	})
	for _, s := range p.Services {
		r.Endpoints += len(s.Endpoints)
		for _, p := range s.Problems {
			if strings.HasPrefix(p, source.AnnotationPrefix) {
				continue // file.Load has told, with its line
			}
			if line := s.Port.Source + ": " + p; !slices.Contains(r.Problems, line) { // ports share annotations
				r.Problems = append(r.Problems, line)
			}
		}
	}
	return r, nil
}
