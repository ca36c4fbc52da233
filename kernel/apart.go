package kernel

import (
	"fmt"
	"runtime"

	"golang.org/x/sys/unix"
)

// Apart runs f in a network namespace that ends with it, on a thread that does too.
func Apart(f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // and never unlocked: the runtime ends the thread
		if unix.Gettid() == unix.Getpid() {
			// The main thread can't be ended; locked, it isn't used for the goroutine that f gets.
			defer runtime.UnlockOSThread()
			done <- Apart(f)
			return
		}
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			done <- &Missing{
				What: "a network namespace to try things in", How: "run this as root, in a privileged container if in one", Err: fmt.Errorf("unshare: %w", err),
			}
			return
		}
		done <- f()
	}()
	return <-done
}
