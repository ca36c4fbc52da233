package kernel

import (
	"fmt"
	"runtime"

	"golang.org/x/sys/unix"
)

// OnThread runs f on a thread of its own that ends with it, so that f may change
// the thread's namespaces. Sockets that f opens stay where they were opened.
func OnThread(f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // and never unlocked: the runtime ends the thread
		if unix.Gettid() == unix.Getpid() {
			// The main thread can't be ended, and its namespaces are those that /proc shows
			// of the process; locked, it isn't used for the goroutine that f gets instead.
			defer runtime.UnlockOSThread()
			done <- OnThread(f)
			return
		}
		done <- f()
	}()
	return <-done
}

// Apart runs f in a network namespace that ends with it.
func Apart(f func() error) error {
	return OnThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return &Missing{
				What: "a network namespace to try things in", How: "run this as root, in a privileged container if in one", Err: fmt.Errorf("unshare: %w", err),
			}
		}
		return f()
	})
}
