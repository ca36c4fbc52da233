// Command run measures kproxy beside its peers, on real packets in network
// namespaces: its userspace data plane beside HAProxy, nginx and io.Copy, and the
// programming of the kernel beside kube-proxy (package programming). `make bench`
// runs it; -list says what can be measured.
//
// It runs itself as client, server and proxy as well, each a process of its own.
package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/lab/load"
	"kproxy.dev/kproxy/lab/report"
	"kproxy.dev/kproxy/test/bench/programming"
)

func main() {
	// Where servers and iptables are, which ordinary users' PATH leaves out.
	os.Setenv("PATH", os.Getenv("PATH")+":/usr/local/sbin:/usr/sbin:/sbin")
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	// A closed output doesn't keep networks from being taken down.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
	run := measure
	if len(os.Args) > 1 && !strings.HasPrefix(os.Args[1], "-") {
		run = process
	}
	if err := run(ctx, os.Args[1:]); err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// process is one of the other programs that the benchmark is.
func process(ctx context.Context, args []string) error {
	own := map[string]func(context.Context, ownConfig, func()) error{"copy": runCopy, "engine": runEngine}[args[0]]
	if own == nil {
		return load.Main(ctx, os.Stdout, args)
	}
	var c ownConfig
	if err := json.Unmarshal([]byte(strings.Join(args[1:], " ")), &c); err != nil {
		return fmt.Errorf("read configuration: %w", err)
	}
	return own(ctx, c, func() { fmt.Println(load.Ready) })
}

// options are the command line.
type options struct {
	cases, subjects []string
	out             string
	repeat          int
	time            time.Duration
	quick           bool
	rig             rigConfig
	programming     programming.Options
}

// Rounds, by default. In a run of five, the median of the ratio to a peer that any three of
// its rounds had was off the whole run's by 1% (median) in both parts, and on the other
// side of 1, where that was more than 10% away, in 2% of the data plane's and in 0.2% of
// programming's, whose turns are medians of changes already.
const (
	dataPlaneRounds   = 5
	programmingRounds = 3
)

func measure(ctx context.Context, args []string) error {
	o := options{programming: programming.Default()}
	set := flag.NewFlagSet("run", flag.ContinueOnError)
	cases := set.String("cases", "", "`LIST` of cases, separated by commas (default: all)")
	names := set.String("subjects", "", "`LIST` of subjects (default: all but kproxy-supervised)")
	set.IntVar(&o.repeat, "repeat", 0, fmt.Sprintf("`N` rounds (default: %d of the data plane, %d of programming)", dataPlaneRounds, programmingRounds))
	seconds := set.Float64("seconds", 0, "`S` of each run of the data plane (default: 1.5 or 2)")
	set.StringVar(&o.out, "out", "", "write bench.json, bench.md and bench.html to `FOLDER`")
	set.BoolVar(&o.quick, "quick", false, "each once and short, to see that all works; fails when one of them does, or is late in four tries")
	set.StringVar(&o.rig.prefix, "prefix", "kpbench", "of the namespaces' names")
	listed := set.Bool("list", false, "say what can be measured")
	o.programming.Flags(set)
	if err := set.Parse(args); err != nil {
		return err
	}
	if *listed {
		return list()
	}
	if set.NArg() > 0 {
		return fmt.Errorf("%q is no flag", set.Arg(0))
	}
	if o.repeat < 0 || *seconds < 0 || *seconds > 30 {
		return errors.New("-repeat must be positive and -seconds at most 30")
	}
	o.cases, o.subjects, o.time = fields(*cases), fields(*names), time.Duration(*seconds*float64(time.Second))
	if o.quick {
		o.repeat = 1
		if o.time == 0 {
			o.time = 200 * time.Millisecond
		}
	}
	if err := errors.Join(known("-cases", o.cases, caseNames()), known("-subjects", o.subjects, subjectNames()), o.findPrograms()); err != nil {
		return err
	}
	if os.Geteuid() != 0 {
		return errors.New("the benchmark makes network namespaces: run it as root")
	}
	return o.run(ctx, args)
}

// run measures, and writes the report also of a run that failed.
func (o *options) run(ctx context.Context, args []string) error {
	host, err := report.ReadHost()
	if err != nil {
		return err
	}
	host.Programs = versions()
	start := time.Now()
	r := &report.Report{Title: "What kproxy reaches next to others", Version: "unknown", Command: "bin/bench/run " + strings.Join(args, " "), Started: start.UTC().Truncate(time.Second), Host: host}
	if out, err := exec.Command(o.rig.kproxy, "version").Output(); err == nil {
		first, _, _ := strings.Cut(strings.TrimSpace(string(out)), "\n")
		r.Version = strings.TrimPrefix(first, "kproxy ")
	}
	err = o.dataPlane(ctx, r)
	if ctx.Err() == nil {
		err = errors.Join(err, o.programmingKernel(ctx, r))
	}
	r.Seconds = time.Since(start).Seconds()
	if o.quick {
		r.Doubt("This was a quick run, each work once and short: it shows that the rig works, and its figures say nothing.")
	}
	r.Finish()
	return errors.Join(err, o.write(r))
}

func (o *options) dataPlane(ctx context.Context, r *report.Report) error {
	b := &bench{repeat: cmp.Or(o.repeat, dataPlaneRounds), time: o.time, quick: o.quick, config: o.rig, progress: os.Stderr, report: r}
	for _, w := range works() {
		if chosen(o.cases, w.name) {
			b.works = append(b.works, w)
		}
	}
	b.idle, b.reload = chosen(o.cases, idleName), chosen(o.cases, reloadName)
	for i := range subjects {
		if chosen(o.subjects, subjects[i].name) && (!subjects[i].named || len(o.subjects) > 0) {
			b.subjects = append(b.subjects, &subjects[i])
		}
	}
	if len(b.subjects) == 0 || len(b.works) == 0 && !b.idle && !b.reload {
		return nil
	}
	r.Notes = append(r.Notes,
		report.Note{Title: "Data plane", Text: "Client, node and backend are network namespaces on one machine, joined by veth, a set of them for each subject; all of them share its processors, and nothing is pinned. The proxy's CPU is that of all its processes and threads. What the kernel does in softirqs counts as the time of the process that raised them."},
		report.Note{Title: "Rounds", Text: fmt.Sprintf("They are interleaved: every subject has a run before any has another; %d of them. Figures are medians, and ratios are made within a round.", b.repeat)})
	return b.run(ctx)
}

func (o *options) programmingKernel(ctx context.Context, r *report.Report) error {
	p := o.programming
	p.KProxy, p.Loads, p.Quick, p.Rounds = o.rig.kproxy, o.rig.program, o.quick, cmp.Or(o.repeat, programmingRounds)
	for _, c := range programming.Cases {
		if chosen(o.cases, "programming") || slices.Contains(o.cases, "programming-"+c) {
			p.Cases = append(p.Cases, c)
		}
	}
	for _, s := range programming.Subjects() {
		if chosen(o.subjects, s.Name) {
			p.Subjects = append(p.Subjects, s.Name)
		}
	}
	if len(p.Cases) == 0 || len(p.Subjects) == 0 {
		return nil
	}
	return programming.Run(ctx, p, r)
}

func (o *options) write(r *report.Report) error {
	if o.out != "" {
		if err := os.MkdirAll(o.out, 0o755); err != nil {
			return fmt.Errorf("make folder for the report: %w", err)
		}
		for name, print := range map[string]func(io.Writer) error{"bench.json": r.WriteJSON, "bench.md": r.WriteMarkdown, "bench.html": r.WriteHTML} {
			f, err := os.Create(filepath.Join(o.out, name))
			if err == nil {
				err = errors.Join(print(f), f.Close())
			}
			if err != nil {
				return fmt.Errorf("write report: %w", err)
			}
		}
	}
	return r.WriteMarkdown(os.Stdout)
}

// findPrograms finds this program, and kproxy where the environment or make has put
// it, and raises the limit on file descriptors, for this process and those it starts,
// up to what 20,000 connections and their other halves take.
func (o *options) findPrograms() (err error) {
	c := &o.rig
	if c.program, err = os.Executable(); err != nil {
		return fmt.Errorf("find own executable: %w", err)
	}
	if c.kproxy = os.Getenv("KPROXY_BIN"); c.kproxy == "" {
		c.kproxy = "bin/kproxy"
	}
	if c.kproxy, err = filepath.Abs(c.kproxy); err == nil {
		_, err = os.Stat(c.kproxy)
	}
	if err != nil {
		return fmt.Errorf("find kproxy: %w: run make build, or name it in KPROXY_BIN", err)
	}
	const enough = 1 << 17
	if c.descriptors = enough; unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: enough, Max: enough}) == nil {
		return nil
	}
	// Beyond the hard limit it takes CAP_SYS_RESOURCE.
	var l unix.Rlimit
	if err = unix.Getrlimit(unix.RLIMIT_NOFILE, &l); err == nil {
		l.Cur = l.Max
		err = unix.Setrlimit(unix.RLIMIT_NOFILE, &l)
	}
	if err != nil {
		return fmt.Errorf("raise the limit on file descriptors: %w", err)
	}
	c.descriptors = int(min(l.Cur, enough))
	return nil
}

// versions returns the versions of the programs beside kproxy, as these print them.
func versions() []report.Program {
	var out []report.Program
	for _, p := range [][]string{{"HAProxy", "haproxy", "-v"}, {"nginx", "nginx", "-v"}, {"iptables", "iptables", "--version"}} {
		text, err := exec.Command(p[1], p[2:]...).CombinedOutput()
		if err == nil {
			first, _, _ := strings.Cut(strings.TrimSpace(string(text)), "\n")
			first, _, _ = strings.Cut(first, " - ") // HAProxy's ends with its page
			if _, after, ok := strings.Cut(first, "version"); ok {
				first = after
			}
			out = append(out, report.Program{Name: p[0], Version: strings.Trim(first, ": ")})
		}
	}
	return out
}

func fields(s string) []string {
	return strings.FieldsFunc(s, func(r rune) bool { return r == ',' || r == ' ' })
}

// chosen reports whether a name was asked for; all are where none was.
func chosen(names []string, name string) bool {
	return len(names) == 0 || slices.Contains(names, name)
}

func known(flag string, names, all []string) error {
	names = slices.DeleteFunc(slices.Clone(names), func(n string) bool { return slices.Contains(all, n) })
	if len(names) > 0 {
		return fmt.Errorf("%s: there is no %s; -list says what there is", flag, strings.Join(names, ", "))
	}
	return nil
}

func caseNames() []string {
	out := []string{idleName, reloadName, "programming"}
	for _, w := range works() {
		out = append(out, w.name)
	}
	for _, c := range programming.Cases {
		out = append(out, "programming-"+c)
	}
	return out
}

func subjectNames() (out []string) {
	for _, s := range subjects {
		out = append(out, s.name)
	}
	for _, s := range programming.Subjects() {
		out = append(out, s.Name)
	}
	return out
}

func list() error {
	fmt.Println("cases:")
	for _, w := range works() {
		fmt.Printf("  %-20s %s\n", w.name, w.Title)
	}
	fmt.Printf("  %-20s memory of %d idle connections, and an active one's tail beside them\n", idleName, idleCount)
	fmt.Printf("  %-20s another process of the proxy goes on, with %d connections held\n", reloadName, reloadHeld)
	fmt.Printf("  %-20s programming the kernel; a part of it: programming-%s\nsubjects:\n", "programming", strings.Join(programming.Cases, ", programming-"))
	for _, s := range subjects {
		fmt.Printf("  %-26s %s\n", s.name, s.about)
	}
	for _, s := range programming.Subjects() {
		fmt.Printf("  %-26s programming: %s\n", s.Name, s.About)
	}
	return nil
}
