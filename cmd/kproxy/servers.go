package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/agent"
	"kproxy.dev/kproxy/config"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/userspace"
	"kproxy.dev/kproxy/web"
)

// servers are the listeners that show what kproxy does. They are
// opened before anything is programmed: a port in use is found out at once.
type servers struct {
	control, api, health net.Listener
}

// openServers opens what the configuration asks for; an empty address opens none.
func openServers(ctx context.Context, cfg config.Config) (s servers, err error) {
	defer func() {
		if err != nil {
			s.close()
		}
	}()
	if s.control, err = web.ListenControl(ctx, cfg.Socket); errors.Is(err, web.ErrRunning) {
		return s, err
	} else if err != nil {
		return s, flagError("socket", err)
	}
	if s.api, err = listenTCP(ctx, "metrics-bind-address", cfg.MetricsBindAddress); err != nil {
		return s, err
	}
	s.health, err = listenTCP(ctx, "healthz-bind-address", cfg.HealthzBindAddress)
	return s, err
}

func listenTCP(ctx context.Context, flag, address string) (net.Listener, error) {
	if address == "" {
		return nil, nil
	}
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", address)
	switch {
	case errors.Is(err, unix.EADDRINUSE):
		return nil, &exitError{exitHost, fmt.Errorf("--%s: %s is in use by another program; stop it (ss -ltnp shows which), or choose another address", flag, address)}
	case errors.Is(err, unix.EADDRNOTAVAIL):
		return nil, usageError("--%s: %s isn't an address of this host", flag, address)
	case err != nil:
		return nil, flagError(flag, err)
	}
	return l, nil
}

func (s *servers) close() {
	for _, l := range []net.Listener{s.control, s.api, s.health} {
		if l != nil {
			l.Close()
		}
	}
}

// run answers on every listener until ctx is done.
func (s *servers) run(ctx context.Context, src source, reg *prometheus.Registry, conns *web.Connections) error {
	var g errgroup.Group
	cfg, log := src.cfg, src.cfg.log
	rec := recorder(src)
	g.Go(func() error { return rec.Run(ctx) })
	g.Go(func() error { return web.Serve(ctx, s.control, web.Control(src, rec), log) })
	if s.api != nil {
		api := web.API(web.APIConfig{
			Source: src, Recorder: rec, Gatherer: reg, Profiling: cfg.profiling,
			Configz: map[string]any{"kproxy.dev": configz{cfg, false}, "kubeproxy.config.k8s.io": configz{cfg, true}},
		})
		g.Go(func() error { return conns.Serve(ctx, s.api, api) })
	}
	if s.health != nil {
		health := web.Health(web.HealthConfig{Source: src, Registerer: reg})
		g.Go(func() error { return conns.Serve(ctx, s.health, health) })
	}
	return g.Wait()
}

// recorder keeps what the dashboard and kproxy events show of src.
func recorder(src source) *web.Recorder {
	c := web.DefaultRecorderConfig(src)
	c.Subscribe, c.Node, c.Traffic = src.SubscribeDeep, src.NodeFigures, src.Traffic
	return web.NewRecorder(c)
}

// source is the agent as the web package sees it.
type source struct {
	*agent.Agent
	cfg *settled
}

// Status returns the agent's, and the state of the configuration file.
func (s source) Status() plan.Status {
	st := s.Agent.Status()
	st.Sources = append(st.Sources, s.cfg.source()...)
	return st
}

// Health returns what the health endpoints report.
func (s source) Health() web.HealthReport {
	updated, pending := s.LastSync()
	return web.HealthReport{LastUpdated: updated, PendingSince: pending, NodeEligible: s.NodeEligible(), NotReady: s.NotReady()}
}

// lockMargin is how much longer than --drain-timeout a kproxy waits for another one
// to end: kubelet starts the next pod before it tells the last one to stop.
const lockMargin = 5 * time.Second

// runProxy runs the agent with its servers around it: they answer
// until the very end, draining included.
func runProxy(ctx context.Context, o agent.Options, cfg *settled) error {
	patience := o.Config.DrainTimeout + lockMargin
	lock, err := web.LockControl(ctx, o.Config.Socket, patience, func(why error) {
		o.Log.Warn("waiting for another kproxy to end, as one does that is being replaced", "for", patience, "problem", why)
	})
	switch {
	case ctx.Err() != nil:
		return nil // stopped while starting
	case errors.Is(err, web.ErrRunning):
		return err
	case err != nil:
		return flagError("socket", err)
	}
	defer lock.Close() // last: the next one opens the same ports
	s, err := openServers(ctx, o.Config)
	if ctx.Err() != nil {
		s.close()
		return nil
	} else if err != nil {
		return err
	}
	defer s.close()
	share, err := userspace.Reserve()
	if err != nil {
		return err
	}
	conns := web.NewConnections(share.HTTP, o.Log)
	reg := prometheus.NewRegistry()
	reg.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	var a *agent.Agent
	o.Observer = web.NewKubeProxyMetrics(reg, func() plan.Figures { return a.Figures() })
	o.HealthPort = func(ctx context.Context, l net.Listener, now func() plan.HealthPort) error {
		return conns.Serve(ctx, l, web.HealthPort(source{a, cfg}, now))
	}
	a = agent.New(o)
	web.NewMetrics(reg, web.MetricsConfig{
		Source: source{a, cfg}, Figures: a.Figures,
		Services: o.Config.MetricsServices, Endpoints: o.Config.MetricsEndpoints,
	})

	serving, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	served := make(chan error, 1)
	go func() { served <- s.run(serving, source{a, cfg}, reg, conns) }()
	ctx, change := context.WithCancelCause(ctx)
	followed := make(chan struct{})
	go func() {
		defer close(followed)
		cfg.follow(ctx, lookEvery, change)
	}()
	err = a.Run(ctx)
	change(nil)
	<-followed
	stop()
	var changed *errChanged
	if errors.As(context.Cause(ctx), &changed) {
		err = errors.Join(err, changed)
	}
	return errors.Join(err, <-served)
}
