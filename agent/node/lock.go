package node

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"

	"kproxy.dev/kproxy/service/lockfile"
)

// lockDir holds a lock file for each network namespace that kproxy ran in. Only
// root may write there, so no other user can keep kproxy from starting.
const lockDir = "/run/kproxy"

// Lock makes sure that one kproxy programs this network namespace,
// whatever its control socket. The file of one that
// was killed stays until the next in the namespace ends.
func Lock() (*os.File, error) {
	path, err := LockPath()
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(lockDir, 0o755); err != nil {
		return nil, fmt.Errorf("take the node's lock: %w", err)
	}
	f, err := lockfile.Take(path)
	if held, ok := errors.AsType[*lockfile.Held](err); ok {
		return nil, fmt.Errorf("another kproxy%s is already running in this network namespace; stop it first, or run this one in a namespace of its own", held.By())
	}
	if err != nil {
		return nil, fmt.Errorf("take the node's lock: %w (run kproxy as root)", err)
	}
	return f, nil
}

// LockPath is the lock file of the calling thread's network namespace.
func LockPath() (string, error) {
	ns, err := Namespace()
	return filepath.Join(lockDir, fmt.Sprintf("node-%d.lock", ns)), err
}

// Namespace is the inode number of the calling thread's.
func Namespace() (uint64, error) {
	ns, err := os.Stat("/proc/thread-self/ns/net")
	if err != nil {
		return 0, fmt.Errorf("find own network namespace: %w", err)
	}
	return ns.Sys().(*syscall.Stat_t).Ino, nil
}
