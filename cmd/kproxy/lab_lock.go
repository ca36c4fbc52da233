package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/web"
)

// labDir holds the manifests of the lab that is up, for users to edit, its socket and
// state. It goes with the lab, as does the lock beside it.
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

// labLock is a lab's lock.
type labLock struct{ io.Closer }

// lockLab makes this process the one that has the lab, and its directory empty: a lab that
// was killed may have left files. The kernel drops the lock however the process ends. The
// error is a *labRunning while another process has the lab.
func lockLab() (labLock, error) {
	lock, err := web.LockFile(labDir + ".lock")
	if errors.Is(err, web.ErrRunning) {
		text, _ := os.ReadFile(labOwner)
		pid, _ := strconv.Atoi(strings.TrimSpace(string(text))) // the lab may just be writing it
		return labLock{}, &labRunning{pid}
	}
	if err != nil {
		return labLock{}, fmt.Errorf("lock the lab: %w", err)
	}
	err = errors.Join(os.RemoveAll(labDir), os.MkdirAll(labDir, 0o700), os.WriteFile(labOwner, fmt.Appendln(nil, os.Getpid()), 0o644))
	if err != nil {
		return labLock{}, errors.Join(fmt.Errorf("prepare the lab's directory: %w", err), lock.Close())
	}
	return labLock{lock}, nil
}

// unlock removes the lab's directory, and then the lock.
func (l labLock) unlock() error { return errors.Join(os.RemoveAll(labDir), l.Close()) }

// endLab ends the lab that is up, if there is one, and removes what one that was killed
// has left. It waits for 30 s at most.
func endLab(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	signalled := 0
	for {
		lock, err := lockLab()
		if err == nil {
			return errors.Join(lab.DownAll(lab.DefaultPrefix), lock.unlock())
		}
		running, ok := errors.AsType[*labRunning](err)
		if !ok {
			return err
		}
		if pid := running.pid; pid != 0 && pid != signalled {
			signalled = pid // once: a second SIGTERM means "at once"
			if err := syscall.Kill(pid, syscall.SIGTERM); err != nil && !errors.Is(err, syscall.ESRCH) {
				return fmt.Errorf("end the lab of process %d: %w", pid, err)
			}
		}
		if !sleep(ctx, 50*time.Millisecond) {
			return fmt.Errorf("the lab of process %d hasn't ended 30 seconds after SIGTERM: kill -9 it, and try again", signalled)
		}
	}
}
