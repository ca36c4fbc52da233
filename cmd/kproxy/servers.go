package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/agent"
	"kproxy.dev/kproxy/agent/takeover"
	"kproxy.dev/kproxy/config"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service/lockfile"
	"kproxy.dev/kproxy/userspace"
	"kproxy.dev/kproxy/userspace/handover"
	"kproxy.dev/kproxy/web"
)

// servers are the listeners that show what kproxy does. They are
// opened before anything is programmed: a port in use is found out at once.
type servers struct {
	control, api, health net.Listener
	local                net.Listener // of the API besides, or nil; see loopbackBeside
}

// openServers opens what the configuration asks for; an empty address opens none. What from has at the same address
// it takes over from there; from may be nil.
func openServers(ctx context.Context, cfg config.Config, from *takeover.Predecessor) (s servers, err error) {
	defer func() {
		if err != nil {
			s.close()
		}
	}()
	for _, l := range s.named(cfg) {
		if *l.listener, err = from.Listener(l.name()); err == nil && *l.listener == nil && l.address != "" {
			*l.listener, err = l.open(ctx)
		}
		var named *exitError // the flag, by listenTCP
		switch {
		case l.listener == &s.local: // which isn't what the flag asks for
		case errors.Is(err, web.ErrRunning), errors.As(err, &named):
			return s, err
		case err != nil:
			return s, flagError(l.flag, err)
		}
	}
	return s, nil
}

// named is a listener by the flag that gives its address.
type named struct {
	flag, address string
	listener      *net.Listener
}

// name returns the name by which a successor finds the listener. It contains the address: a successor with another
// address opens a listener of its own.
func (l *named) name() string { return "listener --" + l.flag + " " + l.address }

func (l *named) open(ctx context.Context) (net.Listener, error) {
	if l.flag == "socket" {
		return web.ListenControl(ctx, l.address)
	}
	return listenTCP(ctx, l.flag, l.address)
}

func (s *servers) named(cfg config.Config) []named {
	return []named{
		{"socket", cfg.Socket, &s.control},
		{"metrics-bind-address", cfg.MetricsBindAddress, &s.api},
		{"healthz-bind-address", cfg.HealthzBindAddress, &s.health},
		{"metrics-bind-address", loopbackBeside(cfg.MetricsBindAddress), &s.local}, // last: it may be missing
	}
}

// loopbackBeside returns the loopback address on which the API is served besides its own address, so that a port forward
// to the node's loopback finds it whatever that address is. It returns "" where the API is found there anyway.
func loopbackBeside(address string) string {
	a, err := netip.ParseAddrPort(address)
	if err != nil || a.Addr().IsLoopback() || a.Addr().IsUnspecified() {
		return ""
	}
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), a.Port()).String()
}

// files are the descriptors of all, for a successor; the caller closes them.
func (s *servers) files(cfg config.Config) (out []takeover.File, err error) {
	for _, l := range s.named(cfg) {
		if *l.listener == nil {
			continue
		}
		fd, err := handover.ListenerFile(*l.listener)
		if err != nil {
			return out, err
		}
		out = append(out, takeover.File{Name: l.name(), FD: fd})
	}
	return out, nil
}

// keepControl makes an inherited control socket this process's: its file goes with the listener, and clients are told that it
// is this process that listens (SO_PEERCRED: unix_listen in net/unix/af_unix.c).
func keepControl(l net.Listener) error {
	control := l.(*net.UnixListener)
	control.SetUnlinkOnClose(true)
	raw, err := control.SyscallConn()
	if err == nil {
		ctrl := raw.Control(func(fd uintptr) { err = unix.Listen(int(fd), unix.SOMAXCONN) })
		err = errors.Join(ctrl, err)
	}
	return err
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
	for _, l := range []net.Listener{s.control, s.api, s.local, s.health} {
		if l != nil {
			l.Close()
		}
	}
}

// run answers on every listener until ctx is done. A kproxy that takes over comes to handOver.
func (s *servers) run(ctx context.Context, src source, rec *web.Recorder, reg *prometheus.Registry, metrics *web.Metrics, conns *web.Connections, handOver func(*net.UnixConn)) error {
	var g errgroup.Group
	cfg, log := src.cfg, src.cfg.log
	g.Go(func() error { return rec.Run(ctx) })
	c := web.APIConfig{
		Source: src, Recorder: rec, Gatherer: metrics, Profiling: cfg.profiling, Log: cfg.lines.text,
		Configz: map[string]any{"kproxy.dev": configz{cfg, false}, "kubeproxy.config.k8s.io": configz{cfg, true}},
	}
	g.Go(func() error { return web.Serve(ctx, s.control, web.Control(c, handOver), log) })
	if s.api != nil {
		api := web.API(c)
		for _, l := range []net.Listener{s.api, s.local} {
			if l != nil {
				g.Go(func() error { return conns.Serve(ctx, l, api) })
			}
		}
	}
	if s.health != nil {
		health := web.Health(src, reg)
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

// Summary returns the agent's, and the state of the configuration file.
func (s source) Summary() (plan.Status, plan.ServiceRows) {
	st, rows := s.Agent.Summary()
	st.Sources = append(st.Sources, s.cfg.source()...)
	return st, rows
}

// Health returns what the health endpoints report.
func (s source) Health() web.HealthReport {
	updated, pending := s.LastSync()
	return web.HealthReport{LastUpdated: updated, PendingSince: pending, NodeEligible: s.NodeEligible(), Isolated: s.Isolated(), Drained: s.Drained(), NotReady: s.NotReady()}
}

// lockMargin is how much longer than --drain-timeout a kproxy waits for another one
// to end that it can't take over from.
const lockMargin = 5 * time.Second

// runProxy runs the agent with its servers around it. From a kproxy that runs it takes over; where it can't, it waits for that
// one's end.
func runProxy(ctx context.Context, o agent.Options, cfg *settled) error {
	wait, most := takeoverRetry, takeovers
	if o.Remains != nil { // whose clients wait: it comes before other newcomers
		wait, most = remainsRetry, remainsTries
	}
	lock, from, err := begin(ctx, o)
	for tries := 1; ; tries++ {
		if err == nil && from != nil {
			if err = runWith(ctx, o, cfg, lock, from); !errors.Is(err, takeover.ErrNotTakenOver) {
				return err
			}
		}
		if !errors.Is(err, takeover.ErrNotTakenOver) {
			break
		}
		if tries == most || o.Remains == nil && !vanished(err) {
			o.Log.Warn("can't take over; waiting for the other kproxy to end", "problem", err)
			lock, err = waitForLock(ctx, o)
			break
		}
		o.Log.Warn("the kproxy to take over from gives no answer, or hasn't begun; trying again", "problem", err)
		if !sleep(ctx, wait) {
			return nil
		}
		if o.Remains == nil {
			wait *= 2
		}
		lock, from, err = begin(ctx, o)
	}
	switch {
	case ctx.Err() != nil:
		return nil // stopped while starting
	case errors.Is(err, web.ErrRunning):
		return err
	case err != nil:
		return flagError("socket", err)
	}
	return runWith(ctx, o, cfg, lock, nil)
}

// A kproxy that crashes while it is being taken over from is started again by its supervisor, and is there to take over from once
// it serves, as one is that has only begun.
const (
	takeovers     = 4               // attempts
	takeoverRetry = 2 * time.Second // at first; each pause is twice the last

	// Those of the one that was started again, until a newcomer has let go of the lock that the crashed one had passed on.
	remainsTries = 80
	remainsRetry = 100 * time.Millisecond
)

// vanished reports whether an attempt to take over failed for want of an answer, rather than by what one said. That there is
// none in time may also mean a crash: the keeper has the socket open for a while.
func vanished(err error) bool {
	return isAny(err, io.EOF, io.ErrUnexpectedEOF, unix.ECONNRESET, unix.EPIPE, unix.ECONNREFUSED, unix.ENOENT, os.ErrDeadlineExceeded, context.DeadlineExceeded)
}

// begin takes the lock of the control socket, or gets it from the kproxy to take over from. The error is takeover.ErrNotTakenOver if
// that one keeps it.
func begin(ctx context.Context, o agent.Options) (*os.File, *takeover.Predecessor, error) {
	lock, err := web.LockControl(ctx, o.Config.Socket, 0, nil)
	if !errors.Is(err, web.ErrRunning) {
		return lock, nil, err
	}
	conn, err := web.AskToTakeOver(ctx, o.Config.Socket)
	if err == nil {
		var from *takeover.Predecessor
		if from, err = takeover.Succeed(handover.NewConn(conn)); err == nil {
			if fd, found := from.File(lockName); found {
				return os.NewFile(uintptr(fd), web.LockPath(o.Config.Socket)), from, nil
			}
			from.Close()
			err = errors.New("it didn't pass on the lock of the control socket")
		}
	}
	if !errors.Is(err, takeover.ErrNotTakenOver) {
		err = fmt.Errorf("%w: %w", takeover.ErrNotTakenOver, err)
	}
	return nil, nil, err
}

// lockName is the name by which a successor gets the lock of the control socket.
const lockName = "lock --socket"

// waitForLock takes the lock of the control socket once another kproxy has ended: one that is being replaced, or that is of a release
// that can't be taken over.
func waitForLock(ctx context.Context, o agent.Options) (*os.File, error) {
	patience := o.Config.DrainTimeout + lockMargin
	return web.LockControl(ctx, o.Config.Socket, patience, func(why error) {
		o.Log.Warn("waiting for another kproxy to end", "for", patience, "problem", why)
	})
}

// inPod reports whether the kubelet would start this process again at once, beside the one that has taken over from it.
func inPod() bool { return os.Getenv("KUBERNETES_SERVICE_HOST") != "" }

// runWith runs the agent with its servers, which answer until the very end, draining included, unless another kproxy has
// taken over: that has their listeners.
func runWith(ctx context.Context, o agent.Options, cfg *settled, lock *os.File, from *takeover.Predecessor) error {
	var a *agent.Agent
	defer func() { // last: the next one opens the same ports
		if from.Pending() || a != nil && a.Relieved() {
			_ = lock.Close() // another kproxy has it as well
			return
		}
		_ = lockfile.Release(lock)
	}()
	if from != nil {
		defer from.Close()
	}
	s, err := openServers(ctx, o.Config, from)
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
	o.Observer = web.NewKubeProxyMetrics(reg, func() plan.Figures { return a.Figures() })
	o.HealthPort = func(ctx context.Context, l net.Listener, now func() plan.HealthPort) error {
		return conns.Serve(ctx, l, web.HealthPort(source{a, cfg}, now))
	}
	began := make(chan struct{}) // a predecessor answers before
	o.Predecessor, o.TookOver = from, func() {
		if err := keepControl(s.control); err != nil {
			o.Log.Warn("the control socket is the last kproxy's", "error", err)
		}
		close(began)
	}
	if from == nil {
		close(began)
	}
	a = agent.New(o)
	metrics := web.NewMetrics(reg, web.MetricsConfig{
		Summary: source{a, cfg}.Summary, Figures: a.Figures,
		Services: o.Config.MetricsServices, Endpoints: o.Config.MetricsEndpoints,
	})

	serving, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	rec := recorder(source{a, cfg})
	handOver := func(conn *net.UnixConn) {
		files, err := s.files(o.Config)
		defer func() {
			for _, f := range files {
				_ = unix.Close(f.FD)
			}
		}()
		if err != nil {
			o.Log.Warn("another kproxy can't take over", "error", err)
			_ = conn.Close()
			return
		}
		a.HandOver(handover.NewConn(conn), takeover.Belongings{
			Files: append(slices.Clone(files), takeover.File{Name: lockName, FD: int(lock.Fd())}), History: rec.Save,
			Relieved: func() {
				s.control.(*net.UnixListener).SetUnlinkOnClose(false)
				stop()
			},
		})
	}
	served := make(chan error, 1)
	go func() {
		select {
		case <-began:
			if from != nil {
				rec.Load(from.History)
			}
			served <- s.run(serving, source{a, cfg}, rec, reg, metrics, conns, handOver)
		case <-serving.Done():
			served <- nil
		}
	}()
	stopped := ctx // by a signal
	ctx, change := context.WithCancelCause(ctx)
	var beside sync.WaitGroup
	beside.Go(func() { cfg.follow(ctx, lookEvery, change) })
	beside.Go(func() { notifySystemd(ctx, a.NotReady, o.Log) })
	err = a.Run(ctx)
	change(nil)
	beside.Wait()
	stop()
	if changed, ok := errors.AsType[*errChanged](context.Cause(ctx)); ok {
		err = errors.Join(err, changed)
	}
	err = errors.Join(err, <-served)
	if err == nil && inPod() {
		a.AwaitSuccessor(stopped)
	}
	return err
}
