// Package terminal gives a terminal to a program that draws whole screens: the
// alternate screen, keys one by one, the size as it changes, and at the end the
// terminal as it was. Bubble Tea does all of that; this package leads what it
// says to a [Model] and draws what that returns.
//
// The terminal is restored however the program leaves: by [Screen.Run]
// returning, by a panic of the Model, by SIGTERM, SIGHUP or Ctrl-C,
// and for the time that Ctrl-Z stops it. After SIGKILL, `reset` does it.
//
// A Model is used on one goroutine.
package terminal

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	tea "charm.land/bubbletea/v2"
	"golang.org/x/sys/unix"
	"golang.org/x/term"
)

// Usable reports whether screens can be drawn: both are a terminal, and one
// that understands control sequences.
func Usable(in, out *os.File, name string) bool {
	return name != "dumb" && name != "" && term.IsTerminal(int(in.Fd())) && term.IsTerminal(int(out.Fd()))
}

// Model gives what a screen shows, and takes in keys. A key is a character, or has Bubble
// Tea's name.
type Model interface {
	Render(now time.Time, width, height int) []string
	Key(key string, now time.Time) (quit bool)
}

// Screen draws a [Model] on a terminal until it is left. Start from [New].
type Screen struct {
	model         Model
	program       *tea.Program
	width, height int
	left          chan struct{}
}

// New returns a screen on the terminal of which in and out are.
func New(in, out *os.File, m Model) *Screen {
	s := &Screen{model: m, left: make(chan struct{})}
	s.program = tea.NewProgram(s, tea.WithInput(in), tea.WithOutput(output{out}), tea.WithoutSignalHandler())
	return s
}

// refresh is how often the screen is drawn when nothing happens, for what
// counts seconds.
const refresh = 250 * time.Millisecond

// Run draws until a key wants to leave, ctx ends, or the terminal goes (SIGHUP).
func (s *Screen) Run(ctx context.Context) error {
	defer close(s.left)
	ctx, stop := signal.NotifyContext(ctx, unix.SIGHUP)
	defer stop()
	defer context.AfterFunc(ctx, s.program.Quit)()
	_, err := s.program.Run()
	if err != nil && ctx.Err() != nil {
		err = nil // there may be no terminal any more to restore
	}
	return err
}

// Do has the screen call f, and then draw; it returns false if the screen is left first.
func (s *Screen) Do(f func()) bool {
	done := make(chan struct{})
	s.program.Send(func() { f(); close(done) })
	select {
	case <-done:
		return true
	case <-s.left:
		return false
	}
}

type tick struct{}

func nextTick() tea.Cmd { return tea.Tick(refresh, func(time.Time) tea.Msg { return tick{} }) }

// Init starts the clock.
func (s *Screen) Init() tea.Cmd { return nextTick() }

// Update takes in a key, a size or what happened.
func (s *Screen) Update(msg tea.Msg) (tea.Model, tea.Cmd) {
	switch msg := msg.(type) {
	case tick:
		return s, nextTick()
	case tea.WindowSizeMsg:
		s.width, s.height = msg.Width, msg.Height
	case func():
		msg()
	case tea.PasteMsg:
		for _, r := range msg.Content {
			if s.model.Key(string(r), time.Now()) {
				return s, tea.Quit
			}
		}
	case tea.KeyPressMsg:
		k := msg.String()
		if k == "ctrl+z" {
			return s, tea.Suspend
		}
		if s.model.Key(cmp.Or(msg.Text, k), time.Now()) {
			return s, tea.Quit
		}
	}
	return s, nil
}

// View draws.
func (s *Screen) View() tea.View {
	v := tea.NewView(strings.Join(s.model.Render(time.Now(), s.width, s.height), "\n"))
	v.AltScreen = true
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
