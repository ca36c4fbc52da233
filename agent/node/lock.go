package node

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"
)

// lockDir holds a lock file for each network namespace that kproxy ran in. Only
// root may write there, so no other user can keep kproxy from starting.
const lockDir = "/run/kproxy"

// Lock makes sure that one kproxy programs this network namespace,
// whatever its control socket. The kernel drops the lock when the process ends,
// however it ends; [Unlock] releases it. The file of one that
// was killed stays until the next in the namespace ends.
func Lock() (*os.File, error) {
	path, err := LockPath()
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
			err = WritePID(f)
		}
		if err != nil {
			f.Close()
			return nil, fmt.Errorf("take the node's lock: %w", err)
		}
		return f, nil
	}
}

// Unlock releases the lock and removes its file.
func Unlock(f *os.File) { os.Remove(f.Name()); f.Close() }

// LockPath is the lock file of the calling thread's network namespace.
func LockPath() (string, error) {
	ns, err := Namespace()
	return filepath.Join(lockDir, fmt.Sprintf("node-%d.lock", ns)), err
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

func WritePID(f *os.File) error {
	if err := f.Truncate(0); err != nil {
		return err
	}
	_, err := f.WriteAt(fmt.Appendln(nil, os.Getpid()), 0)
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

// Namespace is the inode number of the calling thread's.
func Namespace() (uint64, error) {
	ns, err := os.Stat("/proc/thread-self/ns/net")
	if err != nil {
		return 0, fmt.Errorf("find own network namespace: %w", err)
	}
	return ns.Sys().(*syscall.Stat_t).Ino, nil
}
