package offline

import (
	"context"
	"errors"
	"os"
	"slices"
	"strings"
	"time"

	"kproxy.dev/kproxy/agent/node"
	"kproxy.dev/kproxy/config"
	"kproxy.dev/kproxy/conntrack"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/source"
	"kproxy.dev/kproxy/source/file"
)

// CheckReport holds what `kproxy check` found.
type CheckReport struct {
	Services  int      // service ports
	Endpoints int      // of all of them
	Problems  []string // "file:line: what", in order of file and line
}

// Check reads manifests as `kproxy run` would on the node of that name and reports everything wrong
// with them. The error names paths that can't be read.
func Check(paths []string, name string) (CheckReport, error) {
	snapshot, problems, err := file.Load(paths, name)
	if err != nil {
		return CheckReport{}, err
	}
	r := CheckReport{Services: snapshot.Len()}
	for _, p := range problems {
		r.Problems = append(r.Problems, p.String())
	}
	cfg := config.Default()
	ds := node.DriversOf(cfg)
	driver := ds[len(ds)-1]
	driver.Assume()
	abilities := driver.Abilities(nil, time.Time{})
	cfg.Mode = string(abilities[len(abilities)-1].Plane) // which needs nothing of the host that manifests could be wrong about
	p, _ := plan.Compute(nil, plan.Inputs{Now: time.Now(), Snapshot: snapshot, Policy: node.PolicyOf(cfg), Caps: plan.Caps{Planes: abilities}})
	for _, s := range p.Services {
		r.Endpoints += len(s.Endpoints)
		for _, p := range s.Problems {
			if strings.HasPrefix(p, source.AnnotationPrefix) {
				continue // file.Load has said it, with its line
			}
			if line := s.Port.Source + ": " + p; !slices.Contains(r.Problems, line) { // ports share annotations
				r.Problems = append(r.Problems, line)
			}
		}
	}
	return r, nil
}

// HostReport holds what `kproxy check --host` found.
type HostReport struct {
	// Missing says of each mode that isn't possible here what it lacks; every part is
	// a [*kernel.Missing].
	Missing map[plan.Mode]error
	// Auto are the titles of the data planes that mode auto offloads to here, PassedOver why
	// not to those that it prefers.
	Auto       []string
	PassedOver string
	// Without are capabilities that kproxy does without, and what that costs.
	Without []plan.Capability
	// Loaded are the kernel's modules that were loaded because this asked for them.
	Loaded []string
}

// CheckHost finds out what this host lacks for each mode, as kproxy run does. It tries
// rules and sets in a network namespace that is gone after, and has the kernel load
// no data plane.
func CheckHost(ctx context.Context) (HostReport, error) {
	before, r := modulesLoaded(), HostReport{Missing: map[plan.Mode]error{}}
	tracking, err := trackingMissing()
	if err != nil {
		return HostReport{}, err
	}
	facts := map[kernel.Driver]kernel.Facts{}
	ds := node.DriversOf(config.Default())
	for _, d := range ds {
		if facts[d], err = d.Probe(ctx, plan.ModeAuto, true); err != nil {
			return HostReport{}, err
		}
	}
	for _, name := range config.Modes {
		m := plan.Mode(name)
		var errs []error
		for _, d := range ds.Of(m) {
			err := errors.Join(facts[d].Missing, tracking)
			all := d.Abilities(nil, time.Time{})
			if err == nil || !m.Needs(all[len(all)-1].Plane) { // what else the last one lacks follows from that
				err = errors.Join(err, node.Missing(d, m))
			}
			errs = append(errs, err)
		}
		if !slices.Contains(errs, nil) {
			r.Missing[m] = errors.Join(errs...)
		}
	}
	if r.Missing[plan.ModeAuto] == nil {
		auto, _ := ds.Choose(plan.ModeAuto, "", func(d kernel.Driver) (kernel.Facts, error) { return facts[d], nil })
		for _, a := range auto.Driver.Abilities(nil, time.Time{}) {
			if a.Host.Supported {
				r.Auto = append(r.Auto, a.Title)
			}
		}
		r.PassedOver = auto.PassedOver
	}
	for _, d := range ds {
		for _, c := range facts[d].Capabilities {
			if tracking == nil && facts[d].Missing == nil && !c.Supported { // else it follows
				r.Without = append(r.Without, c)
			}
		}
	}
	r.Loaded = slices.DeleteFunc(modulesLoaded(), func(name string) bool { return slices.Contains(before, name) })
	return r, nil
}

// modulesLoaded are the kernel's modules; none where it has no modules.
func modulesLoaded() []string {
	text, err := os.ReadFile("/proc/modules")
	if err != nil {
		return nil
	}
	var names []string
	for line := range strings.Lines(string(text)) {
		name, _, _ := strings.Cut(line, " ")
		names = append(names, name)
	}
	return names
}

// trackingMissing says why there is no connection tracking; nil if there is.
func trackingMissing() (missing, err error) {
	err = kernel.Apart(func() error {
		table, err := conntrack.Dial()
		if err != nil {
			missing = &kernel.Missing{What: "conntrack", How: "a kernel with CONFIG_NF_CT_NETLINK", Err: err}
			return nil
		}
		return table.Close()
	})
	return missing, err
}
