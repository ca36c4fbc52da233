package agent

import (
	"context"
	"errors"
	"time"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/plan"
)

const (
	// How long after the log of refusals couldn't be read that is tried again, twice as long each time: the kproxy
	// that this one takes over from reads it for a moment yet, and one socket may.
	refusalRetry    = time.Second
	refusalRetryMax = time.Minute
	// refusalPatience is when that is told.
	refusalPatience = 30 * time.Second
)

// readRefusals remembers the clients that the kernel's rules refuse or drop, until ctx ends. Without that,
// services are served all the same.
func (a *Agent) readRefusals(ctx context.Context) error {
	since, told, wait := time.Now(), false, refusalRetry
	for ctx.Err() == nil {
		l, err := kernel.OpenRefusalLog()
		if err == nil {
			told, wait = false, refusalRetry
			err = l.Run(ctx, a.kernelRefused)
			_ = l.Close()
			since = time.Now()
		} else if !errors.Is(err, unix.EBUSY) && !errors.Is(err, unix.EPERM) {
			a.log.Debug("the kernel has no log of refusals", "error", err) // capability "log of refusals" tells
			return nil
		}
		if err != nil && !told && time.Since(since) > refusalPatience {
			told = true
			a.log.Warn("nothing names the clients that rules refuse: another program reads that log", "error", err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(wait):
			wait = min(2*wait, refusalRetryMax)
		}
	}
	return nil
}

// kernelRefused takes what the rules log.
func (a *Agent) kernelRefused(r kernel.Refusal) {
	k, _ := a.accounting.ServiceAt(r.Protocol, r.Address)
	a.recents.ruleRefused(k, plan.Ended{Time: time.Now(), Protocol: r.Protocol.String(), Client: r.Client, Address: r.Address, DataPlane: plan.None, Refused: r.Reason})
}
