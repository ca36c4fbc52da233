package load

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/web"
)

// Rig is a lab in which loads run: a server in each backend and, where one was
// started, a proxy on the node.
type Rig struct {
	Net     *lab.Network
	Dir     string       // for files; Up makes it, Down removes it
	Command []string     // program and arguments that run [Main] with further ones
	Proxy   *lab.Process // nil for none
	KProxy  *web.Client  // of the proxy, if that is kproxy
	Slow    int          // times as much time for everything; 0 is 1

	servers []*lab.Process
	session int // of the UDP sessions' ports
}

// environment of client and server: no signal interrupts a thread that computes,
// and with it a system call (runtime, "asyncpreemptoff").
var environment = []string{"GODEBUG=asyncpreemptoff=1"}

func (r *Rig) process(ns *lab.Namespace, args ...string) *lab.Process {
	return &lab.Process{Namespace: ns, Path: r.Command[0], Args: append(slices.Clone(r.Command[1:]), args...), Env: environment}
}

// Within stretches how long something may take on a slow machine.
func (r *Rig) Within(d time.Duration) time.Duration { return d * time.Duration(max(r.Slow, 1)) }

// Up builds the network and starts the servers. After an error Down removes what
// is there.
func (r *Rig) Up(ctx context.Context) error {
	if err := errors.Join(os.RemoveAll(r.Dir), os.MkdirAll(r.Dir, 0o755)); err != nil {
		return err
	}
	if err := r.Net.Up(ctx); err != nil {
		return err
	}
	for _, b := range r.Net.Backends {
		if err := r.Serve(ctx, b); err != nil {
			return err
		}
	}
	return nil
}

// Serve starts the server in a backend.
func (r *Rig) Serve(ctx context.Context, b *lab.Backend) error {
	p := r.process(b.Namespace, "serve")
	r.servers = append(r.servers, p)
	if err := p.Start(); err != nil {
		return err
	}
	return r.AwaitReady(ctx, p)
}

// AwaitReady waits until a process has printed that it is ready.
func (r *Rig) AwaitReady(ctx context.Context, p *lab.Process) error {
	ctx, cancel := context.WithTimeout(ctx, r.Within(20*time.Second))
	defer cancel()
	return p.WaitReady(ctx, func() error {
		if strings.Contains(p.Log(), Ready) {
			return nil
		}
		return errors.New("it isn't ready yet")
	})
}

// Down takes everything down but the proxy, also when it is half up.
func (r *Rig) Down() error {
	return errors.Join(r.StopServers(), r.Net.Down(), os.RemoveAll(r.Dir))
}

// StopServers ends the servers.
func (r *Rig) StopServers() error {
	var errs []error
	for _, p := range r.servers {
		errs = append(errs, p.Kill())
	}
	return errors.Join(errs...)
}

// Load runs a load from the client. Its targets and kind must be set; proxies are
// the processes that carry it.
func (r *Rig) Load(ctx context.Context, l Load, proxies ...int) (out Outcome, err error) {
	l.Server, l.Proxies = r.Net.Backends[0].Addresses[0], proxies
	for _, p := range r.servers {
		l.Servers = append(l.Servers, p.PID())
	}
	if l.Kind == Session {
		for i := range r.Net.Config.Clients {
			l.Sources = append(l.Sources, r.Net.Config.ClientAddresses(i)[0])
		}
		l.FirstPort = r.session
		r.session += l.Count
	}
	arg, err := json.Marshal(l)
	if err != nil {
		return out, fmt.Errorf("encode load: %w", err)
	}
	p := r.process(r.Net.Client, "load", string(arg))
	if err := p.Start(); err != nil {
		return out, err
	}
	// Longer than every wait on a socket, whose error says more.
	ctx, cancel := context.WithTimeout(ctx, l.Time+r.Within(20*time.Second))
	defer cancel()
	if err := p.Wait(ctx); err != nil {
		return out, errors.Join(fmt.Errorf("run load: %w: %s", err, strings.TrimSpace(p.Log())), p.Kill())
	}
	if err := json.Unmarshal([]byte(p.Log()), &out); err != nil {
		return out, fmt.Errorf("read outcome: %w", err)
	}
	return out, nil
}

// Hold opens n connections from the client and calls f while they are idle.
func (r *Rig) Hold(ctx context.Context, target netip.AddrPort, n int, f func() error) error {
	p := r.process(r.Net.Client, "hold", target.String(), fmt.Sprint(n))
	if err := p.Start(); err != nil {
		return err
	}
	err := r.AwaitReady(ctx, p)
	if err == nil {
		err = f()
	}
	if stopped := p.Stop(20 * time.Second); stopped != nil {
		err = errors.Join(err, fmt.Errorf("%w: %s", stopped, strings.TrimSpace(p.Log())))
	}
	return err
}
