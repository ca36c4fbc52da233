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

	"github.com/charmbracelet/x/vt"
	"github.com/creack/pty"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/cmd/kproxy/screen"
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
			updates := make(chan func())
			keys, updated := "", "no"
			s := Screen{
				In: tty.line, Out: tty.line, Updates: updates,
				Draw: func(w, h int) []string { return []string{fmt.Sprintf("%dx%d keys %s update %s", w, h, keys, updated)} },
				Key: func(k screen.Key) bool {
					if k == "!" {
						panic("in a callback")
					}
					keys += "<" + string(k) + ">"
					return k == "q" || k == screen.KeyInterrupt
				},
			}
			ended := make(chan error, 1)
			go func() { ended <- s.Run(ctx) }()
			await(t, out, "60x10 keys  update no")
			write(t, tty.keyboard, "a\x1b[A")
			await(t, out, "keys <a><up>")
			updates <- func() { updated = "yes" }
			await(t, out, "update yes")
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
			if err := <-ended; end.panic != errors.Is(err, ErrPanic) || !end.panic && err != nil {
				t.Errorf("it ended with %v", err)
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
	keys := ""
	s := Screen{
		In: line, Out: line, Draw: func(int, int) []string { return []string{"keys " + keys + ";"} },
		Key: func(k screen.Key) bool { keys += string(k); return k == "q" },
	}
	ended := make(chan error, 1)
	go func() { ended <- s.Run(t.Context()) }()
	await(t, out, "keys ;")
	if err := unix.SetNonblock(int(tty.line.Fd()), true); err != nil {
		t.Fatal(err)
	}
	for _, shown := range []string{"keys a;", "keys ab;"} {
		write(t, tty.keyboard, shown[len(shown)-2:len(shown)-1])
		await(t, out, shown)
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
