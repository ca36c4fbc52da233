package lab

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Terminal is a pseudoterminal (pty(7)), for programs that draw on one.
type Terminal struct {
	// Keyboard is where keys are written and what is shown is read.
	Keyboard *os.File
	// Line is the terminal that a program gets as its stdin and stdout.
	Line *os.File
}

// OpenTerminal opens a pseudoterminal of the given size, in characters.
func OpenTerminal(width, height int) (*Terminal, error) {
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	if err != nil {
		return nil, fmt.Errorf("open pseudoterminal: %w", err)
	}
	t := &Terminal{Keyboard: master}
	if t.Line, err = openLine(master); err == nil {
		err = t.Resize(width, height)
	}
	if err != nil {
		t.Close()
		return nil, fmt.Errorf("open pseudoterminal: %w", err)
	}
	return t, nil
}

// openLine unlocks and opens the other end, as grantpt(3) and unlockpt(3) do.
func openLine(master *os.File) (*os.File, error) {
	raw, err := master.SyscallConn() // Fd would make it blocking: no deadlines
	if err != nil {
		return nil, err
	}
	var number int
	var failed error
	err = raw.Control(func(fd uintptr) {
		if failed = unix.IoctlSetPointerInt(int(fd), unix.TIOCSPTLCK, 0); failed == nil {
			number, failed = unix.IoctlGetInt(int(fd), unix.TIOCGPTN)
		}
	})
	if err == nil {
		err = failed
	}
	if err != nil {
		return nil, err
	}
	return os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|unix.O_NOCTTY, 0)
}

// Resize changes the size; programs get SIGWINCH.
func (t *Terminal) Resize(width, height int) error {
	raw, err := t.Keyboard.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	err = raw.Control(func(fd uintptr) {
		failed = unix.IoctlSetWinsize(int(fd), unix.TIOCSWINSZ, &unix.Winsize{Col: uint16(width), Row: uint16(height)})
	})
	if err == nil {
		err = failed
	}
	return err
}

// Close closes both ends; programs on the terminal get SIGHUP.
func (t *Terminal) Close() {
	if t.Line != nil {
		_ = t.Line.Close()
	}
	_ = t.Keyboard.Close()
}
