package agent

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/config"
	"kproxy.dev/kproxy/conntrack"
	"kproxy.dev/kproxy/kernel"
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
				continue // file.Load has said it, with its line
			}
			if line := s.Port.Source + ": " + p; !slices.Contains(r.Problems, line) { // ports share annotations
				r.Problems = append(r.Problems, line)
			}
		}
	}
	return r, nil
}

// HostReport is what `kproxy check --host` found.
type HostReport struct {
	// Missing says of each mode that isn't possible here what it lacks; every part is
	// a [*kernel.Missing].
	Missing map[plan.Mode]error
	// Without are capabilities that kproxy does without, and what that costs.
	Without []plan.Capability
	// Loaded are the kernel's modules that were loaded because this asked for them.
	Loaded []string
}

// CheckHost finds out what this host lacks for each mode, as [Agent.Run] does. It tries
// rules and sets in a network namespace that is gone after, and has the kernel load
// no data plane.
func CheckHost(ctx context.Context) (HostReport, error) {
	before, ps := modulesLoaded(), planesOf(config.Default())
	host, tracking, err := probeApart(ctx, ps)
	if err != nil {
		return HostReport{}, err
	}
	r := HostReport{Missing: map[plan.Mode]error{}}
	always := errors.Join(host.Missing(), tracking)
	for _, m := range modes {
		err := always
		for i := range ps {
			if always == nil || i < len(ps)-1 { // what else the last one lacks follows from that
				err = errors.Join(err, ps[i].missing(m))
			}
		}
		if err != nil {
			r.Missing[m] = err
		}
	}
	for _, c := range host.Caps.All {
		if always == nil && !c.Supported { // else it follows
			r.Without = append(r.Without, c)
		}
	}
	r.Loaded = slices.DeleteFunc(modulesLoaded(), func(name string) bool { return slices.Contains(before, name) })
	return r, nil
}

// probeApart is [kernel.Prober.Probe] without a trace; tracking says why there is no
// connection tracking.
func probeApart(ctx context.Context, ps planes) (host *kernel.Host, tracking, err error) {
	prober := kernel.NewProber(nil)
	variant, found := prober.FindVariant(ctx) // by the host's own rules
	prober.Find = func(context.Context) (kernel.Variant, plan.Capability) { return variant, found }
	prober.OpenSets = func() (kernel.SetStore, error) { return kernel.OpenIPSets() }
	err = apart(func() (err error) {
		if host, err = prober.Probe(ctx); err != nil {
			return err
		}
		for i := range ps {
			if err := ps[i].Probe(ctx, host, false); err != nil {
				return err
			}
		}
		table, err := conntrack.Dial()
		if err != nil {
			tracking = &kernel.Missing{What: "conntrack", How: "a kernel with CONFIG_NF_CT_NETLINK", Err: err}
			return nil
		}
		return table.Close()
	})
	return host, tracking, err
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

// apart runs f in a network namespace that ends with it, on a thread that does too.
func apart(f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // and never unlocked: the runtime ends the thread
		if unix.Gettid() == unix.Getpid() {
			// The main thread can't be ended; locked, it isn't used for the goroutine that f gets.
			defer runtime.UnlockOSThread()
			done <- apart(f)
			return
		}
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			done <- &kernel.Missing{
				What: "a network namespace to try things in", How: "run this as root, in a privileged container if in one", Err: fmt.Errorf("unshare: %w", err),
			}
			return
		}
		done <- f()
	}()
	return <-done
}
