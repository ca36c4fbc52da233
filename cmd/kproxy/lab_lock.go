package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/lab"
)

// labDir holds the lock of the lab that is up, its manifests, for users to edit, its
// socket and state. It goes with the lab.
const labDir = "/run/kproxy-lab"

// labOwner is a file with the process id of the lab.
const labOwner = labDir + "/lab.pid"

// labRunning is the error for a second lab: all have the same names.
type labRunning struct{ pid int } // 0 if it isn't known

func (e *labRunning) Error() string {
	who := "a lab is up already"
	if e.pid != 0 {
		who += fmt.Sprintf(" (process %d)", e.pid)
	}
	return who + ": leave it by Ctrl-C in its terminal, or end it with `kproxy lab down`"
}

// lockLab makes this process the one that has the lab: it locks the lab's directory,
// which it empties of what a lab that was killed has left. The kernel drops the lock when
// the process ends, however it does. The error is a *labRunning while another has it.
func lockLab() (*os.File, error) {
	for {
		dir, err := tryLockLab()
		if err != nil {
			return nil, err
		}
		if dir == nil {
			continue // the lab that had it has just removed the directory
		}
		if err := errors.Join(emptyLabDir(), os.WriteFile(labOwner, fmt.Appendln(nil, os.Getpid()), 0o644)); err != nil {
			dir.Close()
			return nil, fmt.Errorf("prepare the lab's directory: %w", err)
		}
		return dir, nil
	}
}

// tryLockLab returns the locked directory; nil if it is no longer the one at labDir.
func tryLockLab() (*os.File, error) {
	if err := os.MkdirAll(labDir, 0o700); err != nil {
		return nil, fmt.Errorf("make the lab's directory: %w", err)
	}
	dir, err := os.Open(labDir)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("open the lab's directory: %w", err)
	}
	err = unix.Flock(int(dir.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		dir.Close()
		return nil, &labRunning{labOwnerPID()}
	}
	if err != nil {
		dir.Close()
		return nil, fmt.Errorf("lock %s: %w", labDir, err)
	}
	locked, err := dir.Stat()
	if err == nil {
		var named os.FileInfo
		if named, err = os.Stat(labDir); err == nil && os.SameFile(locked, named) {
			return dir, nil
		}
	}
	dir.Close()
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("lock %s: %w", labDir, err)
	}
	return nil, nil
}

func labOwnerPID() int {
	text, err := os.ReadFile(labOwner)
	if err != nil {
		return 0
	}
	pid, _ := strconv.Atoi(strings.TrimSpace(string(text))) // the lab may just be writing it
	return pid
}

func emptyLabDir() error {
	entries, err := os.ReadDir(labDir)
	for _, e := range entries {
		err = errors.Join(err, os.RemoveAll(filepath.Join(labDir, e.Name())))
	}
	return err
}

// unlockLab removes the lab's directory, and then lets go of it.
func unlockLab(dir *os.File) error {
	return errors.Join(os.RemoveAll(labDir), dir.Close())
}

// endLab ends the lab that is up, if there is one, and removes what one that was killed
// has left. It waits for 30 s at most.
func endLab(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	told := 0
	for {
		dir, err := lockLab()
		if err == nil {
			return errors.Join(lab.DownAll(lab.DefaultPrefix), unlockLab(dir))
		}
		var running *labRunning
		if !errors.As(err, &running) {
			return err
		}
		if pid := running.pid; pid != 0 && pid != told {
			told = pid // once: a second SIGTERM means "at once"
			if err := syscall.Kill(pid, syscall.SIGTERM); err != nil && !errors.Is(err, syscall.ESRCH) {
				return fmt.Errorf("end the lab of process %d: %w", pid, err)
			}
		}
		if !sleep(ctx, 50*time.Millisecond) {
			return fmt.Errorf("the lab of process %d hasn't ended 30 seconds after SIGTERM: kill -9 it, and try again", told)
		}
	}
}
