package agent

import (
	"context"
	"fmt"
	"time"

	"kproxy.dev/kproxy/agent/node"
	"kproxy.dev/kproxy/agent/takeover"
	"kproxy.dev/kproxy/plan"
)

// leave ends an Agent that hasn't served.
func (a *Agent) leave(err error) error {
	if a.from.Pending() && a.userspace != nil {
		now, cancel := context.WithCancel(context.Background())
		cancel()
		_ = a.userspace.Drain(now)
	}
	return err
}

// inherit listens with the predecessor's listeners. Where its rules are made for something else, so that both can't
// be one after the other without a moment between, it is asked to end.
func (a *Agent) inherit() error {
	w := a.from.Welcome
	tcp, udp := uint16(w.TCPPort), uint16(w.UDPPort)
	if p := uint16(a.cfg.ListenTCPPort); p != 0 {
		tcp = p
	}
	if p := uint16(a.cfg.ListenUDPPort); p != 0 {
		udp = p
	}
	if want := a.madeFor(tcp, udp); w.Steering != want {
		if err := a.from.End(); err != nil {
			return err
		}
		return fmt.Errorf("%w: its rules are for %s, these for %s; it was asked to end", takeover.ErrNotTakenOver, w.Steering, want)
	}
	own, err := a.from.Listeners()
	if err != nil {
		return err
	}
	return a.userspace.Inherit(w.Listeners, own)
}

// pausePredecessor has the predecessor leave the kernel alone from now on, and takes what it knows of endpoints.
func (a *Agent) pausePredecessor() error {
	paused, files, err := a.from.Pause()
	if err != nil {
		return err
	}
	a.healths.Inherit(paused.Files, files)
	a.prober.Resume(plan.Targets(a.source.Latest(), a.health, a.policyNow().ExcludeCIDRs...), takeover.HealthIn(paused.Health))
	return a.orders.Open(a.cfg.StateDir) // it may have written some since
}

// takeOver takes what the predecessor's userspace carries; first is the first plan.
func (a *Agent) takeOver(first *plan.Plan) error {
	a.userspace.Prepare(first, plan.Between(nil, first))
	a.uncommitted = true
	resume := pauseCollector()
	defer func() {
		if a.from.Pending() {
			resume()
		}
	}()
	began := time.Now()
	given, files, err := a.from.Give()
	if err != nil {
		return err
	}
	if err := a.userspace.TakeOver(&given.Userspace, files); err != nil {
		return fmt.Errorf("%w: %w", takeover.ErrNotTakenOver, err)
	}
	a.userspace.Confirm() // first: a crash right after CONFIRM would leave nothing to go on with
	if err := a.from.Confirm(); err != nil {
		return err
	}
	a.serves = func() {
		resume()
		a.log.Info("took over from the kproxy that ran", "connections were at rest for", time.Since(began).Round(time.Microsecond).String(), "descriptors", len(files))
	}
	if err := node.WritePID(a.lock); err != nil {
		a.log.Warn("the node's lock names the process that ran before", "error", err)
	}
	a.programmer.steeringReady() // the rules are the predecessor's
	a.tookOver()
	return nil
}
