package agent

import (
	"context"
	"errors"
	"fmt"
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
			a.passive.lack("")
			err = l.Run(ctx, a.kernelRefused)
			_ = l.Close()
			since = time.Now()
		} else if !errors.Is(err, unix.EBUSY) && !errors.Is(err, unix.EPERM) {
			a.log.Info("the kernel has no log of refusals and of packets that aren't answered", "error", err) // capability "log of refusals" tells
			a.passive.lack("the kernel has no log (NFLOG) of unanswered packets: only userspace's connects and refusals tell of endpoints")
			return nil
		}
		if err != nil && !told && time.Since(since) > refusalPatience {
			told = true
			a.log.Warn("nothing names the clients that rules refuse, or whose packets aren't answered: another program reads that log", "error", err)
			a.passive.lack(fmt.Sprintf("another program reads netfilter's log group %d: only userspace's connects and refusals tell of endpoints", kernel.RefusalGroup))
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
	if a.passive.logged(&r) {
		return
	}
	k, _ := a.accounting.ServiceAt(r.Protocol, r.Address)
	a.recents.ruleRefused(k, plan.Ended{Time: time.Now(), Protocol: r.Protocol.String(), Client: r.Client, Address: r.Address, DataPlane: plan.None, Refused: r.Reason})
}
