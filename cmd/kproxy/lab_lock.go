package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"

	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/service/lockfile"
)

// labDir holds the manifests of the lab that is up, for users to edit, its socket and
// state. It goes with the lab, as does the lock beside it.
const labDir = "/run/kproxy-lab"

// labRunning is the error for a second lab: all have the same names.
type labRunning struct{ *lockfile.Held }

func (e *labRunning) Error() string {
	return "a lab is up already" + e.By() + ": leave it by Ctrl-C in its terminal, or end it with `kproxy lab down`"
}

// lockLab makes this process the one that has the lab, and its directory empty: a lab that
// was killed may have left files. The error is a *labRunning while another process has the lab.
func lockLab() (*os.File, error) {
	lock, err := lockfile.Take(labDir + ".lock")
	if held, ok := errors.AsType[*lockfile.Held](err); ok {
		return nil, &labRunning{held}
	}
	if err != nil {
		return nil, fmt.Errorf("lock the lab: %w", err)
	}
	if err := errors.Join(os.RemoveAll(labDir), os.Mkdir(labDir, 0o700)); err != nil {
		return nil, errors.Join(fmt.Errorf("prepare the lab's directory: %w", err), lockfile.Release(lock))
	}
	return lock, nil
}

// unlockLab removes the lab's directory, and then the lock.
func unlockLab(lock *os.File) error { return errors.Join(os.RemoveAll(labDir), lockfile.Release(lock)) }

// endLab ends the lab that is up, if there is one, and removes what one that was killed
// has left. It waits for 30 s at most.
func endLab(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	signalled := 0
	for {
		lock, err := lockLab()
		if err == nil {
			return errors.Join(lab.DownAll(lab.DefaultPrefix), unlockLab(lock))
		}
		running, ok := errors.AsType[*labRunning](err)
		if !ok {
			return err
		}
		if pid := running.PID; pid != 0 && pid != signalled {
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
