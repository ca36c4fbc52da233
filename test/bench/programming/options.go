package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"
)

// options are the command line.
type options struct {
	scales          []int // numbers of services, measured one after the other
	endpoints       int   // of each service
	subjects, cases []string
	rounds, changes int
	source          string
	kproxy          string   // built from this tree if empty
	kproxyArgs      []string // further arguments of kproxy run
	json, markdown  string   // files to write
	profiles        string   // folder for kproxy's profiles
	logs            string   // folder for the proxies' logs
	deadline        time.Duration
	quick, slow     bool
	verify          bool
}

// The cases, in the order in which a proxy goes through them.
const (
	caseStart      = "start"
	caseMemory     = "memory"
	caseChange     = "change"
	caseCPU        = "cpu"
	caseBackToBack = "back-to-back"
	caseConnect    = "connect"
	caseMove       = "move"
)

var allCases = []string{caseStart, caseMemory, caseConnect, caseChange, caseCPU, caseBackToBack, caseMove}

// The sources of services.
const (
	sourceAPI       = "api"
	sourceManifests = "manifests"
)

func parseOptions(args []string) (options, error) {
	var o options
	f := flag.NewFlagSet("programming", flag.ContinueOnError)
	subjects := f.String("subjects", strings.Join(subjectNames(), ","), "who is measured")
	cases := f.String("cases", strings.Join(allCases, ","), "what is measured")
	kproxyArgs := f.String("kproxy-args", "", "further `arguments` of kproxy run, separated by blanks")
	scales := f.String("services", "10000,2000", "how `many`, separated by commas")
	f.IntVar(&o.endpoints, "endpoints", 10, "of each service")
	f.IntVar(&o.rounds, "rounds", 5, "how often each subject has its turn")
	f.IntVar(&o.changes, "changes", 10, "of endpoints, in each turn and case")
	f.StringVar(&o.source, "source", sourceAPI, "where services come from: api, a real API server, or manifests, files (kproxy only)")
	f.StringVar(&o.kproxy, "kproxy", os.Getenv("KPROXY_BIN"), "the program to measure (default: $KPROXY_BIN, or built from this tree)")
	f.StringVar(&o.json, "json", "", "write the report to `FILE`")
	f.StringVar(&o.markdown, "markdown", "", "write it as Markdown to `FILE`")
	f.StringVar(&o.profiles, "profiles", "", "write kproxy's CPU and heap profiles to `DIR`; the figures are worse for it")
	f.StringVar(&o.logs, "logs", "", "write the proxies' logs to `DIR`")
	f.DurationVar(&o.deadline, "deadline", 2*time.Minute, "bound on everything that is waited for")
	f.BoolVar(&o.verify, "verify", true, "after each start, connect to every service and count the rules in the kernel")
	f.BoolVar(&o.slow, "slow", false, "measure those too that take many minutes for so many services, with a deadline to match")
	f.BoolVar(&o.quick, "quick", false, "100 services, each subject once: shows that the rig works")
	if err := f.Parse(args); err != nil {
		return o, err
	}
	o.subjects, o.cases, o.kproxyArgs = split(*subjects), split(*cases), strings.Fields(*kproxyArgs)
	for _, text := range split(*scales) {
		n, err := strconv.Atoi(text)
		if err != nil {
			return o, fmt.Errorf("services %q are no number", text)
		}
		o.scales = append(o.scales, n)
	}
	if o.quick {
		o.scales, o.rounds, o.changes = []int{100}, 1, 2
	}
	if o.slow {
		o.deadline = max(o.deadline, 30*time.Minute)
	}
	return o, o.validate(f.Args())
}

func split(s string) []string {
	return slices.DeleteFunc(strings.Split(s, ","), func(s string) bool { return s == "" })
}

// validate reports every problem.
func (o *options) validate(rest []string) error {
	var errs []error
	if len(rest) > 0 {
		errs = append(errs, fmt.Errorf("unexpected argument %q", rest[0]))
	}
	for _, n := range o.scales {
		if n < movables || n > maxServices {
			errs = append(errs, fmt.Errorf("%d services are not between %d and %d", n, movables, maxServices))
		}
		if o.endpoints < 1 || n*o.endpoints > maxEndpoints {
			errs = append(errs, fmt.Errorf("%d × %d endpoints are not between 1 and %d", n, o.endpoints, maxEndpoints))
		}
	}
	if len(o.scales) == 0 {
		errs = append(errs, errors.New("how many services?"))
	}
	if o.rounds < 1 || o.changes < 1 {
		errs = append(errs, fmt.Errorf("%d rounds and %d changes must be positive", o.rounds, o.changes))
	}
	for _, name := range o.subjects {
		if _, ok := subjectOf(name); !ok {
			errs = append(errs, fmt.Errorf("subject %q is none of %s", name, strings.Join(subjectNames(), ", ")))
		}
	}
	for _, name := range o.cases {
		if !slices.Contains(allCases, name) {
			errs = append(errs, fmt.Errorf("case %q is none of %s", name, strings.Join(allCases, ", ")))
		}
	}
	if o.source != sourceAPI && o.source != sourceManifests {
		errs = append(errs, fmt.Errorf("source %q is neither %s nor %s", o.source, sourceAPI, sourceManifests))
	}
	if os.Geteuid() != 0 {
		errs = append(errs, errors.New("run as root: it makes network namespaces"))
	}
	return errors.Join(errs...)
}

func (o *options) wants(name string) bool { return slices.Contains(o.cases, name) }
