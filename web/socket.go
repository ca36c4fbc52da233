package web

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"sync/atomic"
	"syscall"
	"time"
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

// LockControl takes the lock of the control socket at path, the file PATH.lock, in
// a directory that it makes where there is none. While another kproxy holds it, it
// waits: for patience at most, or until ctx ends; waiting is called once, with the
// reason. Where a pod is replaced at once, its predecessor is still draining. The
// caller closes the lock when everything of this kproxy has ended, which removes the
// file; the kernel releases the lock however a process ends.
func LockControl(ctx context.Context, path string, patience time.Duration, waiting func(error)) (*Lock, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, fmt.Errorf("open control socket: %w", err)
	}
	lock, err := LockFile(path + ".lock")
	if errors.Is(err, ErrRunning) && patience > 0 {
		waiting(describe(path, err))
		ctx, cancel := context.WithTimeout(ctx, patience)
		defer cancel()
		again := time.NewTicker(lockRetry)
		defer again.Stop()
		for errors.Is(err, ErrRunning) && ctx.Err() == nil {
			select {
			case <-ctx.Done():
			case <-again.C:
				lock, err = LockFile(path + ".lock")
			}
		}
	}
	if err != nil {
		return nil, describe(path, err)
	}
	return lock, nil
}

func describe(path string, err error) error {
	if errors.Is(err, ErrRunning) {
		return fmt.Errorf("%w: it holds the control socket %s; stop it, or give this one its own with --socket", ErrRunning, path)
	}
	return fmt.Errorf("open control socket: %w", err)
}

// Lock is a locked file, which Close removes before it unlocks it.
type Lock struct {
	*os.File
	shared atomic.Bool // with another process, which it is left to
}

// InheritLock is the lock of the control socket at path that another process has as well, whose descriptor it takes over.
func InheritLock(fd int, path string) *Lock {
	return &Lock{File: os.NewFile(uintptr(fd), path+".lock")}
}

// Leave leaves the lock to another process that has its descriptor: Close neither removes nor unlocks it. Keep ends that.
func (l *Lock) Leave() { l.shared.Store(true) }

// Keep has Close release the lock again.
func (l *Lock) Keep() { l.shared.Store(false) }

// Close releases the lock.
func (l *Lock) Close() (err error) {
	if !l.shared.Load() {
		err = os.Remove(l.Name())
	}
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	return errors.Join(err, l.File.Close())
}

// LockFile makes and locks the file at path; the error is ErrRunning while another
// process holds it. Closing the lock removes the file. It locks the file that path names
// once it is locked: a holder may have removed the one that was opened.
func LockFile(path string) (*Lock, error) {
	for {
		f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
		if err != nil {
			return nil, err
		}
		err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			if named(f, path) {
				return &Lock{File: f}, nil
			}
			_ = f.Close()
			continue
		}
		_ = f.Close()
		if errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, ErrRunning
		}
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
}

// named reports whether path names f.
func named(f *os.File, path string) bool {
	mine, err := f.Stat()
	if err != nil {
		return false
	}
	now, err := os.Stat(path)
	return err == nil && os.SameFile(mine, now)
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
