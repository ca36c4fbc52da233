// Command mutants shows that the test suite isn't weak: it breaks one decision of the product after the other, as
// mutants.txt lists them, and runs the test that has to turn red for it. A mutant is an overlay of the build (go help
// build): no file of the checkout is touched.
//
// Usage: go run ./test/mutants [WORD...], as root; only mutants in whose file or sentence a word occurs. It fails if a
// mutant survives or doesn't compile, or if its test doesn't pass without it.
package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "mutants:", err)
		os.Exit(1)
	}
}

func run(words []string) error {
	all, err := read(".", "test/mutants/mutants.txt")
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "kproxy-mutants")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	r := runner{dir: dir, sound: map[string]error{}}
	caught, n := 0, 0
	for _, m := range all {
		if !m.matches(words) {
			continue
		}
		n++
		begin := time.Now()
		by, err := r.try(m)
		verdict := "caught by " + by
		if err != nil {
			verdict = err.Error()
		} else {
			caught++
		}
		fmt.Printf("%-32s %s\n%32s %s (%.0fs)\n", m.file, m.what, "", verdict, time.Since(begin).Seconds())
	}
	if fmt.Printf("%d mutants, %d caught\n", n, caught); caught < n || n == 0 {
		return fmt.Errorf("%d of %d mutants weren't caught", n-caught, n)
	}
	return nil
}

// runner tries mutants, in a directory for what it builds.
type runner struct {
	dir   string
	sound map[string]error // tests that ran without a mutant, and why they prove nothing
}

// try returns which test fails with m.
func (r *runner) try(m *mutant) (by string, err error) {
	if _, done := r.sound[m.test]; !done {
		r.sound[m.test] = r.unbroken(m)
	}
	if err := r.sound[m.test]; err != nil {
		return "", err
	}
	overlay, err := r.overlay(m)
	if err != nil {
		return "", err
	}
	res, err := r.test(m, overlay)
	switch {
	case err != nil:
		return "", err
	case res.failed == "":
		return "", fmt.Errorf("SURVIVED %s of %s", m.test, m.pkg)
	}
	return res.failed, nil
}

// unbroken runs the test of m without it: what fails or is skipped then would prove nothing.
func (r *runner) unbroken(m *mutant) error {
	res, err := r.test(m)
	switch {
	case err != nil:
		return err
	case res.failed != "":
		return fmt.Errorf("%s fails without a mutant", res.failed)
	case !res.passed:
		return fmt.Errorf("%s of %s doesn't run here: it needs root, or is skipped", m.test, m.pkg)
	}
	return nil
}

// overlay returns the flag of a build with m.
func (r *runner) overlay(m *mutant) (string, error) {
	file, err := filepath.Abs(m.file)
	if err != nil {
		return "", err
	}
	text, as := filepath.Join(r.dir, filepath.Base(file)), filepath.Join(r.dir, "overlay.json")
	list, err := json.Marshal(map[string]map[string]string{"Replace": {file: text}})
	return "-overlay=" + as, errors.Join(err, os.WriteFile(text, m.broken, 0o600), os.WriteFile(as, list, 0o600))
}

// result says how a test went: which test failed first, and whether the one that was asked for passed.
type result struct {
	failed string
	passed bool
}

// test runs the test of m. End-to-end tests get a kproxy that is built alike.
func (r *runner) test(m *mutant, flags ...string) (result, error) {
	env := os.Environ()
	if m.pkg == "./test/e2e" {
		bin := filepath.Join(r.dir, "kproxy")
		if out, err := exec.Command("go", append(append([]string{"build"}, flags...), "-o", bin, "./cmd/kproxy")...).CombinedOutput(); err != nil {
			return result{}, fmt.Errorf("build kproxy: %s", out)
		}
		env = append(env, "KPROXY_BIN="+bin)
	}
	args := append(append([]string{"test", "-json", "-vet=off", "-failfast", "-timeout=3m", "-run=^" + m.test + "$"}, flags...), m.pkg)
	cmd := exec.Command("go", args...)
	cmd.Env = env
	out, err := cmd.Output()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		return result{}, err
	}
	var res result
	last := "" // that began
	for lines := bufio.NewScanner(bytes.NewReader(out)); lines.Scan(); {
		var e struct{ Action, Test string }
		if json.Unmarshal(lines.Bytes(), &e) != nil || e.Test == "" {
			continue
		}
		if e.Action == "run" {
			last = e.Test
		}
		res.passed = res.passed || e.Action == "pass" && e.Test == m.test
		if e.Action == "fail" && !strings.HasPrefix(res.failed, e.Test+"/") { // its own subtest has failed before
			res.failed = e.Test
		}
	}
	if err != nil && res.failed == "" && last == "" { // it doesn't compile
		return result{}, fmt.Errorf("run %s of %s: %s%s", m.test, m.pkg, out, exit.Stderr)
	}
	if err != nil && res.failed == "" { // a crash, or the time-out, has no event
		res.failed = last
	}
	return res, nil
}
