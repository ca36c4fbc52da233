package agent

import (
	"context"
	"time"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/plan"
)

const (
	// refusalRetry is how long after the log of refusals couldn't be read that is tried again: the kproxy
	// that this one takes over from reads it for a moment yet, and one socket may.
	refusalRetry = time.Second
	// refusalPatience is when that is told.
	refusalPatience = 30 * time.Second
)

// readRefusals remembers the clients that the kernel's rules refuse or drop, until ctx ends. Without that,
// services are served all the same.
func (a *Agent) readRefusals(ctx context.Context) error {
	began, told := time.Now(), false
	for ctx.Err() == nil {
		l, err := kernel.OpenRefusalLog()
		if err == nil {
			err = l.Run(ctx, a.kernelRefused)
			_ = l.Close()
		}
		if err != nil && !told && time.Since(began) > refusalPatience {
			told = true
			a.log.Warn("nothing names the clients that rules refuse; another program may read that log", "error", err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(refusalRetry):
		}
	}
	return nil
}

// kernelRefused takes what the rules log.
func (a *Agent) kernelRefused(r kernel.Refusal) {
	k, _ := a.accounting.ServiceAt(r.Protocol, r.Address)
	a.recents.ruleRefused(k, plan.Ended{Time: time.Now(), Protocol: r.Protocol.String(), Client: r.Client, Address: r.Address, DataPlane: plan.None, Refused: r.Reason})
}
