package e2e

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"kproxy.dev/kproxy/plan"
)

// tourLab is `kproxy lab up` in a world of its own: the lab has fixed names, so
// it gets another /run and another network namespace to be the host's.
type tourLab struct {
	*testing.T
	ctx    context.Context
	holder int // a process in that world
	mode   plan.Mode
	plane  plan.DataPlane // beneath; plan.None in mode userspace
	up     *exec.Cmd

	mu  sync.Mutex // the lab's output is read on a goroutine
	log bytes.Buffer
}

// tourStep is a step as printed.
type tourStep struct {
	title    string
	commands []string
	look     string
}

// TestLabTour: every command of the lab's tour runs, and gives what the tour
// says to look for.
func TestLabTour(t *testing.T) {
	type kind struct {
		mode  plan.Mode
		plane plan.DataPlane
	}
	kinds := []kind{{mode, kernelPlane}}
	if slow == 1 { // the same on every kernel
		kinds = append(kinds, kind{plan.ModeUserspace, plan.None})
	}
	for _, m := range kinds {
		t.Run(string(m.mode), func(t *testing.T) {
			t.Parallel()
			l := newTourLab(t, m.mode, m.plane)
			l.start()
			steps := l.tour()
			done := map[string]bool{}
			for _, s := range steps {
				check := tourChecks[s.title]
				if check == nil {
					t.Errorf("nothing checks the step %q", s.title)
					continue
				}
				done[s.title] = true
				check(l, s)
			}
			for title := range tourChecks {
				if onlyKernel := title == stepPin || title == stepOffload; !done[title] && (m.plane != plan.None || !onlyKernel) {
					t.Errorf("the tour has no step %q", title)
				}
			}
			l.stop()
		})
	}
}

// TestLabOnATerminal: the lab has a screen, with the tour on it, and goes with it.
func TestLabOnATerminal(t *testing.T) {
	t.Parallel()
	l := newTourLab(t, mode, kernelPlane)
	cmd := l.inside(fmt.Sprintf("TERM=xterm LC_ALL=C.UTF-8 exec %s lab up --mode %s --slow %d", absolute(t, binary), mode, int(slow)))
	tt := startTTY(t, func(_ time.Duration, what string, f func() error) { l.eventually(what, f) }, 100, 40, cmd)
	tt.shows("● alive", "default/web:line", "try in another terminal: 1 of 9", "/run/kproxy-lab/ask 10.96.0.10 80", "the client's last second: ")
	tt.press("n")
	tt.shows("2 of 9", "default/web:line userspace")
	tt.press("b")
	tt.shows("1 of 9")
	tt.press("q")
	tt.left("q")
	l.eventually("it to say that the lab is down", func() error { return missing(tt.raw(), "the lab is down") })
}

const (
	stepPin     = "Pin the service to userspace, and see each connection"
	stepOffload = "Watch the offload happen"
)

// tourChecks run a step's commands and look for what it says, by its title.
var tourChecks = map[string]func(*tourLab, tourStep){
	"Be a client": func(l *tourLab, s tourStep) {
		seen := map[string]bool{}
		for range 12 { // taken in turn, but other clients take turns as well
			seen[l.matches(l.sh(s.commands[0]), `^(b[123]) 10\.1\.0\.2 hello\n$`)] = true
		}
		if len(seen) != 3 {
			l.Errorf("of 12 answers, all are of %v", seen)
		}
	},
	stepPin: func(l *tourLab, s tourStep) {
		l.matches(l.sh(s.commands[0]), `(default/web:line: userspace)`)
		l.eventually("state pinned", func() error { return l.state(plan.StatePinned, plan.Userspace) })
		l.eventually("a connection of userspace, with its age", func() error {
			return missing(l.sh(s.commands[1]), `tcp +10\.1\.0\.2:\d+ +default/web:line +10\.2\.0\.[234]:9000 +userspace +\d+m?s`)
		})
	},
	stepOffload: func(l *tourLab, s tourStep) {
		l.matches(l.sh(s.commands[0]), `(default/web:line: auto)`)
		l.eventually("a countdown, or the offload at once", func() error {
			return missing(l.sh(s.commands[1]), `qualifying.*\(in \d+s\)|offloaded`)
		})
		l.eventually("the offload", func() error { return l.state(plan.StateOffloaded, l.plane) })
		l.logs("userspace to " + string(l.plane))
	},
	"Read the rules": func(l *tourLab, s tourStep) {
		traced := l.sh(s.commands[0])
		l.matches(traced, `(10\.2\.0\.2:9000)`)
		l.matches(traced, `(KPROXY-[A-Z])`)
		l.matches(l.sh(s.commands[1]), `(?m)^\[[1-9]\d*:\d+\] -A (KPROXY-.*)`)
		if l.plane == plan.IPVS {
			l.matches(l.sh(s.commands[2]), `(?i)TCP +(10\.96\.0\.10:80|0A60000A:0050) rr`)
		}
	},
	"Kill a backend": func(l *tourLab, s tourStep) {
		l.sh(s.commands[0])
		l.eventually("b2 to be down", func() error {
			return missing(l.sh(s.commands[1]), `10\.2\.0\.3:9000 +node +down .*not used`)
		})
		l.sh(s.commands[2])
		l.eventually("b2 to be back", func() error {
			return missing(l.sh(s.commands[1]), `10\.2\.0\.3:9000 +node +up .*in use`)
		})
	},
	"Edit a manifest": func(l *tourLab, s tourStep) {
		l.sh(s.commands[0])
		l.eventually("the new port to answer", func() error { return missing(l.try(s.commands[1]), `^b[123] `) })
	},
	"Open the dashboard in a browser": func(l *tourLab, s tourStep) {
		var st plan.Status
		if err := json.Unmarshal([]byte(l.sh(s.commands[0])), &st); err != nil || !st.Alive || len(st.Services) != 3 {
			l.Errorf("%s: %v, alive %v, %d services", s.commands[0], err, st.Alive, len(st.Services))
		}
		address := l.matches(s.look, `(http://\S+/) `)
		l.matches(l.sh("curl -s -i "+address), `(?s)^HTTP/1.1 200 .*\r\n\r\n(?i:<!doctype html>).*(kproxy)`)
	},
	"Kill kproxy, and start it again": func(l *tourLab, s tourStep) {
		l.sh(s.commands[0])
		if l.plane == plan.None {
			l.matches(l.sh(s.commands[1]), `(kproxy has died)`)
		} else {
			l.matches(l.sh(s.commands[1]), `^(b[123]) 10\.1\.0\.2 hello\n$`)
		}
		l.logs("kproxy has gone")
		l.sh(s.commands[2])
		l.eventually("kproxy to be back", func() error { return l.state("", "") })
		l.logs("kproxy is there")
	},
	"Compare the generations": func(l *tourLab, s tourStep) {
		if slow > 1 || l.plane == plan.None {
			return // minutes where it is emulated; once is enough elsewhere
		}
		l.matches(l.sh(s.commands[0]), `(iptables)`)
	},
}

// newTourLab makes a world for a lab; it isn't up yet.
func newTourLab(t *testing.T, m plan.Mode, plane plan.DataPlane) *tourLab {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root to make network namespaces")
	}
	ctx, cancel := context.WithTimeout(context.Background(), within(5*time.Minute))
	t.Cleanup(cancel)
	l := &tourLab{T: t, ctx: ctx, mode: m, plane: plane}
	holder := exec.CommandContext(ctx, "unshare", "--mount", "--net", "--propagation", "private", "bash", "-c",
		"mount -t tmpfs tmpfs /run && ip link set lo up && echo ready && exec sleep infinity")
	holder.Stderr = os.Stderr
	ready, err := holder.StdoutPipe()
	l.must(err)
	l.must(holder.Start())
	t.Cleanup(func() { holder.Process.Kill(); holder.Wait() })
	if line, err := bufio.NewReader(ready).ReadString('\n'); line != "ready\n" {
		t.Fatalf("make a world for the lab: %q, %v", line, err)
	}
	l.holder = holder.Process.Pid
	return l
}

// start runs `kproxy lab up` and waits until it has printed its tour.
func (l *tourLab) start() {
	l.Helper()
	l.up = l.inside(fmt.Sprintf("exec %s lab up --mode %s --slow %d", absolute(l.T, binary), l.mode, int(slow)))
	out, err := l.up.StdoutPipe()
	l.must(err)
	l.up.Stderr = l.up.Stdout
	l.must(l.up.Start())
	copied := make(chan struct{})
	go func() { defer close(copied); io.Copy(logWriter{l}, out) }()
	l.Cleanup(func() {
		l.up.Process.Signal(syscall.SIGTERM) // it has been stopped unless the test failed
		<-copied
		l.up.Wait()
		if l.Failed() {
			l.Logf("the lab said:\n%s", l.said())
		}
	})
	l.eventually("the tour", func() error { return missing(l.said(), `Compare the generations(?s:.*)\n\n`) })
}

func absolute(t *testing.T, path string) string {
	t.Helper()
	abs, err := filepath.Abs(path)
	if err != nil {
		t.Fatal(err)
	}
	return abs
}

type logWriter struct{ *tourLab }

func (w logWriter) Write(b []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.log.Write(b)
}

func (l *tourLab) said() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.log.String()
}

// tour reads the steps that the lab printed.
func (l *tourLab) tour() []tourStep {
	var steps []tourStep
	title := regexp.MustCompile(`^\d+\. (.*)$`)
	for line := range strings.Lines(l.said()) {
		line = strings.TrimSuffix(line, "\n")
		if m := title.FindStringSubmatch(line); m != nil {
			steps = append(steps, tourStep{title: m[1]})
			continue
		}
		if len(steps) == 0 || strings.HasPrefix(line, "time=") {
			continue
		}
		s := &steps[len(steps)-1]
		if c, ok := strings.CutPrefix(line, "     $ "); ok {
			s.commands = append(s.commands, c)
		} else {
			s.look += strings.TrimPrefix(line, "  ")
		}
	}
	return steps
}

// inside is a shell command in the lab's world.
func (l *tourLab) inside(command string) *exec.Cmd {
	cmd := exec.CommandContext(l.ctx, "nsenter", "--target", fmt.Sprint(l.holder), "--mount", "--net", "bash", "-c", command)
	cmd.Dir = l.TempDir() // where `lab compare` writes its page
	return cmd
}

// sh runs a command of the tour as somebody in another terminal does.
func (l *tourLab) sh(command string) string {
	l.Helper()
	out, err := l.inside(command).CombinedOutput()
	if err != nil {
		l.Errorf("%s: %v\n%s", command, err, out)
	}
	return string(out)
}

// try is sh for a command that may fail at first.
func (l *tourLab) try(command string) string {
	out, _ := l.inside(command).CombinedOutput()
	return string(out)
}

// matches checks what was printed and returns the first group.
func (l *tourLab) matches(text, pattern string) string {
	l.Helper()
	m := regexp.MustCompile(pattern).FindStringSubmatch(text)
	if m == nil {
		l.Errorf("no match for %s in:\n%s", pattern, text)
		return ""
	}
	return m[1]
}

func missing(text, pattern string) error {
	if !regexp.MustCompile(pattern).MatchString(text) {
		return fmt.Errorf("no match for %s in:\n%s", pattern, text)
	}
	return nil
}

// state checks the service's state and data plane; empty means any.
func (l *tourLab) state(state plan.State, plane plan.DataPlane) error {
	var st plan.Status
	out := l.try(absolute(l.T, binary) + " status --socket /run/kproxy-lab/kproxy.sock -o json")
	if err := json.Unmarshal([]byte(out), &st); err != nil {
		return errors.New(out)
	}
	for _, s := range st.Services {
		if s.Port == "line" && st.Alive && (state == "" || s.State == state && s.DataPlane == plane) {
			return nil
		}
	}
	return errors.New(out)
}

func (l *tourLab) logs(what string) {
	l.Helper()
	l.eventually("the log to say "+what, func() error { return missing(l.said(), regexp.QuoteMeta(what)) })
}

func (l *tourLab) eventually(what string, f func() error) {
	l.Helper()
	for deadline := time.Now().Add(within(time.Minute)); ; time.Sleep(100 * time.Millisecond) {
		err := f()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			l.Fatalf("waited for %s: %v", what, err)
		}
	}
}

func (l *tourLab) must(err error) {
	l.Helper()
	if err != nil {
		l.Fatal(err)
	}
}

// stop ends the lab as Ctrl-C does; nothing of it stays.
func (l *tourLab) stop() {
	l.must(l.up.Process.Signal(syscall.SIGINT))
	l.logs("the lab is down")
	if left := l.try("ls /run/netns /run/kproxy-lab 2>/dev/null | grep kproxy"); left != "" {
		l.Errorf("the lab leaves:\n%s", left)
	}
}
