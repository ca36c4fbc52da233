// Package terminal gives a terminal to a program that draws whole screens: the
// alternate screen, keys one by one, the size as it changes, and at the end the
// terminal as it was.
//
// The terminal is restored however the program leaves: by [Screen.Run]
// returning, by a panic in one of its callbacks, by SIGTERM, SIGHUP or Ctrl-C,
// and for the time that Ctrl-Z stops it. After SIGKILL, `reset` does it.
//
// All callbacks run on the goroutine of Run.
package terminal

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"golang.org/x/term"

	"kproxy.dev/kproxy/view"
)

// Usable reports whether screens can be drawn: both are a terminal, and one
// that understands control sequences.
func Usable(in, out *os.File, name string) bool {
	return name != "dumb" && name != "" && term.IsTerminal(int(in.Fd())) && term.IsTerminal(int(out.Fd()))
}

// Screen draws on a terminal until it is left.
type Screen struct {
	In, Out *os.File
	// Draw returns the lines of a screen of that size.
	Draw func(width, height int) []string
	// Key takes in a key and returns true to leave.
	Key func(view.Key) (quit bool)
	// Updates are called one by one; the screen is drawn anew after each.
	Updates <-chan func()

	drawn  []string // what the terminal shows, a line each
	width  int      // of what is drawn
	height int
}

// refresh is how often the screen is drawn when nothing happens, for what
// counts seconds.
const refresh = 250 * time.Millisecond

// Control sequences of ECMA-48 and xterm (ctlseqs): the alternate screen is
// entered with its cursor saved (1049), the cursor hidden (25), and lines don't
// wrap (7): one that is too wide after all does no harm.
const (
	enter     = "\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[H\x1b[2J"
	leave     = "\x1b[?7h\x1b[?25h\x1b[?1049l"
	eraseLine = "\x1b[K"
)

// Run draws until Key wants to leave or ctx ends.
func (s *Screen) Run(ctx context.Context) (err error) {
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, unix.SIGWINCH, unix.SIGCONT, unix.SIGHUP)
	defer signal.Stop(signals)
	restore, err := s.enter()
	if err != nil {
		return err
	}
	defer func() { restore() }()
	in := startReader(s.In)
	defer in.stop()
	tick := time.NewTicker(refresh)
	defer tick.Stop()
	for {
		if err := s.draw(); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		case f := <-s.Updates:
			f()
		case k, ok := <-in.keys:
			if !ok {
				return in.err // the terminal has gone
			}
			if k == keySuspend {
				restore()
				if err := stopUntilContinued(signals); err != nil {
					return err
				}
				if restore, err = s.enter(); err != nil {
					return err
				}
			} else if s.Key(k) {
				return nil
			}
		case sig := <-signals:
			switch sig {
			case unix.SIGHUP:
				return nil
			case unix.SIGCONT: // a shell may have changed the terminal meanwhile
				restore()
				if restore, err = s.enter(); err != nil {
					return err
				}
			}
		}
	}
}

// stopUntilContinued stops the process group, as the terminal does for Ctrl-Z
// where it isn't in raw mode. Threads go on for a moment after kill(2), so the
// end of it is SIGCONT.
func stopUntilContinued(signals <-chan os.Signal) error {
	if err := syscall.Kill(0, unix.SIGSTOP); err != nil {
		return fmt.Errorf("stop: %w", err)
	}
	for sig := range signals {
		if sig == unix.SIGCONT {
			break
		}
	}
	return nil
}

// enter takes the terminal and returns what gives it back.
func (s *Screen) enter() (restore func(), err error) {
	state, err := term.MakeRaw(int(s.In.Fd()))
	if err != nil {
		return func() {}, fmt.Errorf("set terminal to raw mode: %w", err)
	}
	s.drawn, s.width, s.height = nil, 0, 0
	if err := s.write(enter); err != nil {
		_ = term.Restore(int(s.In.Fd()), state)
		return func() {}, fmt.Errorf("enter alternate screen: %w", err)
	}
	done := false
	return func() {
		if done {
			return
		}
		done = true
		_ = s.write(leave) // a terminal that has gone needs no restoring
		_ = term.Restore(int(s.In.Fd()), state)
	}, nil
}

// draw writes the lines that differ from what is on the terminal.
func (s *Screen) draw() error {
	width, height, err := term.GetSize(int(s.Out.Fd()))
	if err != nil {
		return fmt.Errorf("get size of terminal: %w", err)
	}
	if width <= 0 || height <= 0 { // a line that doesn't tell, such as a serial one
		width, height = 80, 24
	}
	lines := s.Draw(width, height)
	var b strings.Builder
	if width != s.width || height != s.height {
		b.WriteString("\x1b[H\x1b[2J") // terminals differ in what a new size leaves
		s.drawn, s.width, s.height = nil, width, height
	}
	for i := range max(len(lines), len(s.drawn)) {
		now, was := "", ""
		if i < len(lines) {
			now = lines[i]
		}
		if i < len(s.drawn) {
			was = s.drawn[i]
		}
		if now != was {
			// Erased first: after a line of full width the cursor is still in the last
			// column, and erasing from there would take that (xterm's ctlseqs, DECAWM).
			fmt.Fprintf(&b, "\x1b[%d;1H%s%s", i+1, eraseLine, now)
		}
	}
	s.drawn = lines
	if b.Len() == 0 {
		return nil
	}
	if err := s.write(b.String()); err != nil {
		return fmt.Errorf("write to terminal: %w", err)
	}
	return nil
}

func (s *Screen) write(text string) error {
	for {
		n, err := s.Out.WriteString(text)
		if !ready(s.Out, unix.POLLOUT, err) {
			return err
		}
		text = text[n:]
	}
}
