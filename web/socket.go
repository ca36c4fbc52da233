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

	"kproxy.dev/kproxy/service/lockfile"
)

// ErrRunning is returned by LockControl and ListenControl when another kproxy has
// the socket.
var ErrRunning = errors.New("another kproxy is running here")

// ListenControl opens the control socket at path with mode 0600. A socket file
// left behind by a process that died is replaced; one with a listener
// is not, and neither is a file that isn't a socket. Closing the listener
// removes the file. LockControl decides between two that start at once.
func ListenControl(ctx context.Context, path string) (net.Listener, error) {
	if err := removeStale(path); err != nil {
		return nil, describe(path, err)
	}
	lc := net.ListenConfig{Control: private}
	ln, err := lc.Listen(ctx, "unix", path)
	if err != nil {
		return nil, fmt.Errorf("open control socket: %w", err)
	}
	return ln, nil
}

// lockRetry is how often a lock is tried that another kproxy holds.
const lockRetry = 100 * time.Millisecond

// LockPath returns the lock file of the control socket at path.
func LockPath(path string) string { return path + ".lock" }

// LockControl takes the lock of the control socket at path, in
// a directory that it makes where there is none. While another kproxy holds it, it
// waits: for patience at most, or until ctx ends; waiting is called once, with the
// reason. Where a pod is replaced at once, its predecessor is still draining. The
// caller releases the lock when everything of this kproxy has ended.
func LockControl(ctx context.Context, path string, patience time.Duration, waiting func(error)) (*os.File, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, fmt.Errorf("open control socket: %w", err)
	}
	lock, err := lockfile.Take(LockPath(path))
	if isHeld(err) && patience > 0 {
		waiting(describe(path, err))
		ctx, cancel := context.WithTimeout(ctx, patience)
		defer cancel()
		for isHeld(err) && ctx.Err() == nil {
			select {
			case <-ctx.Done():
			case <-time.After(lockRetry):
				lock, err = lockfile.Take(LockPath(path))
			}
		}
	}
	if err != nil {
		return nil, describe(path, err)
	}
	return lock, nil
}

// isHeld reports whether err says that another process has a lock.
func isHeld(err error) bool {
	_, held := errors.AsType[*lockfile.Held](err)
	return held
}

func describe(path string, err error) error {
	if errors.Is(err, ErrRunning) || isHeld(err) {
		return fmt.Errorf("%w: it holds the control socket %s; stop it, or give this one its own with --socket", ErrRunning, path)
	}
	return fmt.Errorf("open control socket: %w", err)
}

// removeStale removes the socket file at path if no process listens on it.
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
