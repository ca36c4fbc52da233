package main

import (
	"bufio"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"path"
	"regexp"
	"slices"
	"strings"
)

// event is one line of `go test -json` (go doc test2json), or one that run.sh adds: "stage", what a part of it took.
type event struct {
	Action      string
	Package     string
	ImportPath  string // of build events
	Test        string
	Elapsed     float64
	Busy        float64 // of a stage, the percentage of the machine's processors
	Output      string
	FailedBuild string
}

// report counts events and prints as they come: a line a package, and the
// output of what fails; at the end, of which some see no more than the last lines, why tests were skipped, what took long, what
// didn't end, and what failed and why. A package that is run once more elsewhere has that in its name: 'package (vm)'. A test that is
// skipped here and passes there isn't skipped. It is used by one goroutine.
type report struct {
	out       io.Writer
	passed    int
	failed    []string
	reasons   map[string][]string // of failed, the lines that say why
	skipped   []skip
	elsewhere map[string]bool // tests that passed there, as they are named here

	output map[string][]string // per test that runs, its output so far
	broken map[string]bool     // packages of which something failed
	stages []event             // that have ended, with what each took
	long   []event             // tests that took longSeconds or more
}

// The mostLong tests that took longest are named at the end, if they took longSeconds.
const (
	longSeconds = 10
	mostLong    = 20
)

// skip is a test that was skipped, and the reason it gave.
type skip struct{ name, why string }

func newReport(out io.Writer) *report {
	return &report{out: out, reasons: map[string][]string{}, elsewhere: map[string]bool{}, output: map[string][]string{}, broken: map[string]bool{}}
}

func (r *report) read(in io.Reader) error {
	// Lines have no bound: a test may print anything.
	for lines := bufio.NewReader(in); ; {
		line, err := lines.ReadString('\n')
		if line != "" {
			var e event
			if json.Unmarshal([]byte(line), &e) == nil {
				r.add(e)
			} else {
				fmt.Fprint(r.out, line)
			}
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

func (r *report) add(e event) {
	name := e.Package
	if e.Test != "" {
		name += " " + e.Test
	}
	switch e.Action {
	case "output":
		r.output[name] = append(r.output[name], e.Output) // until it is known whether it matters
	case "build-output":
		fmt.Fprint(r.out, e.Output)
	case "pass", "bench":
		if e.Test != "" {
			r.passed++
			if e.Elapsed >= longSeconds && !strings.Contains(e.Test, "/") {
				r.long = append(r.long, e)
			}
			if pkg, _, ok := strings.Cut(e.Package, " ("); ok {
				r.elsewhere[pkg+" "+e.Test] = true
			}
		} else {
			fmt.Fprintf(r.out, "ok    %-40s %6.1fs\n", e.Package, e.Elapsed)
		}
		delete(r.output, name)
	case "skip":
		if e.Test != "" {
			r.skip(name)
		}
		delete(r.output, name)
	case "fail":
		r.fail(name, e)
	case "stage":
		r.stages = append(r.stages, e)
	}
}

// skip keeps a test's last word, which is the reason given to t.Skip.
func (r *report) skip(name string) {
	why := ""
	for _, l := range r.output[name] {
		if l = strings.TrimSpace(l); l != "" && !strings.HasPrefix(l, "---") && !strings.HasPrefix(l, "===") {
			why = l
		}
	}
	r.skipped = append(r.skipped, skip{name, why})
}

// fail prints everything a failed test or package said. A test that fails
// because of a subtest, and a package because of a test, don't count again.
func (r *report) fail(name string, e event) {
	text := strings.Join(r.output[name], "")
	delete(r.output, name)
	if e.Test == "" {
		if strings.HasPrefix(e.Package, "go test (") && len(r.failed) > 0 {
			return // go test failed because of what was printed already
		}
		text = r.unfinished(e.Package) + text
		if r.broken[e.Package] {
			fmt.Fprintf(r.out, "%sFAIL  %-40s %6.1fs\n", text, e.Package, e.Elapsed)
			return
		}
	}
	r.broken[e.Package] = true
	fmt.Fprintf(r.out, "FAIL  %s\n%s", name, text)
	if !slices.ContainsFunc(r.failed, func(f string) bool { return strings.HasPrefix(f, name+"/") }) {
		r.failed = append(r.failed, name)
		r.reasons[name] = reason(text)
		if e.Package == "checks" {
			r.reasons[name] = ending(text)
		}
	}
}

// mostLines bounds what is printed of a test that its package's end interrupted.
const mostLines = 60

// unfinished returns the output of a package's tests that have neither passed nor
// failed when it fails: a crash, a time-out or a race outside of tests ends the
// package, and test2json files what was said about it under a test that ran.
func (r *report) unfinished(pkg string) string {
	var text strings.Builder
	for _, name := range slices.Sorted(maps.Keys(r.output)) {
		if test, ok := strings.CutPrefix(name, pkg+" "); !ok || strings.HasPrefix(test, "(") {
			continue // of another package, or of its run elsewhere
		}
		lines := r.output[name]
		delete(r.output, name)
		start := max(0, len(lines)-mostLines)
		if i := slices.IndexFunc(lines, crash.MatchString); i >= 0 {
			start = min(i, start)
		}
		fmt.Fprintf(&text, "%s didn't end:\n%s", name, strings.Join(lines[start:min(len(lines), start+mostLines)], ""))
	}
	return text.String()
}

var (
	// crash matches how the end of a test binary begins.
	crash = regexp.MustCompile(`^(panic|fatal error|SIG[A-Z]+|unexpected fault|signal|exit status 2|\*\*\* Test killed|FATAL|==\d+==ERROR)\b|^WARNING: DATA RACE|ThreadSanitizer| didn't end:$`)
	// said matches the beginning of what a test said by t.Error and the like.
	said = regexp.MustCompile(`^ +\S+\.go:\d+: `)
)

// Of what a test said, so much is repeated at the end.
const (
	mostReasons = 12
	mostOfLine  = 300
)

// reason returns the lines of a failed test's output, or of a package's, that say why.
func reason(text string) (lines []string) {
	follows := 0 // lines that belong to one that says why
	for line := range strings.Lines(text) {
		line = strings.TrimRight(line, "\n")
		switch {
		case crash.MatchString(line):
			follows = 6
		case said.MatchString(line):
			follows = 3
		}
		if follows > 0 && len(lines) < mostReasons && strings.TrimSpace(line) != "" {
			lines = append(lines, line[:min(len(line), mostOfLine)])
			follows--
		}
	}
	return lines
}

// ending returns the last lines of a text, for the output of what isn't Go's.
func ending(text string) []string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return lines[max(0, len(lines)-mostReasons):]
}

// finish prints the totals and says whether all is well.
func (r *report) finish(failSkipped bool) bool {
	skipped := slices.DeleteFunc(r.skipped, func(s skip) bool { return r.elsewhere[s.name] })
	for _, s := range skipped {
		fmt.Fprintf(r.out, "SKIP  %s: %s\n", s.name, s.why)
	}
	slices.SortFunc(r.long, func(a, b event) int { return cmp.Compare(b.Elapsed, a.Elapsed) })
	for _, e := range r.long[:min(len(r.long), mostLong)] {
		fmt.Fprintf(r.out, "long  %5.0fs  %s %s\n", e.Elapsed, path.Base(e.Package), e.Test)
	}
	for _, s := range r.stages {
		busy := ""
		if s.Busy > 0 {
			busy = fmt.Sprintf(", processors %.0f%% busy", s.Busy)
		}
		fmt.Fprintf(r.out, "stage %-40s %6.0fs%s\n", s.Package, s.Elapsed, busy)
	}
	for _, name := range slices.Sorted(maps.Keys(r.output)) {
		if _, test, ok := strings.Cut(name, " Test"); ok && !strings.Contains(test, "/") {
			fmt.Fprintln(r.out, "didn't end:", name)
		}
	}
	for _, name := range r.failed {
		fmt.Fprintln(r.out, "failed:", name)
		for _, line := range r.reasons[name] {
			fmt.Fprintln(r.out, line)
		}
	}
	ok := len(r.failed) == 0
	if failSkipped && len(skipped) > 0 {
		fmt.Fprintln(r.out, "skipped tests count as failures here (KPROXY_CI): run as root, with all of test/setup.sh installed")
		ok = false
	}
	if r.passed == 0 {
		fmt.Fprintln(r.out, "nothing ran")
		ok = false
	}
	fmt.Fprintf(r.out, "%d passed, %d failed, %d skipped\n", r.passed, len(r.failed), len(skipped))
	return ok
}
