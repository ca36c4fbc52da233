package flows

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/kernel"
)

const (
	// How long after the log of refusals couldn't be read that is tried again, twice as long each time: the kproxy
	// that this one takes over from reads it for a moment yet, and one socket may.
	refusalRetry    = time.Second
	refusalRetryMax = time.Minute
	// refusalPatience bounds how long that isn't told.
	refusalPatience = 30 * time.Second
)

// ReadRefusals has take told of the packets that the kernel's rules log, until ctx ends, and lack of what keeps it from that; empty for
// nothing. Without that, services are served all the same.
func ReadRefusals(ctx context.Context, log *slog.Logger, lack func(string), take func(kernel.Refusal)) error {
	since, told, wait := time.Now(), false, refusalRetry
	for ctx.Err() == nil {
		l, err := kernel.OpenRefusalLog()
		if err == nil {
			told, wait = false, refusalRetry
			lack("")
			err = l.Run(ctx, take)
			_ = l.Close()
			since = time.Now()
		} else if !errors.Is(err, unix.EBUSY) && !errors.Is(err, unix.EPERM) {
			log.Info("the kernel has no log of refusals and of packets that aren't answered", "error", err) // capability "log of refusals" tells
			lack("the kernel has no log (NFLOG) of unanswered packets: only userspace's connects and refusals tell of endpoints")
			return nil
		}
		if err != nil && !told && time.Since(since) > refusalPatience {
			told = true
			log.Warn("nothing names the clients that rules refuse, or whose packets aren't answered: another program reads that log", "error", err)
			lack(fmt.Sprintf("another program reads netfilter's log group %d: only userspace's connects and refusals tell of endpoints", kernel.RefusalGroup))
		}
		select {
		case <-ctx.Done():
		case <-time.After(wait):
			wait = min(2*wait, refusalRetryMax)
		}
	}
	return nil
}
