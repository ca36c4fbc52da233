package subject

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/lab/compare/load"
	"kproxy.dev/kproxy/test/bench/traffic"
)

// sessionsRest is how long after a run of UDP sessions there is no other one.
const sessionsRest = 1200 * time.Millisecond

// Load runs a load through the subject.
func (r *Rig) Load(ctx context.Context, l traffic.Load) (out traffic.Outcome, err error) {
	l.Target, l.Server, l.ServerPID = r.Target(l.Kind), r.serverAddress(), r.server.PID()
	if l.Proxies, err = r.processes(); err != nil {
		return out, err
	}
	if l.Kind == traffic.Session {
		for i := range clients {
			l.Sources = append(l.Sources, r.net.Config.ClientAddresses(i)[0])
		}
		l.FirstPort = r.session
		r.session += l.Count
		// Sessions that were silent for so long may make room for others.
		select {
		case <-time.After(time.Until(r.sessionsEnded.Add(sessionsRest))):
		case <-ctx.Done():
			return out, ctx.Err()
		}
		defer func() { r.sessionsEnded = time.Now() }()
	}
	arg, err := json.Marshal(l)
	if err != nil {
		return out, fmt.Errorf("encode load: %w", err)
	}
	p := r.own(r.net.Client, "load", string(arg))
	if err := p.Start(); err != nil {
		return out, err
	}
	ctx, cancel := context.WithTimeout(ctx, l.Time+30*time.Second)
	defer cancel()
	if err := p.Wait(ctx); err != nil {
		return out, errors.Join(fmt.Errorf("load %s through %s: %w: %s", l.Kind, r.Subject.Name, err, strings.TrimSpace(p.Log())), p.Kill())
	}
	if err := json.Unmarshal([]byte(p.Log()), &out); err != nil {
		return out, fmt.Errorf("read outcome: %w", err)
	}
	// Asked for its status, kproxy reads the kernel's table: it is emptied before.
	return out, errors.Join(r.forget(), r.check(ctx, out), r.settle(ctx))
}

// settle waits until kproxy has heard of every flow that the kernel forgot, so
// that its work isn't in others' way; at most for some seconds.
func (r *Rig) settle(ctx context.Context) error {
	if r.client == nil {
		return nil
	}
	return load.Idle{Window: 100 * time.Millisecond, Busy: 10 * time.Millisecond, AtMost: 5 * time.Second}.Wait(ctx, r.proxy.PID())
}

// check makes sure that the load was carried by whom it was meant for: a proxy
// that did has used the processor for it, and kproxy says where its services are.
func (r *Rig) check(ctx context.Context, out traffic.Outcome) error {
	if r.proxy == nil {
		return nil
	}
	if !r.proxy.Running() {
		return fmt.Errorf("%s ended: %s", r.Subject.Name, r.proxy.Log())
	}
	if out.CPU.Proxy <= 0 {
		return fmt.Errorf("%s has used no processor time for its load", r.Subject.Name)
	}
	if r.client != nil {
		return r.programmed(ctx)
	}
	return nil
}

// Hold opens idle connections through the subject and calls f while they are there.
func (r *Rig) Hold(ctx context.Context, n int, f func() error) error {
	p := r.own(r.net.Client, "hold", r.Target(traffic.Exchange).String(), fmt.Sprint(n))
	if err := p.Start(); err != nil {
		return err
	}
	err := r.said(ctx, p, Ready)
	if err == nil {
		err = f()
	}
	return errors.Join(err, stop(p), r.forget())
}

// stop ends a program of the benchmark and returns what it complained about.
func stop(p *lab.Process) error {
	if err := p.Stop(20 * time.Second); err != nil {
		return fmt.Errorf("%w: %s", err, strings.TrimSpace(p.Log()))
	}
	return nil
}
