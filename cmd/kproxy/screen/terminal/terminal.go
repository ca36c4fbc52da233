// Package terminal gives a terminal to a program that draws whole screens: the
// alternate screen, keys one by one, the size as it changes, and at the end the
// terminal as it was. Bubble Tea does all of that; this package leads what it
// says to a [Screen] and draws what that returns.
//
// The terminal is restored however the program leaves: by [Screen.Run]
// returning, by a panic in one of its callbacks, by SIGTERM, SIGHUP or Ctrl-C,
// and for the time that Ctrl-Z stops it. After SIGKILL, `reset` does it.
//
// All callbacks run on one goroutine, one at a time.
package terminal

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"runtime/debug"
	"strings"
	"syscall"
	"time"

	tea "charm.land/bubbletea/v2"
	"golang.org/x/sys/unix"
	"golang.org/x/term"

	"kproxy.dev/kproxy/cmd/kproxy/screen"
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
	Key func(screen.Key) (quit bool)
	// Updates are called one by one; the screen is drawn anew after each.
	Updates <-chan func()
}

// refresh is how often the screen is drawn when nothing happens, for what
// counts seconds.
const refresh = 250 * time.Millisecond

// Run draws until Key wants to leave, ctx ends, or the terminal goes (SIGHUP).
func (s *Screen) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	hangup, stop := signal.NotifyContext(ctx, unix.SIGHUP)
	defer stop()
	screen := &program{Screen: s}
	p := tea.NewProgram(screen,
		tea.WithInput(s.In), tea.WithOutput(output{s.Out}), tea.WithoutSignalHandler())
	go func() {
		for {
			select {
			case <-hangup.Done():
				p.Quit()
				return
			case f := <-s.Updates:
				p.Send(f)
			}
		}
	}()
	_, err := p.Run()
	if err != nil && hangup.Err() != nil {
		err = nil // there may be no terminal any more to restore
	}
	return errors.Join(screen.panicked, err)
}

// ErrPanic is what a panic in one of the callbacks is an error of.
var ErrPanic = errors.New("panic while drawing")

// program is a Screen as Bubble Tea's loop calls it.
type program struct {
	*Screen
	width, height int
	panicked      error // ends the program in good order, with the terminal restored
}

// caught notes a panic. Bubble Tea's own way out of one closes its reader while it reads.
func (p *program) caught() {
	if r := recover(); r != nil && p.panicked == nil {
		p.panicked = fmt.Errorf("%w: %v\n%s", ErrPanic, r, debug.Stack())
	}
}

type tick struct{}

func nextTick() tea.Cmd { return tea.Tick(refresh, func(time.Time) tea.Msg { return tick{} }) }

// Init starts the clock.
func (p *program) Init() tea.Cmd { return nextTick() }

// Update takes in a key, a size or what happened.
func (p *program) Update(msg tea.Msg) (m tea.Model, cmd tea.Cmd) {
	defer func() {
		if p.panicked != nil {
			m, cmd = p, tea.Quit
		}
	}()
	defer p.caught()
	switch msg := msg.(type) {
	case tick:
		return p, nextTick()
	case tea.WindowSizeMsg:
		p.width, p.height = msg.Width, msg.Height
	case func():
		if msg != nil {
			msg()
		}
	case tea.PasteMsg:
		for _, r := range msg.Content {
			if p.Key(screen.Key(r)) {
				return p, tea.Quit
			}
		}
	case tea.KeyPressMsg:
		switch k := msg.String(); {
		case k == "ctrl+z":
			return p, tea.Suspend
		case msg.Text != "" && p.Key(screen.Key(msg.Text)), msg.Text == "" && p.Key(screen.Key(k)):
			return p, tea.Quit
		}
	}
	return p, nil
}

// View draws.
func (p *program) View() (v tea.View) {
	defer p.caught()
	v.AltScreen = true
	v.Content = strings.Join(p.Draw(p.width, p.height), "\n")
	return v
}

// output is a terminal that another process may set O_NONBLOCK on, which is a flag of the open
// file that they share: then it waits until the terminal takes more.
type output struct{ *os.File }

func (o output) Write(b []byte) (written int, err error) {
	for {
		n, err := o.File.Write(b[written:])
		written += n
		if err == nil {
			return written, nil
		}
		if !errors.Is(err, syscall.EAGAIN) {
			return written, fmt.Errorf("write to terminal: %w", err)
		}
		if _, err := unix.Poll([]unix.PollFd{{Fd: int32(o.Fd()), Events: unix.POLLOUT}}, -1); err != nil && !errors.Is(err, unix.EINTR) {
			return written, fmt.Errorf("wait for terminal: %w", err)
		}
	}
}
