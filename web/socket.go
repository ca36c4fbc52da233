package web

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"time"
)

// ErrRunning is returned by ListenControl when another kproxy has the socket.
var ErrRunning = errors.New("another kproxy is running here")

// ListenControl opens the control socket at path with mode 0600. A socket file
// left behind by a process that died is replaced; one that somebody listens on
// is not, and neither is a file that isn't a socket. Closing the listener
// removes the file.
//
// A lock on PATH.lock is held as long as the listener is open. It decides
// between two kproxys that start at once, and the kernel releases it however a
// process ends.
func ListenControl(ctx context.Context, path string) (net.Listener, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, fmt.Errorf("open control socket: %w", err)
	}
	lock, err := lockFile(path + ".lock")
	if err != nil {
		return nil, describe(path, err)
	}
	if err := removeStale(path); err != nil {
		_ = lock.Close()
		return nil, describe(path, err)
	}
	lc := net.ListenConfig{Control: private}
	ln, err := lc.Listen(ctx, "unix", path)
	if err != nil {
		_ = lock.Close()
		return nil, fmt.Errorf("open control socket: %w", err)
	}
	return &lockedListener{Listener: ln, lock: lock}, nil
}

func describe(path string, err error) error {
	if errors.Is(err, ErrRunning) {
		return fmt.Errorf("%w: it holds the control socket %s; stop it, or give this one its own with --socket", ErrRunning, path)
	}
	return fmt.Errorf("open control socket: %w", err)
}

func lockFile(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	if err == nil {
		return f, nil
	}
	_ = f.Close()
	if errors.Is(err, syscall.EWOULDBLOCK) {
		return nil, ErrRunning
	}
	return nil, fmt.Errorf("lock %s: %w", path, err)
}

// removeStale removes the socket file at path if nobody listens on it.
func removeStale(path string) error {
	info, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if info.Mode().Type() != fs.ModeSocket {
		return fmt.Errorf("%s exists and is not a socket; remove it, or choose another path with --socket", path)
	}
	c, err := net.DialTimeout("unix", path, time.Second)
	switch {
	case err == nil:
		_ = c.Close()
		return ErrRunning
	case errors.Is(err, syscall.ECONNREFUSED):
		return os.Remove(path)
	}
	return err
}

// private sets the mode before bind, which gives it to the socket file
// (unix(7), "Pathname socket ownership and permissions"), so that there is no
// moment at which others can connect.
func private(_, _ string, c syscall.RawConn) error {
	var err error
	if ctlErr := c.Control(func(fd uintptr) { err = syscall.Fchmod(int(fd), 0o600) }); ctlErr != nil {
		return ctlErr
	}
	return err
}

// lockedListener releases the lock when it is closed. The lock file stays: to
// remove it would let two processes lock two files of one name.
type lockedListener struct {
	net.Listener
	lock *os.File
}

func (l *lockedListener) Close() error {
	return errors.Join(l.Listener.Close(), l.lock.Close())
}
