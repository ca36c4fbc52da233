package e2e

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/charmbracelet/x/vt"
	"github.com/creack/pty"
	diff "github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/service"
)

// tty is a terminal with a program on it.
type tty struct {
	*testing.T
	wait func(limit time.Duration, what string, f func() error)
	// The ends of a pseudoterminal: keys are written to the keyboard, and what is shown is
	// read there.
	keyboard, line *os.File
	cmd            *exec.Cmd
	before         unix.Termios

	mu       sync.Mutex // the terminal is read on a goroutine
	out      []byte
	emulator *vt.Emulator
}

// onTerminal runs a command of the binary under test on a terminal of its own.
func (w *world) onTerminal(width, height int, env []string, args ...string) *tty {
	w.Helper()
	cmd := command(w.T, args...)
	cmd.Env = append(append(os.Environ(), "TERM=xterm", "LC_ALL=C.UTF-8", "NO_COLOR="), env...)
	return startTTY(w.T, w.eventually, width, height, cmd)
}

// startTTY starts a command on a terminal of its own.
func startTTY(t *testing.T, wait func(time.Duration, string, func() error), width, height int, cmd *exec.Cmd) *tty {
	t.Helper()
	keyboard, line, err := pty.Open()
	if err != nil {
		t.Fatal(err)
	}
	s := &tty{T: t, wait: wait, keyboard: keyboard, line: line, cmd: cmd, emulator: vt.NewEmulator(width, height)}
	go io.Copy(keyboard, s.emulator) // a terminal answers questions about itself
	s.resize(width, height)
	done := make(chan struct{})
	go func() {
		defer close(done)
		buf := make([]byte, 1<<16)
		for {
			n, err := keyboard.Read(buf)
			s.mu.Lock()
			s.out = append(s.out, buf[:n]...)
			s.emulator.Write(buf[:n])
			s.mu.Unlock()
			if err != nil {
				return
			}
		}
	}()
	t.Cleanup(func() {
		line.Close()
		keyboard.Close()
		<-done
	})
	s.before = s.modes()
	cmd.Stdin, cmd.Stdout, cmd.Stderr = line, line, line
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	return s
}

func (t *tty) resize(width, height int) {
	t.Helper()
	t.mu.Lock()
	t.emulator.Resize(width, height)
	t.mu.Unlock()
	if err := pty.Setsize(t.keyboard, &pty.Winsize{Rows: uint16(height), Cols: uint16(width)}); err != nil {
		t.Fatal(err)
	}
}

func (t *tty) modes() unix.Termios {
	t.Helper()
	m, err := unix.IoctlGetTermios(int(t.line.Fd()), unix.TCGETS)
	if err != nil {
		t.Fatal(err)
	}
	return *m
}

func (t *tty) raw() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(t.out)
}

// screen returns the lines that the terminal shows.
func (t *tty) screen() []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	lines := strings.Split(t.emulator.String(), "\n")
	for i := range lines {
		lines[i] = strings.TrimRight(lines[i], " \r")
	}
	return lines
}

// shows waits until the screen has every phrase.
func (t *tty) shows(phrases ...string) {
	t.Helper()
	t.wait(15*time.Second, fmt.Sprintf("the screen to show %q", phrases), func() error {
		all := strings.Join(t.screen(), "\n")
		for _, p := range phrases {
			if !strings.Contains(all, p) {
				return fmt.Errorf("without %q:\n%s", p, all)
			}
		}
		return nil
	})
}

func (t *tty) press(keys string) {
	t.Helper()
	if _, err := t.keyboard.WriteString(keys); err != nil {
		t.Fatal(err)
	}
}

// left checks that the program has ended with status 0, and that the terminal
// is as it was: its modes, the screen, the cursor.
func (t *tty) left(how string) {
	t.Helper()
	if err := t.cmd.Wait(); err != nil {
		t.Errorf("%s: it ended with %v\n%s", how, err, strings.Join(t.screen(), "\n"))
	}
	if d := diff.Diff(t.before, t.modes()); d != "" {
		t.Errorf("%s: the terminal's modes aren't as they were (-want +got):\n%s", how, d)
	}
	t.wait(5*time.Second, how+": the terminal to be restored", func() error {
		raw := t.raw()
		for on, off := range map[string]string{"\x1b[?1049h": "\x1b[?1049l", "\x1b[?25l": "\x1b[?25h", "\x1b[?2004h": "\x1b[?2004l"} {
			if strings.LastIndex(raw, off) <= strings.LastIndex(raw, on) {
				return fmt.Errorf("%q isn't undone by %q", on, off)
			}
		}
		return nil
	})
}

// TestWatchStatus: the screen follows what happens, also kproxy's end and
// return; keys do what the help says; and it leaves the terminal as it was.
func TestWatchStatus(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	w.must(m.Write(w.manifests))
	w.must(newManifest("other", 11, w.net.Backends[0]).Write(w.manifests))
	w.start()
	tt := w.onTerminal(120, 40, nil, "status", "--watch", "--socket", w.socket())
	tt.shows("on node", "● alive", "mode "+string(mode), "default/web:line", "default/other:http", "q quit")

	// The stream of events opens behind the first screen, and the first results of health drive others out of it.
	tt.wait(10*time.Second, "a move among recent events", func() error {
		w.pin("web", "line", service.PreferUserspace)
		w.pin("web", "line", service.PreferKernel)
		if !strings.Contains(strings.Join(tt.screen(), "\n"), "userspace to "+string(w.plane)) {
			return errors.New("no move yet")
		}
		return nil
	})
	tt.shows("pinned", string(w.plane), "recent events")
	w.must(w.net.Backends[1].Fail(w.ctx, lab.Refuse))
	tt.shows("✗", "! default/web:line", "10.2.0.3:9000 is down")

	if lines := tt.screen(); !strings.Contains(strings.Join(lines, "\n"), "\u203a! default/web") {
		t.Errorf("no service is under the cursor:\n%s", strings.Join(lines, "\n"))
	}
	tt.press("/other\r")
	tt.shows("filter: other", "3 services")
	tt.press("\x1b")
	tt.shows("6 services")
	tt.press("?")
	tt.shows("this help")
	tt.press("q") // leaves the help
	tt.shows("default/web:datagram")

	tt.press("/web:line\r")
	tt.shows("1 services")
	tt.press("\r") // opens its page
	tt.shows("[1 endpoints]", "clients ", "10.2.0.3:9000", "without kproxy: "+string(w.plane))
	held := w.hold(frontends(m)[0])
	tt.press("\t")
	tt.shows("[2 connections]", held.LocalAddr().String())
	tt.press("3")
	tt.shows("[3 trace]", "10.1.0.2", "10.96.0.10:80")
	tt.press(":pin userspace\r")
	tt.shows("default/web:line: userspace", "userspace  pinned")
	tt.press("\x1b")
	tt.shows("filter: web:line")
	tt.press("\x1b")
	tt.shows("6 services")
	tt.resize(60, 12)
	tt.wait(10*time.Second, "12 lines of at most 60 columns", func() error {
		lines := tt.screen()
		for _, l := range lines {
			if n := len([]rune(l)); n > 60 {
				return fmt.Errorf("%d columns: %s", n, l)
			}
		}
		if len(lines) != 12 || !strings.Contains(lines[11], "q quit") {
			return fmt.Errorf("%d lines:\n%s", len(lines), strings.Join(lines, "\n"))
		}
		return nil
	})
	tt.resize(120, 40)

	w.stop()
	tt.shows("✗ GONE", "it hasn't answered")
	w.startAgain()
	tt.shows("● alive")
	tt.press("q")
	tt.left("q")
}

// TestWatchLeavesTheTerminal as it was, whatever ends it; and what it needs
// isn't taken for granted.
func TestWatchLeavesTheTerminal(t *testing.T) {
	w := newWorld(t)
	w.must(newManifest("web", 10, w.net.Backends...).Write(w.manifests))
	w.start()
	status := []string{"status", "--watch", "--socket", w.socket()}
	for how, end := range map[string]func(*tty) error{
		"Ctrl-C":  func(tt *tty) error { tt.press("\x03"); return nil },
		"SIGTERM": func(tt *tty) error { return tt.cmd.Process.Signal(syscall.SIGTERM) },
		"SIGINT":  func(tt *tty) error { return tt.cmd.Process.Signal(syscall.SIGINT) },
		"SIGHUP":  func(tt *tty) error { return tt.cmd.Process.Signal(syscall.SIGHUP) },
	} {
		tt := w.onTerminal(80, 24, nil, status...)
		tt.shows("default/web:line")
		w.must(end(tt))
		tt.left(how)
	}

	ascii := w.onTerminal(80, 24, []string{"LC_ALL=C", "NO_COLOR=1"}, status...)
	ascii.shows("* alive", "default/web:line")
	if raw := ascii.raw(); strings.ContainsFunc(raw, func(r rune) bool { return r > 0x7e }) || strings.Contains(raw, "\x1b[32m") {
		t.Errorf("in a plain locale and without colours: %q", raw)
	}
	ascii.press("q")
	ascii.left("q")

	coloured := w.onTerminal(80, 24, nil, status...)
	coloured.wait(10*time.Second, "colours", func() error {
		if !strings.Contains(coloured.raw(), "\x1b[32m") {
			return errors.New("none yet")
		}
		return nil
	})
	coloured.press("q")
	coloured.left("q")

	dumb := w.onTerminal(80, 24, []string{"TERM=dumb"}, status...)
	dumb.wait(10*time.Second, "two snapshots", func() error {
		if strings.Count(dumb.raw(), "SERVICE") < 2 {
			return fmt.Errorf("%q", dumb.raw())
		}
		return nil
	})
	w.must(dumb.cmd.Process.Signal(syscall.SIGINT))
	if err := dumb.cmd.Wait(); err != nil || strings.Contains(dumb.raw(), "\x1b") {
		t.Errorf("on a dumb terminal: %v, %q", err, dumb.raw())
	}
}

// connectionScreen: the same for connections.
func (w *world) connectionScreen(t *testing.T, inUserspace, inKernel *lab.Held) {
	tt := w.onTerminal(80, 24, nil, "connections", "--watch", "--socket", w.socket(), "default/web:line")
	tt.shows("2 connections: ", inUserspace.LocalAddr().String(), inKernel.LocalAddr().String(), "1 in userspace", "1 in "+string(w.plane), "1-2 of 2")
	tt.press("/" + string(w.plane) + "\r")
	tt.shows("1-1 of 1")
	tt.press("q")
	tt.left("q")
}

// connectionLimits: a long list is cut, and says so.
func (w *world) connectionLimits(t *testing.T) {
	cut := w.kproxy("connections", "--limit", "1", "--sort", "bytes", "default/web")
	cut.wants(t, 0, "the first 1 of them are listed", "sorted by bytes", "1 in userspace, 1 in "+string(w.plane))
	if n := strings.Count(cut.stdout, "\ntcp "); n != 1 {
		t.Errorf("--limit 1 lists %d connections:\n%s", n, cut.stdout)
	}
	w.kproxy("connections", "-o", "wide", "default/web").wants(t, 0, "ADDRESS", "10.96.0.10:80", "[fd00:96::a]:80", "2 connections: ")
	w.kproxy("connections", "--sort", "colour").wants(t, 2, "service, bytes, age")
	w.kproxy("connections", "--limit", "-1").wants(t, 2, "less than 0")
	for _, l := range strings.Split(w.onTerminalOnce(80, "connections", "--socket", w.socket()), "\n") {
		if len([]rune(strings.TrimRight(l, "\r"))) > 80 {
			t.Errorf("wider than a terminal of 80 columns: %s", l)
		}
	}
}

// onTerminalOnce runs a command to its end and returns what it showed.
func (w *world) onTerminalOnce(width int, args ...string) string {
	w.Helper()
	tt := w.onTerminal(width, 24, nil, args...)
	w.must(tt.cmd.Wait())
	var last string
	w.eventually(5*time.Second, "its output", func() error {
		if last = tt.raw(); !strings.Contains(last, "connections: ") {
			return errors.New(cmp.Or(last, "nothing yet"))
		}
		return nil
	})
	return last
}
