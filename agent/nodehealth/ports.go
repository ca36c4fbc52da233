// Package nodehealth answers load balancers at the health-check node ports of Services: whether this node has endpoints of theirs.
// One goroutine (Run) opens and closes; the rest of [Ports] is safe for concurrent use.
package nodehealth

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/service/wake"
	"kproxy.dev/kproxy/userspace/handover"
)

// Serve answers on l, until ctx is done, what load balancers ask at a
// health-check node port; now says what is true at the moment.
type Serve func(ctx context.Context, l net.Listener, now func() plan.HealthPort) error

// Ports keeps the servers at health-check node ports what the plan wants.
// A port that can't be listened on is tried again with every plan, and every
// retryEvery.
type Ports struct {
	serve Serve
	log   *slog.Logger
	event func(h plan.HealthPort, why string)

	wake   chan struct{} // 1 slot
	wanted atomic.Pointer[wantedPorts]
	failed chan netip.AddrPort // a server that ended by itself

	mu        sync.Mutex                      // status and a successor read while run writes
	open      map[netip.AddrPort]*server      // which run alone changes
	inherited map[netip.AddrPort]net.Listener // of a predecessor, until the first plan; run's own
	problems  map[[2]string][]string
}

// wantedPorts is never modified.
type wantedPorts struct {
	ports     []plan.HealthPort
	addresses [2][]netip.Addr // to listen on, by family
}

// server answers at one address.
type server struct {
	now    atomic.Pointer[plan.HealthPort]
	listen net.Listener
	stop   context.CancelFunc
	ended  chan struct{}
}

const retryEvery = 5 * time.Second

// New returns Ports that serve nothing before Run. event keeps the event that a port can't be
// served, and why.
func New(serve Serve, log *slog.Logger, event func(plan.HealthPort, string)) *Ports {
	return &Ports{
		serve: serve, log: log, event: event, wake: make(chan struct{}, 1), failed: make(chan netip.AddrPort),
		open: map[netip.AddrPort]*server{}, problems: map[[2]string][]string{},
	}
}

// Follow has the servers follow p, to which d leads from the plan before.
func (h *Ports) Follow(p *plan.Plan, d plan.Delta) {
	was := h.wanted.Load()
	w := &wantedPorts{addresses: addressesOf(&p.Policy)}
	if was != nil && d.SameHealthPorts() {
		w.ports = was.ports
	} else {
		w.ports = plan.HealthPorts(p)
	}
	h.wanted.Store(w)
	if len(w.ports) == 0 && (was == nil || len(was.ports) == 0) {
		return
	}
	wake.Up(h.wake)
}

// ProblemsOf says what is wrong with the health-check node port of a Service.
func (h *Ports) ProblemsOf(namespace, name string) []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.problems[[2]string{namespace, name}]
}

// Run serves until ctx is done.
func (h *Ports) Run(ctx context.Context) error {
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
			retry.Reset(retryEvery)
		}
	}
}

// bring opens and closes servers, and reports whether everything is served.
func (h *Ports) bring(ctx context.Context) bool {
	w := h.wanted.Load()
	if w == nil {
		return true
	}
	want := map[netip.AddrPort]*plan.HealthPort{}
	for i := range w.ports {
		if p := &w.ports[i]; p.Problem == "" {
			for _, a := range w.addresses[p.Family] {
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

// Files returns the listeners, for a successor, with descriptors that the caller closes.
func (h *Ports) Files() (out []handover.File, fds []int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for at, s := range h.open {
		if fd, err := handover.ListenerFile(s.listen); err == nil { // else it is being closed
			fds = append(fds, fd)
			out = append(out, handover.File{Name: listenerName + at.String(), File: uint32(len(fds))})
		}
	}
	return out, fds
}

// listenerName and an address are the name by which a successor gets a listener.
const listenerName = "listener health-check node port "

// Inherit takes a predecessor's listeners.
func (h *Ports) Inherit(names []handover.File, files []int) {
	h.inherited = map[netip.AddrPort]net.Listener{}
	for _, f := range names {
		at, err := netip.ParseAddrPort(strings.TrimPrefix(f.Name, listenerName))
		if i := int(f.File) - 1; err == nil && i >= 0 && i < len(files) && files[i] >= 0 {
			if l, err := handover.FileListener(files[i], f.Name); err == nil {
				h.inherited[at] = l
			}
			files[i] = -1
		}
	}
	handover.CloseFiles(files)
}

func (h *Ports) start(ctx context.Context, at netip.AddrPort, p *plan.HealthPort) error {
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
	s := &server{listen: l, stop: stop, ended: make(chan struct{})}
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
func (h *Ports) close(at netip.AddrPort) {
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
func (h *Ports) report(ports []plan.HealthPort, errs map[*plan.HealthPort][]error) bool {
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
		if !slices.Contains(h.ProblemsOf(p.Namespace, p.Name), why) {
			h.log.Error("a health check node port isn't served", "service", p.Namespace+"/"+p.Name, "problem", why)
			h.event(*p, why)
		}
	}
	h.mu.Lock()
	h.problems = problems
	h.mu.Unlock()
	return len(problems) == 0
}

// addressesOf returns the addresses of this node at which health-check node ports
// answer, the same as node ports do; in a family the wildcard address for all there are.
func addressesOf(p *plan.Policy) [2][]netip.Addr {
	out := [2][]netip.Addr{service.IPv4: {netip.IPv4Unspecified()}, service.IPv6: {netip.IPv6Unspecified()}}
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
