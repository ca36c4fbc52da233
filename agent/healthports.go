package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/userspace/handover"
)

// ServeHealthPort answers on l, until ctx is done, what load balancers ask at a
// health-check node port; now says what is true at the moment.
type ServeHealthPort func(ctx context.Context, l net.Listener, now func() plan.HealthPort) error

// healthPorts keeps the servers at health-check node ports what the plan wants.
// A port that can't be listened on is tried again with every plan, and every
// healthPortRetry. One goroutine (run) opens and closes; the rest is safe for
// concurrent use.
type healthPorts struct {
	serve ServeHealthPort // nil: there are none
	log   *slog.Logger
	event func(h plan.HealthPort, why string) // keeps the event that h can't be served

	wake   chan struct{} // 1 slot
	wanted atomic.Pointer[wantedHealthPorts]
	failed chan netip.AddrPort // a server that ended by itself

	mu        sync.Mutex                       // status and a successor read while run writes
	open      map[netip.AddrPort]*healthServer // which run alone changes
	inherited map[netip.AddrPort]net.Listener  // of a predecessor, until the first plan; run's own
	problems  map[[2]string][]string
}

// wantedHealthPorts is never modified.
type wantedHealthPorts struct {
	ports []plan.HealthPort
	// addresses are those of the node to listen on, by family; nil means all there are.
	addresses [2][]netip.Addr
}

// healthServer answers at one address.
type healthServer struct {
	now    atomic.Pointer[plan.HealthPort]
	listen net.Listener
	stop   context.CancelFunc
	ended  chan struct{}
}

const healthPortRetry = 5 * time.Second

func newHealthPorts(serve ServeHealthPort, log *slog.Logger, event func(plan.HealthPort, string)) *healthPorts {
	return &healthPorts{
		serve: serve, log: log, event: event, wake: make(chan struct{}, 1), failed: make(chan netip.AddrPort),
		open: map[netip.AddrPort]*healthServer{}, problems: map[[2]string][]string{},
	}
}

// follow has the servers follow p, to which d leads from the plan before. addresses
// are those to listen on, by family, nil for all.
func (h *healthPorts) follow(p *plan.Plan, d plan.Delta, addresses [2][]netip.Addr) {
	if h == nil || h.serve == nil {
		return
	}
	was := h.wanted.Load()
	w := &wantedHealthPorts{addresses: addresses}
	if was != nil && d.SameHealthPorts() {
		w.ports = was.ports
	} else {
		w.ports = plan.HealthPorts(p)
	}
	h.wanted.Store(w)
	if len(w.ports) == 0 && (was == nil || len(was.ports) == 0) {
		return
	}
	select {
	case h.wake <- struct{}{}:
	default:
	}
}

// problemsOf says what is wrong with the health-check node port of a Service.
func (h *healthPorts) problemsOf(namespace, name string) []string {
	if h == nil {
		return nil
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.problems[[2]string{namespace, name}]
}

func (h *healthPorts) run(ctx context.Context) error {
	retry := time.NewTimer(time.Hour)
	defer retry.Stop()
	defer func() {
		for at := range h.open {
			h.close(at)
		}
	}()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-h.wake:
		case <-retry.C:
		case at := <-h.failed:
			h.close(at)
		}
		if h.bring(ctx) {
			retry.Stop()
		} else {
			retry.Reset(healthPortRetry)
		}
	}
}

// bring opens and closes servers, and reports whether everything is served.
func (h *healthPorts) bring(ctx context.Context) bool {
	w := h.wanted.Load()
	if w == nil {
		return true
	}
	want := map[netip.AddrPort]*plan.HealthPort{}
	for i := range w.ports {
		if p := &w.ports[i]; p.Problem == "" {
			for _, a := range listenAddresses(w.addresses, p.Family) {
				want[netip.AddrPortFrom(a, p.Port)] = p
			}
		}
	}
	for at := range h.open {
		if want[at] == nil {
			h.close(at)
		}
	}
	errs := map[*plan.HealthPort][]error{}
	for at, p := range want {
		if s := h.open[at]; s != nil {
			s.now.Store(p)
		} else if err := h.start(ctx, at, p); err != nil {
			errs[p] = append(errs[p], err)
		}
	}
	for at, l := range h.inherited {
		l.Close() // this one's plan hasn't it
		delete(h.inherited, at)
	}
	return h.report(w.ports, errs) && len(errs) == 0
}

// files are the listeners, for a successor, with descriptors that the caller closes.
func (h *healthPorts) files() (out []handover.File, fds []int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for at, s := range h.open {
		if fd, err := ListenerFile(s.listen); err == nil { // else it is being closed
			fds = append(fds, fd)
			out = append(out, handover.File{Name: healthListener + at.String(), File: uint32(len(fds))})
		}
	}
	return out, fds
}

// healthListener and an address are the name by which a successor gets a listener.
const healthListener = "listener health-check node port "

// listenAddresses returns the addresses of family f, or the wildcard address where all are meant.
func listenAddresses(addresses [2][]netip.Addr, f service.Family) []netip.Addr {
	if addresses[f] == nil {
		return []netip.Addr{[2]netip.Addr{service.IPv4: netip.IPv4Unspecified(), service.IPv6: netip.IPv6Unspecified()}[f]}
	}
	return addresses[f]
}

func (h *healthPorts) start(ctx context.Context, at netip.AddrPort, p *plan.HealthPort) error {
	network := [2]string{service.IPv4: "tcp4", service.IPv6: "tcp6"}[p.Family]
	l, err := h.inherited[at], error(nil)
	if delete(h.inherited, at); l == nil {
		var lc net.ListenConfig
		l, err = lc.Listen(ctx, network, at.String())
	}
	switch {
	case errors.Is(err, unix.EADDRINUSE):
		return fmt.Errorf("%s is taken by another program of this node (ss -ltnp shows which)", at)
	case err != nil:
		return err
	}
	serving, stop := context.WithCancel(ctx)
	s := &healthServer{listen: l, stop: stop, ended: make(chan struct{})}
	s.now.Store(p)
	h.mu.Lock()
	h.open[at] = s
	h.mu.Unlock()
	go func() {
		err := h.serve(serving, l, func() plan.HealthPort { return *s.now.Load() })
		close(s.ended)
		if serving.Err() == nil {
			h.log.Warn("a health check node port is served no longer", "address", at, "error", err)
			select {
			case h.failed <- at:
			case <-serving.Done():
			}
		}
	}()
	h.log.Info("answering load balancers", "service", p.Namespace+"/"+p.Name, "address", at)
	return nil
}

// close ends a server; its address is free afterwards.
func (h *healthPorts) close(at netip.AddrPort) {
	s := h.open[at]
	if s == nil {
		return
	}
	h.mu.Lock()
	delete(h.open, at)
	h.mu.Unlock()
	s.stop()
	_ = s.listen.Close() // the server may have closed it already
	<-s.ended
}

// report keeps what is wrong for the status, and says what has changed to the log
// and in events. It reports whether nothing is.
func (h *healthPorts) report(ports []plan.HealthPort, errs map[*plan.HealthPort][]error) bool {
	problems := map[[2]string][]string{}
	for i := range ports {
		p := &ports[i]
		why := p.Problem
		if e := errs[p]; why == "" && len(e) > 0 {
			slices.SortFunc(e, func(a, b error) int { return cmp.Compare(a.Error(), b.Error()) })
			why = fmt.Sprintf("its health check node port %d can't be listened on: %v", p.Port, errors.Join(e...))
		}
		key := [2]string{p.Namespace, p.Name}
		if why == "" || slices.Contains(problems[key], why) {
			continue
		}
		problems[key] = append(problems[key], why)
		if !slices.Contains(h.problemsOf(p.Namespace, p.Name), why) {
			h.log.Error("a health check node port isn't served", "service", p.Namespace+"/"+p.Name, "problem", why)
			h.event(*p, why)
		}
	}
	h.mu.Lock()
	h.problems = problems
	h.mu.Unlock()
	return len(problems) == 0
}

// healthPortFailed keeps the event that load balancers get no answer, where its
// Service's users look: kube-proxy's reason and action.
func (a *Agent) healthPortFailed(h plan.HealthPort, why string) {
	if a.record != nil {
		a.record.Event(h.Namespace, h.Name, true, "FailedToStartServiceHealthcheck", "Listen", "node "+a.node+": "+why)
	}
}

// healthAddresses returns the addresses of this node at which health-check node ports
// answer, the same as node ports do; nil in a family for all there are.
func healthAddresses(p *plan.Policy) (out [2][]netip.Addr) {
	for _, f := range service.Families {
		if within, limited := p.NodePortsWithin(f); limited {
			out[f] = append([]netip.Addr{}, p.NodePortAddresses(f)...)
			// Loopback isn't among the node's addresses, which are those others know.
			for _, lo := range []netip.Addr{netip.MustParseAddr("127.0.0.1"), netip.IPv6Loopback()} {
				if slices.ContainsFunc(within, func(n netip.Prefix) bool { return n.Contains(lo) }) {
					out[f] = append(out[f], lo)
				}
			}
		}
	}
	return out
}
