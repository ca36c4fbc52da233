// Package programming measures what it takes to program the kernel for many
// services: kproxy against kube-proxy, with the same real API server, on one
// machine in one run. `bin/bench/run -cases programming` runs it, in the
// repository's root.
//
// Client, node, backends and the control plane are network namespaces of its own.
// etcd, kube-apiserver (test/kube/setup.sh) and an optimised kube-proxy are built
// once and kept in ~/.cache/kproxy-kube, and so is etcd's data with the objects of
// each number of services.
//
// Every endpoint answers: two backends own networks that hold them all. Ten of
// the services have one endpoint and are those that change, from the one backend
// to the other, so a client sees which endpoint a proxy uses.
//
// Subjects take turns; in each turn a proxy starts on a node without rules, goes
// through the cases, and is removed with all that it programmed. Every wait is
// bounded: a proxy that takes longer fails its case.
package programming

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"kproxy.dev/kproxy/lab/report"
)

// Options say what to measure.
type Options struct {
	Services        []int // numbers of services, measured one after the other
	Endpoints       int   // of each service
	Subjects, Cases []string
	Rounds, Changes int
	KProxy, Loads   string // programs: the proxy, and client and server of loads (load.Main)
	Deadline        time.Duration
	Quick, Slow     bool
}

// Default are the usual options, without subjects and cases.
func Default() Options {
	return Options{Services: []int{10_000, 2000}, Endpoints: 10, Rounds: 3, Changes: 6, Deadline: 2 * time.Minute}
}

// The cases, in the order in which a proxy goes through them.
const (
	caseStart      = "start"
	caseMemory     = "memory"
	caseConnect    = "connect"
	caseForward    = "forward"
	caseChange     = "change"
	caseCPU        = "cpu"
	caseBackToBack = "back-to-back"
	caseMove       = "move"
	caseDead       = "dead-endpoint"
)

// Cases are all of them.
var Cases = []string{caseStart, caseMemory, caseConnect, caseForward, caseChange, caseCPU, caseBackToBack, caseMove, caseDead}

// Flags adds those that are about programming only.
func (o *Options) Flags(set *flag.FlagSet) {
	set.Func("services", "programming: `NUMBERS` of services (default 10000,2000)", func(s string) error {
		o.Services = nil
		for word := range strings.SplitSeq(s, ",") {
			n, err := strconv.Atoi(word)
			if err != nil {
				return fmt.Errorf("%q is no number", word)
			}
			o.Services = append(o.Services, n)
		}
		return nil
	})
	set.IntVar(&o.Changes, "changes", o.Changes, "programming: `N` changes of endpoints in each turn and case")
	set.BoolVar(&o.Slow, "slow", false, "programming: measure those too that take many minutes for so many services")
}

// Validate reports every problem.
func (o *Options) Validate() error {
	var errs []error
	for _, n := range o.Services {
		if n < movables || n > maxServices || n*o.Endpoints > maxEndpoints {
			errs = append(errs, fmt.Errorf("%d services of %d endpoints are not between %d and %d, and %d endpoints", n, o.Endpoints, movables, maxServices, maxEndpoints))
		}
	}
	if o.Rounds < 1 || o.Changes < 1 || o.Endpoints < 1 {
		errs = append(errs, fmt.Errorf("%d rounds, %d changes and %d endpoints must be positive", o.Rounds, o.Changes, o.Endpoints))
	}
	return errors.Join(errs...)
}

// Run measures, and adds what it found to out, also after an error. It fails when
// one of kproxy's cases did; if Quick, when any did.
func Run(ctx context.Context, o Options, out *report.Report) error {
	if o.Quick {
		o.Services, o.Rounds, o.Changes = []int{100}, 1, 2
	}
	if o.Slow {
		o.Deadline = max(o.Deadline, 30*time.Minute)
	}
	if err := o.Validate(); err != nil {
		return err
	}
	out.Notes = append(out.Notes, o.notes()...)
	var errs []error
	for _, services := range o.Services {
		r := &rig{Options: o, world: world{services, o.Endpoints}}
		r.describe()
		if err := r.run(ctx); err != nil {
			errs = append(errs, fmt.Errorf("%d services: %w", services, err))
		}
		errs = append(errs, r.report(out)...)
		if ctx.Err() != nil {
			break
		}
	}
	return errors.Join(errs...)
}

// figure is one that a case measures.
type figure struct {
	name string // "programming-N/…", N being the number of services
	from string // case
	work string
	text string
	unit string
}

// The works that have several figures.
const (
	starts   = "cold start of the proxy, API full of services"
	changes  = "one service's only endpoint moves"
	memory   = "memory of the process, nothing has changed yet"
	forwards = "traffic that is no service's"
	carries  = "traffic of a service that the kernel carries"
	dead     = "one of a service's endpoints falls silent, the API lists it"
)

var (
	figStartAnswer    = figure{"start/answer", caseStart, starts, "until services everywhere in the table answer", "s"}
	figStartKernel    = figure{"start/kernel", caseStart, starts, "until all rules are in the kernel", "s"}
	figStartCPU       = figure{"start/cpu", caseStart, starts, "CPU time until then, with children", "s"}
	figStartCalm      = figure{"start/cpu-calm", caseStart, starts, "CPU time until idle, with children", "s"}
	figChange         = figure{"change/write", caseChange, changes, "from the write until new connections follow, p50", "ms"}
	figChangeReported = figure{"change/reported", caseChange, changes, "the same, from when the source has reported it to a watcher, p50", "ms"}
	figChangeKernel   = figure{"change/kernel", caseChange, changes, "from the write until the kernel's rules have it, p50", "ms"}
	figChangeCPU      = figure{"change/cpu", caseCPU, changes, "CPU time of a change, with children", "ms"}
	figChangeChildren = figure{"change/cpu-children", caseCPU, changes, "of that, children such as iptables-restore", "ms"}
	figIdleCPU        = figure{"change/idle-cpu", caseCPU, "nothing changes", "CPU time in a second", "ms"}
	figScrapeCPU      = figure{"scrape/cpu", caseCPU, "a scrape of /metrics", "CPU time", "ms"}
	figBackToBack     = figure{"change/back-to-back", caseBackToBack, "changes back to back", "each", "ms"}
	figConnectOther   = figure{"connect/other", caseConnect, "connect to an address that is no service's", "p50", "µs"}
	figConnectService = figure{"connect/service", caseConnect, "connect to a service, any of all", "p50", "µs"}
	figForwardTCP     = figure{"forward/other-tcp", caseForward, forwards, "an exchange of one of 64 connections, in all", "µs"}
	figForwardUDP     = figure{"forward/other-udp", caseForward, forwards, "an exchange of one of 64 UDP sessions, in all", "µs"}
	figForwardBulk    = figure{"forward/other-bulk", caseForward, forwards, "a gigabyte on one connection", "ms"}
	figServiceTCP     = figure{"forward/service-tcp", caseForward, carries, "an exchange of one of 64 connections, in all", "µs"}
	figServiceUDP     = figure{"forward/service-udp", caseForward, carries, "an exchange of one of 64 UDP sessions, in all", "µs"}
	figServiceBulk    = figure{"forward/service-bulk", caseForward, carries, "a gigabyte on one connection", "ms"}
	figRecallOwn      = figure{"move/recall-own", caseMove, "recall of one service", "kproxy's pass", "ms"}
	figRecall         = figure{"move/recall", caseMove, "recall of one service", "from the request until connections go through userspace", "ms"}
	figOffloadOwn     = figure{"move/offload-own", caseMove, "offload of one service", "kproxy's pass", "ms"}
	figOffload        = figure{"move/offload", caseMove, "offload of one service", "from the request until connections go through the kernel", "ms"}
	figRSS            = figure{"memory/rss", caseMemory, memory, "RSS", "MiB"}
	figPss            = figure{"memory/pss", caseMemory, memory, "PSS", "MiB"}
	figPeak           = figure{"memory/peak", caseMemory, memory, "highest RSS since its start", "MiB"}
	figDeadLongest    = figure{"dead-endpoint/longest", caseDead, dead, "longest connect to answer", "ms"}
	figDeadLate       = figure{"dead-endpoint/late", caseDead, dead, "of connects from 2 s after on, above 100 ms or without an answer", "%"}
	figDeadFailed     = figure{"dead-endpoint/failed", caseDead, dead, "without an answer in 10 s", "%"}
	figDeadLast       = figure{"dead-endpoint/last", caseDead, dead, "when the last one above 100 ms began, after the silence did", "s"}
	figRSSLater       = figure{"memory/rss-changed", caseMemory, "memory of the process after 100 changes", "RSS", "MiB"}
)

// figures are all of them, in the order of the report.
var figures = []figure{
	figStartAnswer, figStartKernel, figStartCPU, figStartCalm, figChange, figChangeReported, figChangeKernel, figChangeCPU, figChangeChildren,
	figIdleCPU, figScrapeCPU, figBackToBack, figConnectOther, figConnectService,
	figForwardTCP, figForwardUDP, figForwardBulk, figServiceTCP, figServiceUDP, figServiceBulk, figRecallOwn, figRecall, figOffloadOwn, figOffload, figRSS, figPss, figPeak, figRSSLater, figDeadLongest, figDeadLate, figDeadFailed, figDeadLast,
}

// describe makes the cases of the report, without values.
func (r *rig) describe() {
	group := fmt.Sprintf("Programming the kernel, %s services × %d endpoints", report.Thousands(r.world.services), r.world.endpoints)
	for _, f := range figures {
		c := report.Case{Name: fmt.Sprintf("programming-%d/%s", r.world.services, f.name), Group: group, Work: f.work, Figure: f.text, Unit: f.unit, Better: report.Lower}
		for _, s := range subjects {
			c.Subjects = append(c.Subjects, report.Subject{Name: s.Name, Class: s.class})
		}
		r.found = append(r.found, c)
	}
}

// add adds a figure of this round.
func (r *rig) add(s subject, f figure, v float64) {
	i, k := slices.Index(figures, f), slices.IndexFunc(subjects, func(x subject) bool { return x.Name == s.Name })
	r.found[i].Subjects[k].Add(r.round, v)
	fmt.Fprintf(os.Stderr, "         %-24s %s\n", f.name, report.Figure(v))
}

// fail notes that a case failed, at all of its figures.
func (r *rig) fail(s subject, name string, err error) {
	why, _, _ := strings.Cut(err.Error(), "\n")
	for i, f := range figures {
		for k := range r.found[i].Subjects {
			if x := &r.found[i].Subjects[k]; f.from == name && x.Name == s.Name {
				x.Fail(1, why)
			}
		}
	}
	text := fmt.Sprintf("%s, %d services: %s: %s", s.Name, r.world.services, name, why)
	r.warnings = append(r.warnings, text)
	if s.kind == kproxy || r.Quick {
		r.failed = append(r.failed, errors.New(text))
	}
}

// report adds what was found, and returns which cases failed.
func (r *rig) report(out *report.Report) []error {
	measured := false
	for _, c := range r.found {
		c.Subjects = slices.DeleteFunc(c.Subjects, func(s report.Subject) bool { return len(s.Values) == 0 })
		if len(c.Subjects) > 0 {
			out.Cases = append(out.Cases, c)
			measured = true
		}
	}
	out.Warnings = append(out.Warnings, r.warnings...)
	for _, name := range r.Subjects {
		if s := subjectOf(name); s.most > 0 && r.world.services > s.most && !r.Slow {
			out.Absent = append(out.Absent, report.Absent{Subject: s.Name, Reason: fmt.Sprintf("with %d services its first sync takes many minutes; -slow measures it", r.world.services)})
		}
	}
	if steal, others := report.SpreadOf(r.steal), report.SpreadOf(r.others); others.Median > 0.05 || steal.Max > 0.05 {
		out.Doubt("While %d services were programmed, other programs used %.0f%% of the processors (median), and the hypervisor up to %.0f%%.", r.world.services, 100*others.Median, 100*steal.Max)
	}
	if r.version != "" && !slices.ContainsFunc(out.Host.Programs, func(p report.Program) bool { return p.Name == "kube-proxy" }) {
		out.Host.Programs = append(out.Host.Programs, report.Program{Name: "kube-proxy", Version: strings.TrimPrefix(r.version, "v")})
	}
	if !measured {
		return append(r.failed, errors.New("nothing was measured"))
	}
	return r.failed
}

// notes say how it was measured.
func (o *Options) notes() []report.Note {
	out := []report.Note{
		{Title: "Programming", Text: fmt.Sprintf("Services of %d TCP endpoints, %d of them of one, IPv4 only, from one API server (etcd and kube-apiserver from their Go modules), which all proxies watch. Every endpoint answers. A connection to every service, and the number of endpoints in the kernel's rules, prove a cold start afterwards. Each turn has %d changes of each kind, where they take long at least %d, %s apart unless back to back; a turn's figure is their median, CPU their mean without what the process uses when idle. Without a proxy, connects to a service are to a backend.", o.Endpoints, movables, o.Changes, min(fewChanges, o.Changes), o.spacing())},
	}
	for _, name := range o.Subjects {
		s := subjectOf(name)
		out = append(out, report.Note{Title: s.Name, Text: s.About})
	}
	return out
}

// kind says whose program a subject is.
type kind int

const (
	noProxy kind = iota
	kproxy
	kubeProxy
	haProxy // in the case of a dead endpoint only
)

// subject is a proxy in one of its modes.
type subject struct {
	Name    string
	About   string // how it is configured
	class   report.Class
	kind    kind
	mode    string // as its --mode or --proxy-mode names it
	variant string // of iptables: "nft" or "legacy"
	most    int    // services, unless -slow; 0 for any number
}

// tracking is the mode of noProxy on a node that tracks connections.
const tracking = "conntrack"

// everyService has the kernel carry every service at once and for good: the
// state that a change or a start costs most in. With the defaults, an unused
// service costs the kernel's data plane nothing but its rules.
var everyService = []string{"--offload-after", "0s", "--offload-min-connections", "0"}

const (
	kproxyConfig = "kproxy with defaults, but --offload-after 0s --offload-min-connections 0: the kernel carries every service; -v debug, to see when its rules are written"
	kubeConfig   = "kube-proxy with defaults, minSyncPeriod 1s; --vmodule=proxier=2, to see when it has synced"
)

var subjects = []subject{
	{Name: "no-proxy", class: report.Limit, About: "the node routes"},
	{Name: "no-proxy-conntrack", class: report.Limit, mode: tracking, About: "the node routes and has one rule of nat, for which the kernel tracks connections, as it does for any that masquerades pods"},
	{Name: "kproxy-nft", class: report.KProxy, kind: kproxy, mode: "iptables", variant: "nft", About: kproxyConfig},
	{Name: "kube-proxy-iptables-nft", class: report.Peer, kind: kubeProxy, mode: "iptables", variant: "nft", About: kubeConfig, most: 2000},
	{Name: "kube-proxy-nftables", class: report.Peer, kind: kubeProxy, mode: "nftables", variant: "nft", About: kubeConfig},
	{Name: "kproxy-nftables", class: report.KProxy, kind: kproxy, mode: "nftables", variant: "nft", About: kproxyConfig},
	{Name: "kube-proxy-iptables-legacy", class: report.Peer, kind: kubeProxy, mode: "iptables", variant: "legacy", About: kubeConfig},
	{Name: "haproxy-check", class: report.Peer, kind: haProxy, About: "HAProxy with its default checks (each 2 s, down after three) and option redispatch, in the case of a dead endpoint only"},
	{Name: "kproxy-userspace", class: report.KProxy, kind: kproxy, mode: "userspace", variant: "nft", About: "kproxy with defaults, in userspace"},
}

// Subjects are all of them.
func Subjects() []subject { return subjects }

// subjectOf is the subject with a name; the name must be one.
func subjectOf(name string) subject {
	return subjects[slices.IndexFunc(subjects, func(s subject) bool { return s.Name == name })]
}

// written is a part of the line that the proxy logs when its rules are in the
// kernel.
func (s subject) written() string {
	if s.kind == kproxy {
		return "programmed the kernel"
	}
	return "SyncProxyRules complete"
}

// kernel reports whether the proxy has rules of services.
func (s subject) kernel() bool {
	return s.mode != "userspace" && s.kind != noProxy && s.kind != haProxy
}
