// Command run measures kproxy's userspace data plane beside its peers, on real
// packets in network namespaces, and writes what it found as JSON (package
// result). `make bench` runs it; `go run ./test/bench/run --list` says what can be
// measured.
//
// It runs itself as client, server and proxy as well, each a process of its own.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/test/bench/subject"
)

func main() {
	// Where servers and iptables are, which ordinary users' PATH leaves out.
	os.Setenv("PATH", os.Getenv("PATH")+":/usr/local/sbin:/usr/sbin:/sbin")
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	// When nobody reads any more, networks are taken down all the same.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
	run := measure
	if len(os.Args) > 1 && !strings.HasPrefix(os.Args[1], "-") {
		run = process
	}
	if err := run(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// flags are what users can say.
type flags struct {
	cases, subjects, json, prefix string
	repeat                        int
	seconds                       float64
	quick, list                   bool
}

func parse(args []string) (f flags, err error) {
	set := flag.NewFlagSet("run", flag.ContinueOnError)
	set.StringVar(&f.cases, "cases", "", "`LIST` of cases, separated by commas (default: all)")
	set.StringVar(&f.subjects, "subjects", "", "`LIST` of subjects (default: all)")
	set.IntVar(&f.repeat, "repeat", 5, "`N` rounds")
	set.Float64Var(&f.seconds, "seconds", 0, "`S` of each run (default: 1.5 or 2)")
	set.StringVar(&f.json, "json", "", "write the report to `FILE`")
	set.BoolVar(&f.quick, "quick", false, "each once and short, to see that all works; fails when one of them does, or is late in four tries")
	set.BoolVar(&f.list, "list", false, "say what can be measured")
	set.StringVar(&f.prefix, "prefix", "kpbench", "of the namespaces' names")
	err = set.Parse(args)
	if err == nil && set.NArg() > 0 {
		err = fmt.Errorf("%q is no flag", set.Arg(0))
	}
	if err == nil && (f.repeat < 1 || f.seconds < 0 || f.seconds > 30) {
		err = errors.New("--repeat must be at least 1 and --seconds at most 30")
	}
	return f, err
}

func measure(ctx context.Context, args []string) error {
	f, err := parse(args)
	if errors.Is(err, flag.ErrHelp) {
		return nil
	}
	if err != nil {
		return err
	}
	if f.list {
		return list()
	}
	descriptors, err := raiseDescriptors()
	if err != nil {
		return err
	}
	o, err := f.options(descriptors)
	if err != nil {
		return err
	}
	if os.Geteuid() != 0 {
		return errors.New("the benchmark makes network namespaces: run it as root")
	}
	return report(ctx, o, f, args)
}

// raiseDescriptors has this process and those it starts as many file descriptors
// as it can, up to what 20,000 connections and their other halves take.
func raiseDescriptors() (int, error) {
	const enough = 1 << 17
	if unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: enough, Max: enough}) == nil {
		return enough, nil
	}
	// Beyond the hard limit it takes CAP_SYS_RESOURCE.
	var l unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &l); err != nil {
		return 0, fmt.Errorf("ask how many file descriptors there may be: %w", err)
	}
	l.Cur = l.Max
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &l); err != nil {
		return 0, fmt.Errorf("raise the limit on file descriptors: %w", err)
	}
	return int(min(l.Cur, enough)), nil
}

func list() error {
	fmt.Println("cases:")
	for _, w := range works(0) {
		fmt.Printf("  %-14s %s\n", w.name, w.title)
	}
	fmt.Printf("  %-14s memory of %d idle connections, and an active one's tail beside them\nsubjects:\n", idleName, idleCount)
	for _, s := range subject.All {
		fmt.Printf("  %-18s %s\n", s.Name, s.About)
	}
	return nil
}

// options makes what is to be done of what was said.
func (f *flags) options(descriptors int) (o options, err error) {
	o = options{repeat: f.repeat, time: time.Duration(f.seconds * float64(time.Second)), quick: f.quick, progress: os.Stderr}
	if f.quick {
		o.repeat = 1
		if o.time == 0 {
			o.time = 200 * time.Millisecond
		}
	}
	names := fields(f.cases)
	for _, w := range works(descriptors) {
		if f.cases == "" || slices.Contains(names, w.name) {
			o.works = append(o.works, w)
		}
		names = slices.DeleteFunc(names, func(n string) bool { return n == w.name })
	}
	o.idle = f.cases == "" || slices.Contains(names, idleName)
	if names = slices.DeleteFunc(names, func(n string) bool { return n == idleName }); len(names) > 0 {
		return o, fmt.Errorf("--cases: there is no %s; --list says what there is", strings.Join(names, ", "))
	}
	for i := range subject.All {
		if f.subjects == "" || slices.Contains(fields(f.subjects), subject.All[i].Name) {
			o.subjects = append(o.subjects, &subject.All[i])
		}
	}
	for _, n := range fields(f.subjects) {
		if subject.Find(n) == nil {
			return o, fmt.Errorf("--subjects: there is no %s; --list says what there is", n)
		}
	}
	o.rig, err = f.rig()
	o.rig.Descriptors = descriptors
	return o, err
}

func fields(s string) []string {
	return strings.FieldsFunc(s, func(r rune) bool { return r == ',' || r == ' ' })
}

// rig finds the programs: this one, and kproxy where the environment or make
// has put it.
func (f *flags) rig() (c subject.Config, err error) {
	c.Prefix = f.prefix
	if c.Program, err = os.Executable(); err != nil {
		return c, fmt.Errorf("find own executable: %w", err)
	}
	c.KProxy = os.Getenv("KPROXY_BIN")
	if c.KProxy == "" {
		c.KProxy = "bin/kproxy"
	}
	if c.KProxy, err = filepath.Abs(c.KProxy); err != nil {
		return c, fmt.Errorf("find kproxy: %w", err)
	}
	if _, err := os.Stat(c.KProxy); err != nil {
		return c, fmt.Errorf("find kproxy: %w: run make build, or name it in KPROXY_BIN", err)
	}
	return c, nil
}
