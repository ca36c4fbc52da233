package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/lab/compare/statistics"
	"kproxy.dev/kproxy/test/bench/result"
)

// findings are what was measured so far.
type findings struct {
	round         int
	values        map[figure]map[string]*result.Subject // by subject
	failed        map[string][]failure                  // by subject
	steal, others []float64                             // of each turn, between 0 and 1
}

// failure is a case that went wrong.
type failure struct{ name, why string }

func (f failure) String() string { return f.name + ": " + f.why }

func (f *findings) add(s subject, of figure, v float64) {
	if f.values == nil {
		f.values = map[figure]map[string]*result.Subject{}
	}
	if f.values[of] == nil {
		f.values[of] = map[string]*result.Subject{}
	}
	if f.values[of][s.name] == nil {
		f.values[of][s.name] = &result.Subject{Name: s.name}
	}
	x := f.values[of][s.name]
	if n := len(x.Rounds); n > 0 && x.Rounds[n-1] == f.round {
		f.fail(s, of.from(), fmt.Errorf("the rig measured %s twice in round %d", of, f.round+1))
		return
	}
	x.Values, x.Rounds = append(x.Values, v), append(x.Rounds, f.round)
	fmt.Fprintf(os.Stderr, "         %-36s %s\n", of, statistics.Figure(v))
}

func (f *findings) fail(s subject, name string, err error) {
	if f.failed == nil {
		f.failed = map[string][]failure{}
	}
	why, _, _ := strings.Cut(err.Error(), "\n")
	f.failed[s.name] = append(f.failed[s.name], failure{name, why})
}

// subject is what a subject reached in a figure, and how often the case failed that it
// comes from; false without a value.
func (f *findings) subject(of figure, name string) (result.Subject, bool) {
	x := f.values[of][name]
	if x == nil {
		return result.Subject{}, false
	}
	out := result.NewSubject(name, x.Values)
	out.Rounds = x.Rounds
	for _, failed := range f.failed[name] {
		if failed.name != of.from() {
			continue
		}
		if out.Failures++; out.Error == "" {
			out.Error = failed.why
		}
	}
	return out, true
}

// report is what was found with each number of services.
type report struct {
	options
	began time.Time
	rigs  []*rig
}

// write writes what was measured. It fails when a case of kproxy's did, or nothing
// was measured.
func (r *report) write(ctx context.Context) error {
	out, err := r.result(ctx)
	if err != nil {
		return err
	}
	if r.json != "" {
		err = out.Write(r.json)
	}
	text := os.Stdout
	if r.markdown != "" {
		f, openErr := os.Create(r.markdown)
		if openErr != nil {
			return errors.Join(err, openErr)
		}
		defer f.Close()
		text = f
	}
	if len(out.Cases) == 0 {
		err = errors.Join(err, errors.New("nothing was measured"))
	}
	for _, g := range r.rigs {
		for name, failures := range g.findings.failed {
			if s, _ := subjectOf(name); s.kind == kproxy || r.quick {
				for _, f := range failures {
					err = errors.Join(err, fmt.Errorf("%s: %s", name, f))
				}
			}
		}
	}
	return errors.Join(err, out.WriteMarkdown(text))
}

func (r *report) result(ctx context.Context) (*result.Report, error) {
	out := &result.Report{
		Command: "go run ./test/bench/programming " + strings.Join(os.Args[1:], " "), Started: r.began,
		Seconds: time.Since(r.began).Seconds(), Quick: r.quick,
	}
	if len(r.rigs) > 0 {
		out.KProxy = r.rigs[0].measured
	}
	if err := r.host(ctx, &out.Host); err != nil {
		return nil, err
	}
	out.Notes = r.notes()
	var steal, others []float64
	for _, g := range r.rigs {
		g.into(out)
		steal, others = append(steal, g.findings.steal...), append(others, g.findings.others...)
	}
	out.Host.Steal, out.Host.Others = statistics.Of(steal), statistics.Of(others)
	return out, nil
}

// into adds what was found with one number of services.
func (r *rig) into(out *result.Report) {
	for _, c := range described(r.world) {
		of := figure(c.Name)
		c.Name = of.caseName(r.world.services)
		for _, s := range subjects {
			if x, ok := r.findings.subject(of, s.name); ok {
				c.Subjects = append(c.Subjects, x)
			}
		}
		if len(c.Subjects) > 0 {
			c.Judge()
			out.Cases = append(out.Cases, c)
		}
	}
	for _, name := range r.subjects {
		s, _ := subjectOf(name)
		for _, why := range r.findings.failed[s.name] {
			out.Warnings = append(out.Warnings, fmt.Sprintf("%s, %d services: %s", s.name, r.world.services, why))
		}
		if why := s.left(r.world.services); why != "" && !r.slow {
			out.Absent = append(out.Absent, result.Absent{Subject: s.name, Reason: why})
		}
	}
}

// notes say how it was measured.
func (r *report) notes() []string {
	from := "one API server (etcd and kube-apiserver from their Go modules), which all of them watch"
	if r.source == sourceManifests {
		from = "files, active checks off"
	}
	out := []string{
		fmt.Sprintf("Programming: services of %d TCP endpoints, %d of them of one, IPv4 only, from %s. Every endpoint answers.", r.endpoints, movables, from),
		"Programming: a cold start is proved by a connection to every service and by counting the endpoints in the kernel's rules, afterwards.",
		fmt.Sprintf("Programming: each turn has %d changes of each kind, where they take long at least %d, %s apart unless back to back; a turn's figure is their median, CPU their mean without what the process uses when idle.", r.changes, min(fewChanges, r.changes), r.spacing()),
	}
	out = append(out, "Programming: without a proxy, connects to a service are to a backend.")
	for _, name := range r.subjects {
		s, _ := subjectOf(name)
		out = append(out, fmt.Sprintf("%s: %s", s.name, s.config))
	}
	if len(r.kproxyArgs) > 0 {
		out = append(out, "kproxy was started with "+strings.Join(r.kproxyArgs, " "))
	}
	return out
}

// versionOf is what a kproxy says of itself, or of one that was built without a
// version, the tree's.
func versionOf(ctx context.Context, kproxy, top string) (string, error) {
	out, err := exec.CommandContext(ctx, kproxy, "version").Output()
	if err != nil {
		return "", fmt.Errorf("ask kproxy for its version: %w", err)
	}
	text := strings.TrimPrefix(strings.TrimSpace(string(out)), "kproxy ")
	if !strings.HasPrefix(text, "dev,") {
		return text, nil
	}
	if out, err = exec.CommandContext(ctx, "git", "-C", top, "describe", "--tags", "--always", "--dirty").Output(); err != nil {
		return text, nil // a tree without git is measured all the same
	}
	return strings.TrimSpace(string(out)), nil
}

func (r *report) host(ctx context.Context, h *result.Host) error {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return fmt.Errorf("read kernel's version: %w", err)
	}
	h.Kernel, h.CPUs, h.Go = unix.ByteSliceToString(u.Release[:]), runtime.NumCPU(), runtime.Version()
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err == nil {
		h.MemoryGiB = float64(info.Totalram) * float64(info.Unit) / (1 << 30)
	}
	out, err := exec.CommandContext(ctx, "iptables", "--version").Output()
	if err != nil {
		return fmt.Errorf("ask iptables for its version: %w", err)
	}
	version := strings.Fields(string(out))
	h.Peers = append(h.Peers, result.Peer{Name: "iptables", Version: strings.TrimPrefix(version[len(version)-2], "v")})
	for _, g := range r.rigs {
		if g.version != "" {
			h.Peers = append(h.Peers, result.Peer{Name: "kube-proxy", Version: strings.TrimPrefix(g.version, "v")})
			break
		}
	}
	text, err := os.ReadFile("/proc/cpuinfo")
	if err == nil {
		for line := range strings.Lines(string(text)) {
			if name, value, _ := strings.Cut(line, ":"); strings.TrimSpace(name) == "model name" {
				h.CPUModel = strings.TrimSpace(value)
				break
			}
		}
	}
	return nil
}
