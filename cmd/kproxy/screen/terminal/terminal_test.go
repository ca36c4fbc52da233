package terminal

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	tea "charm.land/bubbletea/v2"
	"github.com/charmbracelet/x/vt"
	"github.com/creack/pty"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// shown records what a terminal gets, and what it shows.
type shown struct {
	mu     sync.Mutex // the terminal is read on a goroutine
	raw    strings.Builder
	screen *vt.Emulator
}

func (s *shown) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.raw.String() + s.screen.String()
}

func (s *shown) resize(width, height int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.screen.Resize(width, height)
}

// tty is both ends of a pseudoterminal: keys are written to the keyboard, and what is
// shown is read there.
type tty struct{ keyboard, line *os.File }

func (t *tty) resize(width, height int) error {
	return pty.Setsize(t.keyboard, &pty.Winsize{Rows: uint16(height), Cols: uint16(width)})
}

func open(t *testing.T, width, height int) (*tty, *shown) {
	t.Helper()
	keyboard, line, err := pty.Open()
	if err != nil {
		t.Fatal(err)
	}
	tty := &tty{keyboard, line}
	if err := tty.resize(width, height); err != nil {
		t.Fatal(err)
	}
	s := &shown{screen: vt.NewEmulator(width, height)}
	go io.Copy(io.Discard, s.screen) // its answers, which would block it
	go func() {                      // ends with the process: reads of both ends block, and a screen's reader keeps the line open
		buf := make([]byte, 4096)
		for {
			n, err := tty.keyboard.Read(buf)
			s.mu.Lock()
			s.raw.Write(buf[:n])
			s.screen.Write(buf[:n])
			s.mu.Unlock()
			if err != nil {
				return
			}
		}
	}()
	// The line stays open, as standard input does: Bubble Tea's reader may look at it until a moment after the end.
	t.Cleanup(func() { keyboard.Close() })
	return tty, s
}

func modes(t *testing.T, tty *tty) unix.Termios {
	t.Helper()
	m, err := unix.IoctlGetTermios(int(tty.line.Fd()), unix.TCGETS)
	if err != nil {
		t.Fatal(err)
	}
	return *m
}

func await(t *testing.T, s *shown, what string) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !strings.Contains(s.String(), what); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("the terminal doesn't show %q: %q", what, s.String())
		}
	}
}

// typed shows what was typed.
type typed struct {
	keys    string
	updated bool
}

func (m *typed) Render(_ time.Time, width, height int) []string {
	return []string{fmt.Sprintf("%dx%d keys %s update %t", width, height, m.keys, m.updated)}
}

func (m *typed) Key(k string, _ time.Time) (quit bool) {
	if k == "!" {
		panic("in a model")
	}
	m.keys += "<" + k + ">"
	return k == "q" || k == "ctrl+c"
}

// TestRun: keys, updates and sizes arrive, and however it ends the terminal is
// as it was.
func TestRun(t *testing.T) {
	for name, end := range map[string]struct {
		key   string
		panic bool
	}{"key": {"q", false}, "interrupt": {"\x03", false}, "panic": {"!", true}, "context": {"", false}} {
		t.Run(name, func(t *testing.T) {
			tty, out := open(t, 60, 10)
			before := modes(t, tty)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			m := &typed{}
			s := New(tty.line, tty.line, m)
			ended := make(chan error, 1)
			go func() { ended <- s.Run(ctx) }()
			await(t, out, "60x10 keys  update false")
			write(t, tty.keyboard, "a\x1b[A")
			await(t, out, "keys <a><up>")
			if !s.Do(func() { m.updated = true }) {
				t.Error("the screen didn't take an update")
			}
			await(t, out, "update true")
			if err := tty.resize(100, 20); err != nil {
				t.Fatal(err)
			}
			out.resize(100, 20)
			if err := unix.Kill(os.Getpid(), unix.SIGWINCH); err != nil { // as the kernel does for a controlling terminal
				t.Fatal(err)
			}
			await(t, out, "100x20")
			if during := modes(t, tty); during.Lflag&(unix.ECHO|unix.ICANON|unix.ISIG) != 0 {
				t.Errorf("the terminal isn't in raw mode: %#x", during.Lflag)
			}
			if end.key == "" {
				cancel()
			}
			write(t, tty.keyboard, end.key)
			if err := <-ended; end.panic != errors.Is(err, tea.ErrProgramPanic) || !end.panic && err != nil {
				t.Errorf("it ended with %v", err)
			}
			if s.Do(func() {}) {
				t.Error("a screen that was left takes an update")
			}
			await(t, out, "\x1b[?1049l")
			if diff := cmp.Diff(before, modes(t, tty)); diff != "" {
				t.Errorf("the terminal isn't as it was (-want +got):\n%s", diff)
			}
		})
	}
}

// TestNonblocking: another process that sets O_NONBLOCK on the terminal, as some do on their
// standard input, ends no screen.
func TestNonblocking(t *testing.T) {
	tty, out := open(t, 60, 10)
	fd, err := unix.Dup(int(tty.line.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	// As os.Stdin: the runtime doesn't poll it, and nothing closes it while its reader still reads.
	line := os.NewFile(uintptr(fd), "standard input")
	s := New(line, line, &typed{})
	ended := make(chan error, 1)
	go func() { ended <- s.Run(t.Context()) }()
	await(t, out, "keys  ")
	if err := unix.SetNonblock(int(tty.line.Fd()), true); err != nil {
		t.Fatal(err)
	}
	for _, step := range [][2]string{{"a", "keys <a> "}, {"b", "keys <a><b> "}} {
		write(t, tty.keyboard, step[0])
		await(t, out, step[1])
	}
	write(t, tty.keyboard, "q")
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func write(t *testing.T, f *os.File, s string) {
	t.Helper()
	if _, err := f.WriteString(s); err != nil {
		t.Fatal(err)
	}
}

func TestUsable(t *testing.T) {
	tty, _ := open(t, 80, 24)
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	for _, c := range []struct {
		in, out *os.File
		term    string
		want    bool
	}{
		{tty.line, tty.line, "xterm", true}, {tty.line, tty.line, "dumb", false}, {tty.line, tty.line, "", false},
		{null, tty.line, "xterm", false}, {tty.line, null, "xterm", false},
	} {
		if got := Usable(c.in, c.out, c.term); got != c.want {
			t.Errorf("in %s, out %s, TERM=%s: %v, want %v", c.in.Name(), c.out.Name(), c.term, got, c.want)
		}
	}
}
