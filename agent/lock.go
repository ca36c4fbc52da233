package agent

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"
)

// lockDir holds a lock file for each network namespace that kproxy ran in. Only
// root may write there, so nobody else can keep kproxy from starting.
const lockDir = "/run/kproxy"

// lockNode makes sure that one kproxy programs this network namespace,
// whatever its control socket. The kernel drops the lock when the process ends,
// however it ends. The returned function releases it and removes the file. That of one that
// was killed stays until the next in the namespace ends.
func lockNode() (release func(), err error) {
	path, err := lockPath()
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(lockDir, 0o755); err != nil {
		return nil, fmt.Errorf("take the node's lock: %w", err)
	}
	for {
		f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
		if err != nil {
			return nil, fmt.Errorf("take the node's lock: %w (run kproxy as root)", err)
		}
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		switch {
		case errors.Is(err, unix.EWOULDBLOCK):
			defer f.Close()
			return nil, fmt.Errorf("another kproxy%s is already running in this network namespace; stop it first, or run this one in a namespace of its own", holder(f))
		case err == nil && !isFile(f, path):
			f.Close() // its last holder has just removed it
			continue
		case err == nil:
			err = errors.Join(f.Truncate(0), writePID(f))
		}
		if err != nil {
			f.Close()
			return nil, fmt.Errorf("take the node's lock: %w", err)
		}
		return func() { os.Remove(path); f.Close() }, nil
	}
}

// lockPath is the lock file of the calling thread's network namespace.
func lockPath() (string, error) {
	ns, err := os.Stat("/proc/thread-self/ns/net")
	if err != nil {
		return "", fmt.Errorf("find own network namespace: %w", err)
	}
	return filepath.Join(lockDir, fmt.Sprintf("node-%d.lock", ns.Sys().(*syscall.Stat_t).Ino)), nil
}

// isFile reports whether f is what path names now.
func isFile(f *os.File, path string) bool {
	mine, err := f.Stat()
	if err != nil {
		return false
	}
	now, err := os.Stat(path)
	return err == nil && os.SameFile(mine, now)
}

func writePID(f *os.File) error {
	_, err := fmt.Fprintln(f, os.Getpid())
	return err
}

// holder names the process that has the lock, as far as the file tells.
func holder(f *os.File) string {
	var pid int
	if _, err := fmt.Fscan(f, &pid); err != nil {
		return ""
	}
	return fmt.Sprintf(" (process %d)", pid)
}
