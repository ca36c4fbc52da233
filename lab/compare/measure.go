package compare

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"kproxy.dev/kproxy/conntrack"
	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/lab/compare/load"
)

// measure runs a load through the plane and makes sure that it went there.
func (r *rig) measure(ctx context.Context, l load.Load, first netip.Addr) (load.Outcome, error) {
	l.Targets = r.targets(l.Kind, first)
	l.Backend = r.server.PID()
	if r.proxy != nil {
		l.Proxy = r.proxy.PID()
	}
	if l.Kind == load.Sessions {
		l.FirstPort = r.nextPort
		r.nextPort += uint16(l.Count)
	}
	out, err := r.run(ctx, l)
	if err != nil {
		return out, fmt.Errorf("load %s through %s: %w", l.Kind, r.plane, err)
	}
	// The protocol isn't asked for: filtered dumps are newer than some kernels.
	var flows []conntrack.Flow
	if flows, err = r.table.List(0); err == nil {
		err = checkCarried(r.plane, &l, out.Witnesses, flows)
	}
	if err != nil {
		return out, fmt.Errorf("load %s through %s: %w", l.Kind, r.plane, err)
	}
	return out, nil
}

// run starts the load in the client's namespace and waits for it.
func (r *rig) run(ctx context.Context, l load.Load) (out load.Outcome, err error) {
	arg, err := json.Marshal(l)
	if err != nil {
		return out, fmt.Errorf("encode load: %w", err)
	}
	p := &lab.Process{Namespace: r.net.Client, Path: r.config.Program, Args: []string{"lab", "compare-load", string(arg)}, Env: environment}
	if err := p.Start(); err != nil {
		return out, err
	}
	// Longer than every wait on a socket: what ends there says more than a time-out here.
	ctx, cancel := context.WithTimeout(ctx, l.Time+r.config.within(15*time.Second))
	defer cancel()
	if err := p.Wait(ctx); err != nil {
		return out, errors.Join(fmt.Errorf("%w: %s", err, lastLine(p.Log())), p.Kill())
	}
	if err := json.Unmarshal([]byte(p.Log()), &out); err != nil {
		return out, fmt.Errorf("read outcome: %w", err)
	}
	return out, nil
}

// grow adds services until there are n, and returns how long that took: from
// the write until kproxy says that all are programmed. What asking for that
// takes makes it a little longer.
func (r *rig) grow(ctx context.Context, n int) (time.Duration, error) {
	if r.plane == Direct {
		return 0, nil
	}
	ctx, cancel := context.WithTimeout(ctx, r.config.within(4*time.Minute))
	defer cancel()
	start := time.Now()
	if err := writeFillers(r.manifests(), r.plane, r.services, n, r.net.Backends); err != nil {
		return 0, err
	}
	r.services = n
	for {
		asked := time.Now()
		st, err := r.client.Status(ctx)
		if err == nil {
			err = r.programmed(st, n)
		}
		took := time.Since(start)
		if err == nil {
			return took, errors.Join(r.settle(ctx), r.reach(ctx, n))
		}
		// Asking costs kproxy time: it gets at least as much for its own work.
		select {
		case <-time.After(max(20*time.Millisecond, 2*time.Since(asked))):
		case <-ctx.Done():
			return took, fmt.Errorf("wait for %d services in %s: %w: %w", n, r.plane, ctx.Err(), err)
		}
	}
}

// settle waits until kproxy has nothing to do any more, so that its work on
// services isn't counted as that on packets. It waits for some seconds at most.
func (r *rig) settle(ctx context.Context) error {
	return load.Idle{Window: 300 * time.Millisecond, Busy: 20 * time.Millisecond, AtMost: r.config.within(10 * time.Second)}.Wait(ctx, r.proxy.PID())
}

// reach makes sure that the first and the last of n services answer, through
// the plane.
func (r *rig) reach(ctx context.Context, n int) error {
	for _, i := range []int{0, n - 1} {
		l := load.Load{Kind: load.Firsts, Workers: 1, Count: 3, Time: r.config.within(time.Second)}
		if _, err := r.measure(ctx, l, filler(i)); err != nil {
			return fmt.Errorf("reach service %d of %d: %w", i+1, n, err)
		}
	}
	return nil
}
