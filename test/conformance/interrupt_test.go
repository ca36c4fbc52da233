package main

import (
	"bufio"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestMain(m *testing.M) {
	if len(os.Args) > 2 && os.Args[1] == "first-process" {
		os.Exit(firstProcess(os.Args[2:]))
	}
	os.Exit(m.Run())
}

// An interrupted run reports the tests that have ended, says that it was interrupted, and leaves what earlier runs reported.
func TestInterrupted(t *testing.T) {
	programs, results := t.TempDir(), t.TempDir()
	write := func(path, text string) {
		t.Helper()
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	write(filepath.Join(programs, "bin/ginkgo"), `#!/bin/bash
while (($#)); do [[ $1 != --output-dir ]] || dir=$2; shift; done
trap 'cat >"$dir/report.json" <<END
[{"SpecialSuiteFailureReasons": ["Interrupted by User"], "SpecReports": [
{"LeafNodeType": "It", "LeafNodeText": "ended", "State": "passed"},
{"LeafNodeType": "It", "LeafNodeText": "flaky", "State": "failed", "Failure": {"Message": "no answer"}},
{"LeafNodeType": "It", "LeafNodeText": "both", "State": "skipped", "Failure": {"Message": "needs six nodes"}},
{"LeafNodeType": "It", "LeafNodeText": "under way", "State": "interrupted"},
{"LeafNodeType": "It", "LeafNodeText": "next", "State": "skipped"}]}]
END
exit 1' INT
>"$dir/started"
while :; do sleep 0.05; done
`)
	write(filepath.Join(results, "iptables/20260101T000000Z/report.json"), `[{"SpecReports": [
{"LeafNodeType": "It", "LeafNodeText": "earlier", "State": "passed"},
{"LeafNodeType": "It", "LeafNodeText": "flaky", "State": "passed"},
{"LeafNodeType": "It", "LeafNodeText": "both", "State": "passed"}]}]`)
	ctx, interrupt := context.WithCancel(t.Context())
	go func() {
		defer interrupt()
		for range 1000 {
			if started, _ := filepath.Glob(filepath.Join(results, "iptables/*/started")); len(started) > 0 {
				return
			}
			time.Sleep(10 * time.Millisecond)
		}
	}()
	c := &cluster{options: options{programs: programs, results: results, procs: 1}, proxy: "iptables"}
	if failed, err := c.test(ctx); failed != 1 || err != nil {
		t.Errorf("%d failed, error %v, want 1 and none", failed, err)
	}
	reports, err := readReports(results)
	got := map[string]string{}
	for name, s := range reports["iptables"] {
		got[name] = s.State
	}
	if diff := cmp.Diff(map[string]string{"earlier": "passed", "ended": "passed", "flaky": "failed", "both": "passed"}, got); err != nil || diff != "" {
		t.Errorf("error %v, tests (-want +got)\n%s", err, diff)
	}
	dirs, _ := filepath.Glob(filepath.Join(results, "iptables/*/report.json"))
	if len(dirs) != 2 {
		t.Fatalf("reports %v, want one of each run", dirs)
	}
	if _, partial, err := report(dirs[1]); err != nil || partial != "Interrupted by User" {
		t.Errorf("error %v, the report is partial for %q", err, partial)
	}
}

// The first process of the cluster's namespaces passes SIGTERM on, rather than end, and all others with it.
func TestFirstProcessTerminates(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("namespaces need root")
	}
	cmd := exec.Command(os.Args[0], "first-process", "/bin/bash", "-c", "trap 'exit 7' TERM; echo; while :; do sleep 0.05; done")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID | syscall.CLONE_NEWNS}
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	kill := time.AfterFunc(10*time.Second, func() { _ = cmd.Process.Kill() })
	defer kill.Stop()
	_, err = bufio.NewReader(out).ReadString('\n')
	if err == nil {
		err = cmd.Process.Signal(syscall.SIGTERM)
	}
	_ = cmd.Wait() // with the program's status
	if got := cmd.ProcessState.ExitCode(); err != nil || got != 7 {
		t.Errorf("error %v, exit status %d, want the program's", err, got)
	}
}
