// Package program finds the kproxy that tests try, and what they can try it with.
package program

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
)

// Kproxy returns the path of the program under test: $KPROXY_BIN, or else one that
// it builds in dir from the tree that holds this file, whatever module the test
// belongs to.
func Kproxy(dir string) (string, error) {
	if given := os.Getenv("KPROXY_BIN"); given != "" {
		return given, nil
	}
	_, here, _, ok := runtime.Caller(0)
	if !ok || !filepath.IsAbs(here) {
		return "", errors.New("find the tree to build kproxy from: tests were built with -trimpath; set KPROXY_BIN")
	}
	path := filepath.Join(dir, "kproxy")
	cmd := exec.Command("go", "build", "-buildvcs=false", "-o", path, "./cmd/kproxy")
	cmd.Dir = filepath.Join(filepath.Dir(here), "..", "..")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build kproxy: %w\n%s", err, strings.TrimSpace(string(out)))
	}
	return path, nil
}

// Run is the body of a TestMain whose tests try kproxy: prepare gets the program
// and a folder that is removed afterwards. It returns the exit status.
func Run(prepare func(kproxy, dir string) error, tests func() int) int {
	dir, err := os.MkdirTemp("", "kproxy-test-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	path, err := Kproxy(dir)
	if err == nil {
		err = prepare(path, dir)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return tests()
}
