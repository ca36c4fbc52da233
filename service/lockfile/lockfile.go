// Package lockfile lets one process at a time have what a file stands for. The kernel
// drops the lock however the process ends.
package lockfile

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Held is the error while another process has the lock.
type Held struct{ PID int } // 0 where the file doesn't say

func (h *Held) Error() string { return "another process" + h.By() + " has the lock" }

// By names that process in brackets, if it is known.
func (h *Held) By() string {
	if h.PID == 0 {
		return ""
	}
	return fmt.Sprintf(" (process %d)", h.PID)
}

// Take makes and locks the file at path, and writes the number of this process into it. The error is a *Held
// while another process has it. [Release] ends the lock; closing the file leaves it to a process that has its
// descriptor too.
func Take(path string) (*os.File, error) {
	for {
		f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
		if err != nil {
			return nil, err
		}
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		switch {
		case errors.Is(err, unix.EWOULDBLOCK):
			held := &Held{}
			_, _ = fmt.Fscan(f, &held.PID) // the other one may just be writing it
			err = held
		case err != nil:
			err = fmt.Errorf("lock %s: %w", path, err)
		case !named(f, path):
			f.Close() // its last holder has just removed it
			continue
		default:
			err = WritePID(f)
		}
		if err != nil {
			f.Close()
			return nil, err
		}
		return f, nil
	}
}

// Release removes the file, where nobody has done so, and then unlocks it.
func Release(f *os.File) error { return errors.Join(os.RemoveAll(f.Name()), f.Close()) }

// WritePID makes this process the one that the file names.
func WritePID(f *os.File) error {
	if err := f.Truncate(0); err != nil {
		return err
	}
	_, err := f.WriteAt(fmt.Appendln(nil, os.Getpid()), 0)
	return err
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
