package lab

import (
	"errors"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"
)

func TestProcessRunsInNamespace(t *testing.T) {
	n := build(t, dualStack("kplab-proc", 0))
	p := &Process{Namespace: n.Node, Path: "sh", Args: []string{"-c", "ls /proc/sys/net/ipv4/conf; echo $WHO >&2"}, Env: []string{"WHO=me"}}
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	if err := p.Wait(within(t, 5*time.Second)); err != nil {
		t.Fatalf("Wait: %v\n%s", err, p.Log())
	}
	out, err := n.Node.Command(t.Context(), "ls", "/proc/sys/net/ipv4/conf").CombinedOutput()
	if want := string(out) + "me\n"; err != nil || p.Log() != want {
		t.Errorf("log %q, want %q (%v)", p.Log(), want, err)
	}
	if !strings.Contains(string(out), "client\n") {
		t.Errorf("links of the node: %q, want client among them", out)
	}
}

func TestProcessSignals(t *testing.T) {
	n := build(t, dualStack("kplab-sig", 0))
	script := `trap 'echo bye; exit 0' TERM; echo up; while :; do sleep 0.01; done`
	p := &Process{Namespace: n.Node, Path: "bash", Args: []string{"-c", script}}
	up := func(times int) func() error {
		return func() error {
			if strings.Count(p.Log(), "up\n") < times {
				return errors.New("not up")
			}
			return nil
		}
	}
	for i := range 2 { // it may be started again
		if err := p.Start(); err != nil {
			t.Fatal(err)
		}
		if err := p.WaitReady(within(t, 5*time.Second), up(i+1)); err != nil {
			t.Fatal(err)
		}
		if err := p.Start(); err == nil {
			t.Error("Start of a running program: got no error")
		}
		if err := p.Stop(5 * time.Second); err != nil {
			t.Fatal(err)
		}
	}
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	if err := p.Kill(); err != nil || p.Running() {
		t.Fatalf("Kill: %v, running %v", err, p.Running())
	}
	var exit *exec.ExitError
	err := p.Wait(t.Context())
	if !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
		t.Errorf("after Kill: got %v, want the signal", err)
	}
}

func TestWaitReadySaysWhyNot(t *testing.T) {
	n := build(t, dualStack("kplab-ready", 0))
	p := &Process{Namespace: n.Node, Path: "sh", Args: []string{"-c", "echo no such thing; exit 3"}}
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	err := p.WaitReady(within(t, 5*time.Second), func() error { return errors.New("it isn't ready") })
	if err == nil || !strings.Contains(err.Error(), "exit status 3") || !strings.Contains(err.Error(), "no such thing") {
		t.Errorf("got %v, want the status and the log", err)
	}
	if err := (&Process{Namespace: n.Node, Path: "/no/such/program"}).Start(); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("program that doesn't exist: got %v", err)
	}
	gone := &Process{Namespace: &Namespace{Name: "kplab-ready-gone"}, Path: "true"}
	if err := gone.Start(); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("namespace that doesn't exist: got %v", err)
	}
}

func TestTailKeepsTheEnd(t *testing.T) {
	var l tail
	block := strings.Repeat("x", 1<<20)
	for range 8 {
		if _, err := l.Write([]byte(block)); err != nil {
			t.Fatal(err)
		}
	}
	l.Write([]byte("end"))
	if s := l.String(); len(s) != LogLimit || !strings.HasSuffix(s, "xend") {
		t.Errorf("kept %d bytes, ending in %q", len(s), s[len(s)-4:])
	}
}
