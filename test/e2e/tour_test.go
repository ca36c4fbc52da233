package e2e

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
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
	screen *tty
}

// tourStep is a step as the screen shows it. Its commands are what somebody copies.
type tourStep struct {
	title    string
	commands []string
	look     string
}

// TestLabTour goes through the lab's tour on a terminal, by its keys: every command
// runs as it is to be copied from the screen, and gives what the step says to look for.
func TestLabTour(t *testing.T) {
	t.Parallel()
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
			l.screen.shows("● alive", "default/web:line", "the client's last second: ")
			done := map[string]bool{}
			for at, of := 1, 1; at <= of; at++ {
				var s tourStep
				l.eventually(fmt.Sprintf("step %d of the tour", at), func() (err error) {
					s, of, err = stepOn(l.screen.screen(), at)
					return err
				})
				check := tourChecks[s.title]
				if l.shows("(?m)^waiting: "); check == nil {
					t.Errorf("nothing checks the step %q", s.title)
				} else if check(l, s); t.Failed() {
					t.Fatalf("the step %q isn't as it says:\n%s", s.title, strings.Join(l.screen.screen(), "\n"))
				}
				if s.title != stepCompare || m.plane != plan.None && slow == 1 {
					l.shows("✓ confirmed: ") // also after a while, which a step may take
				}
				done[s.title] = true
				l.screen.press("n")
			}
			for title := range tourChecks {
				if onlyKernel := title == stepPin || title == stepOffload; !done[title] && (m.plane != plan.None || !onlyKernel) {
					t.Errorf("the tour has no step %q", title)
				}
			}
			l.screen.press("b")
			l.screen.shows(fmt.Sprintf(": %d of %d", len(done)-1, len(done)))
			l.screen.press("q")
			l.screen.left("q")
			l.eventually("it to say that the lab is down", func() error { return missing(l.screen.raw(), "the lab is down") })
			l.nothingLeft()
		})
	}
}

// TestLabIsOneAtATime: a second lab leaves the first alone, and says which it is and
// how to end it. Without a terminal, the lab prints the tour and what happens.
func TestLabIsOneAtATime(t *testing.T) {
	t.Parallel()
	l := newTourLab(t, mode, kernelPlane)
	kproxy := absolute(t, binary)
	first := l.inside(l.up("--traffic 0"))
	said := &logWriter{}
	first.Stdout, first.Stderr = said, said
	l.must(first.Start())
	ended := make(chan error, 1)
	go func() { ended <- first.Wait() }()
	t.Cleanup(func() { first.Process.Kill() })
	l.eventually("the tour", func() error {
		return missing(said.String(), `1\. Be a client(?s:.*)Compare the data planes(?s:.*)\n\n`)
	})

	for _, command := range []string{"up", "demo"} {
		out, err := l.inside(fmt.Sprintf("%s lab %s --mode %s", kproxy, command, l.mode)).CombinedOutput()
		var exit *exec.ExitError
		if !errors.As(err, &exit) || exit.ExitCode() != 1 {
			t.Errorf("lab %s beside a lab: %v\n%s", command, err, out)
		}
		if want := fmt.Sprintf(`(a lab is up already \(process %d\).*kproxy lab down)`, first.Process.Pid); l.matches(string(out), want) == "" {
			t.Errorf("lab %s beside a lab doesn't say which", command)
		}
	}
	if err := l.state("", ""); err != nil {
		t.Errorf("the first lab isn't as it was: %v", err)
	}
	l.eventually("its log to say what happens", func() error {
		return missing(said.String(), `health +default/web:line +10\.2\.0\.2:9000 is up`)
	})

	l.sh(kproxy + " lab down")
	if err := <-ended; err != nil {
		t.Errorf("lab down: the lab ended with %v", err)
	}
	l.matches(said.String(), `(the lab is down\n)$`)
	l.nothingLeft()
}

const (
	stepPin     = "Pin the service to userspace, and see each connection"
	stepOffload = "Watch the offload happen"
	stepCompare = "Compare the data planes"
)

// tourChecks run a step's commands and look for what it says, by its title.
var tourChecks = map[string]func(*tourLab, tourStep){
	"Be a client": func(l *tourLab, s tourStep) {
		seen := map[string]bool{}
		l.eventually("an answer of each backend", func() error { // taken in turn, but other clients take turns as well
			seen[l.matches(l.sh(s.commands[0]), `^(b[123]) 10\.1\.0\.2 hello\n$`)] = true
			if len(seen) != 3 {
				return fmt.Errorf("all are of %v", seen)
			}
			return nil
		})
	},
	stepPin: func(l *tourLab, s tourStep) {
		l.eventually("an offloaded service", func() error { return l.state(plan.StateOffloaded, l.plane) })
		l.matches(l.sh(s.commands[0]), `(default/web:line: userspace)`)
		l.eventually("a connection of userspace, with its age", func() error {
			return missing(l.sh(s.commands[1]), `tcp +10\.1\.0\.2:\d+ +default/web:line +10\.2\.0\.[234]:9000 +userspace +\d+m?s`)
		})
		l.shows(`default/web:line +userspace +pinned`)
	},
	stepOffload: func(l *tourLab, s tourStep) {
		l.sh(s.commands[0])
		l.matches(l.sh(s.commands[1]), `(default/web:line: auto)`)
		l.matches(l.sh(s.commands[2]), `(qualifying .*\(in \d+s\))`)
		l.shows(`default/web:line +userspace +qualifying \d+s`)
		l.eventually("the offload", func() error { return l.state(plan.StateOffloaded, l.plane) })
		l.shows("userspace to " + string(l.plane))
		l.shows("the client's last second: .*, 0 failed")
	},
	"Read the rules": func(l *tourLab, s tourStep) {
		traced := l.sh(s.commands[0])
		l.matches(traced, `(10\.2\.0\.2:9000)`)
		rules := l.sh(s.commands[1])
		if strings.HasPrefix(rules, "table ip kproxy") {
			l.matches(rules, `10\.96\.0\.10 \. tcp \. 80 comment "(default/web:line)"`)
		} else {
			l.matches(traced, `(KPROXY-[A-Z])`)
			l.matches(rules, `(?m)^\[[1-9]\d*:\d+\] -A (KPROXY-.*)`)
		}
		l.answers("7", "3")
		if l.plane == plan.IPVS {
			l.matches(l.sh(s.commands[2]), `(?i)TCP +(10\.96\.0\.10:80|0A60000A:0050) rr`)
		}
	},
	"Kill a backend": func(l *tourLab, s tourStep) {
		l.sh(s.commands[0])
		l.eventually("b2 to be down", func() error {
			return missing(l.sh(s.commands[1]), `10\.2\.0\.3:9000 +node +down .*not used`)
		})
		l.shows(`! default/web:line`)
		l.shows(`10\.2\.0\.3:9000 is down`)
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
		l.answers("many", fmt.Sprint(st.Sync.Generation))
		address := l.matches(s.look, `(http://\S+/) `)
		l.matches(l.sh("curl -s -i "+address), `(?s)^HTTP/1.1 200 .*\r\n\r\n(?i:<!doctype html>).*(kproxy)`)
	},
	"Kill kproxy, and start it again": func(l *tourLab, s tourStep) {
		l.sh(s.commands[0])
		l.shows(`✗ GONE`)
		if l.plane == plan.None {
			l.matches(l.sh(s.commands[1]), `(kproxy isn't running here)`)
			l.shows("the client's last second: .*, [1-9][0-9]* failed")
		} else {
			l.matches(l.sh(s.commands[1]), `^(b[123]) 10\.1\.0\.2 hello\n$`)
			l.shows("the client's last second: .*, 0 failed")
		}
		l.sh(s.commands[2])
		l.eventually("kproxy to be back", func() error { return l.state("", "") })
		l.shows(`● alive`)
	},
	stepCompare: func(l *tourLab, s tourStep) {
		if slow > 1 || l.plane == plan.None {
			return // minutes where it is emulated; once is enough elsewhere
		}
		l.matches(l.sh(s.commands[0]+" --repeat 1 --services 2"), `(iptables)`) // a smaller one: how large isn't what the tour is about
	},
}

// answers gives a wrong answer to the question on the screen, and then the right one.
func (l *tourLab) answers(wrong, right string) {
	l.Helper()
	l.screen.press("a" + wrong + "\r")
	l.shows("waiting: .*" + wrong + ".* isn't it")
	l.screen.press("a" + right + "\r")
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

// up is the command that starts the lab.
func (l *tourLab) up(flags string) string {
	return fmt.Sprintf("TERM=xterm LC_ALL=C.UTF-8 NO_COLOR=1 exec %s lab up --mode %s --slow %d %s", absolute(l.T, binary), l.mode, int(slow), flags)
}

// start runs the lab on a terminal.
func (l *tourLab) start() {
	l.Helper()
	l.screen = startTTY(l.T, l.waits, 110, 45, l.inside(l.up("")))
	l.Cleanup(func() { l.screen.cmd.Process.Signal(syscall.SIGTERM) }) // it has ended unless the test failed
}

// shows waits until the screen matches.
func (l *tourLab) shows(pattern string) {
	l.Helper()
	l.eventually("the screen to match "+pattern, func() error { return missing(strings.Join(l.screen.screen(), "\n"), pattern) })
}

func absolute(t *testing.T, path string) string {
	t.Helper()
	abs, err := filepath.Abs(path)
	if err != nil {
		t.Fatal(err)
	}
	return abs
}

// logWriter keeps what a program prints.
type logWriter struct {
	mu  sync.Mutex // the program's output is copied on a goroutine
	log bytes.Buffer
}

func (w *logWriter) Write(b []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.log.Write(b)
}

func (w *logWriter) String() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.log.String()
}

var stepNumber = regexp.MustCompile(`^try in another terminal: (\d+) of (\d+) `)

// stepOn reads a step of the tour from the screen, and how many steps there are.
func stepOn(screen []string, at int) (s tourStep, of int, err error) {
	for i := 0; i < len(screen); i++ {
		m := stepNumber.FindStringSubmatch(screen[i])
		if m == nil || m[1] != strconv.Itoa(at) {
			continue
		}
		of, _ = strconv.Atoi(m[2]) // digits, by the pattern
		i++
		s.title = screen[i]
		for i++; strings.HasPrefix(screen[i], "  "); i++ {
			if n := len(s.commands); n > 0 && strings.HasSuffix(s.commands[n-1], " \\") {
				s.commands[n-1] += "\n" + screen[i]
			} else {
				s.commands = append(s.commands, screen[i])
			}
		}
		for ; i < len(screen) && screen[i] != "" && !strings.HasPrefix(screen[i], "recent events ") && !strings.HasPrefix(screen[i], " q quit"); i++ {
			s.look += screen[i] + " "
		}
		if !strings.HasPrefix(s.look, "Look for: ") {
			return s, of, fmt.Errorf("step %d doesn't say what to look for:\n%s", at, strings.Join(screen, "\n"))
		}
		return s, of, nil
	}
	return s, of, fmt.Errorf("no step %d on the screen:\n%s", at, strings.Join(screen, "\n"))
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
	out := l.try(absolute(l.T, binary) + " status -o json 2>/dev/null")
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

func (l *tourLab) eventually(what string, f func() error) {
	l.Helper()
	for start := time.Now(); ; time.Sleep(100 * time.Millisecond) {
		err := f()
		if err == nil {
			return
		}
		if time.Since(start) > patience(time.Minute) {
			l.Fatalf("waited for %s: %v", what, err)
		}
	}
}

// waits is eventually for a [tty].
func (l *tourLab) waits(_ time.Duration, what string, f func() error) {
	l.Helper()
	l.eventually(what, f)
}

func (l *tourLab) must(err error) {
	l.Helper()
	if err != nil {
		l.Fatal(err)
	}
}

// nothingLeft checks that all of the lab has gone.
func (l *tourLab) nothingLeft() {
	l.Helper()
	if left := l.try("ls -d /run/netns/kproxy-lab* /run/kproxy-lab* 2>/dev/null"); left != "" {
		l.Errorf("the lab leaves:\n%s", left)
	}
}
