package kube

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"

	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/service/wake"
	"kproxy.dev/kproxy/source"
)

// A change is converted at once. Then the next one waits settleShare times what
// that took, at most settleTime: single changes don't wait for anything that
// could be noticed, and what comes in a burst is converted together, at a
// bounded part of one CPU.
const (
	settleShare = 4
	settleTime  = 100 * time.Millisecond
)

// Source follows the Kubernetes API. All methods are safe for concurrent use;
// Run is to be called once.
type Source struct {
	cfg    Config
	log    *slog.Logger
	client *client
	state  *state
	events *recorder

	services, slices, nodes *health
	cidrs                   *health // not one of those without which nothing is served

	changed chan struct{}
	failed  chan struct{} // a watch has begun to fail
	unsaved chan struct{} // there is something to save

	answerBound time.Duration

	retries retries
	current atomic.Pointer[service.Snapshot]

	heard       atomic.Bool               // current is what the API says, or said last
	savedAt     atomic.Pointer[time.Time] // before that: as of when current was saved; nil if it wasn't
	saveProblem atomic.Pointer[string]    // with the file of saved state
}

// Open reads the configuration. It connects in Run.
func Open(cfg Config) (*Source, error) {
	cfg.Logger = cmp.Or(cfg.Logger, slog.New(slog.DiscardHandler))
	c, err := newClient(cfg)
	if err != nil {
		return nil, err
	}
	s := &Source{
		cfg: cfg, log: cfg.Logger, client: c, state: newState(cfg),
		changed: make(chan struct{}, 1), failed: make(chan struct{}, 1), unsaved: make(chan struct{}, 1),
		answerBound: answerBound,
	}
	s.events = newRecorder(c.events, cfg.Node, s.state.uid, cfg.Logger)
	s.services, s.slices, s.nodes = s.newHealth("Services"), s.newHealth("EndpointSlices"), s.newHealth("Node")
	s.cidrs = &health{kind: "ServiceCIDRs", log: s.log, recovered: s.retries.hurry, failed: s.state.heardOfCIDRs, lacks: s.lacksCIDRs}
	return s, nil
}

// lacksCIDRs says once that the API has no ServiceCIDRs, or none for this client. A cluster before Kubernetes 1.33 has none,
// and nothing is amiss there.
func (s *Source) lacksCIDRs(err error) {
	s.state.heardOfCIDRs()
	if apierrors.IsNotFound(err) {
		s.log.Info("this API server has no ServiceCIDRs (Kubernetes 1.33): --service-cidr says what the networks of cluster IPs are", "server", s.client.host)
		return
	}
	s.log.Warn("kproxy may not list ServiceCIDRs, so that it doesn't drop what is to cluster IPs that no Service has; its ClusterRole needs list and watch of servicecidrs in networking.k8s.io, or --service-cidr names the networks", "error", plain(err))
}

func (s *Source) newHealth(kind string) *health {
	return &health{kind: kind, log: s.log, recovered: s.retries.hurry, failed: func() { wake.Up(s.failed) }}
}

// Snapshots receives a value after every change of Latest. Changes that come
// before the last one was received are one.
func (s *Source) Snapshots() <-chan struct{} { return s.changed }

// Latest returns what the API says. Before it has been heard once that is what was saved of
// it, if it is away and there is something, else nil.
func (s *Source) Latest() *service.Snapshot { return s.current.Load() }

// Triggers returns, once and by family, when pods changed whose changes are in
// Latest, as far as the controller of EndpointSlices says.
func (s *Source) Triggers() [2][]time.Time { return s.state.triggers.drain() }

// Reread does nothing: the watches need no reminding.
func (s *Source) Reread() {}

// Status says whether the API has been heard, and what is wrong with it now.
func (s *Source) Status() []source.Status {
	st := source.Status{Name: s.client.host, Synced: s.heard.Load()}
	if at := s.savedAt.Load(); at != nil && !st.Synced && s.Latest() != nil {
		st.Saved = *at
		st.Errors = append(st.Errors, "the API hasn't been heard since the start; served is its state as saved at "+at.Format(time.RFC3339))
	}
	for _, h := range s.failing() {
		if p := h.problem(); p != "" {
			st.Errors = append(st.Errors, p)
		}
	}
	if p := s.saveProblem.Load(); p != nil {
		st.Errors = append(st.Errors, *p)
	}
	if n, known := s.state.ownNode(); known && n == nil {
		st.Errors = append(st.Errors, fmt.Sprintf("Node: there is none named %s; --hostname-override says which one this is", s.cfg.Node))
	}
	return []source.Status{st}
}

// failing are the watches that fail now.
func (s *Source) failing() []*health {
	return slices.DeleteFunc([]*health{s.services, s.slices, s.nodes}, func(h *health) bool { return h.problem() == "" })
}

// NodeEligible reports whether load balancers may send this node new
// connections.
func (s *Source) NodeEligible() bool { return eligible(s.state.ownNode()) }

// Event writes an event about a Service, or about this node where both names are empty. See recorder.event.
func (s *Source) Event(namespace, service string, warning bool, reason, action, note string) {
	s.events.event(name{Namespace: namespace, Name: service}, warning, reason, action, note)
}

// Run follows the API until ctx is done. Nothing that happens to the API ends
// it; it returns nil.
func (s *Source) Run(ctx context.Context) error {
	ctx = withLogger(ctx, s.log)
	defer s.events.open(ctx)()
	s.follow(ctx)
	return nil
}

// Read returns what the API says now, as a Source does that follows it, and writes
// nothing. The error says what is wrong if ctx ends before.
func Read(ctx context.Context, cfg Config) (*service.Snapshot, error) {
	s, err := Open(cfg)
	if err != nil {
		return nil, err
	}
	LogTo(s.log)
	ctx, cancel := context.WithCancel(withLogger(ctx, s.log))
	var g sync.WaitGroup
	g.Go(func() { s.follow(ctx) })
	defer g.Wait()
	defer cancel()
	select {
	case <-ctx.Done():
		why := cmp.Or(strings.Join(s.Status()[0].Errors, "\n"), "no answer: "+ctx.Err().Error())
		return nil, fmt.Errorf("read Services of %s: %s", s.client.host, why)
	case <-s.Snapshots():
		return s.Latest(), nil
	}
}

func (s *Source) follow(ctx context.Context) {
	var g sync.WaitGroup
	// The selectors are kube-proxy's: what it doesn't serve, it doesn't ask for.
	g.Go(func() {
		fill(ctx, s.state.services, s.client.core.Services(metav1.NamespaceAll), metav1.ListOptions{
			LabelSelector: "!" + source.ProxyNameLabel,
			FieldSelector: fields.OneTermNotEqualSelector("spec.clusterIP", corev1.ClusterIPNone).String(),
		}, s.services, &s.retries)
	})
	g.Go(func() {
		served := metav1.ListOptions{LabelSelector: "!" + corev1.IsHeadlessService}
		fill(ctx, s.state.slices, s.client.discovery.EndpointSlices(metav1.NamespaceAll), served, s.slices, &s.retries)
	})
	g.Go(func() {
		own := metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector(metav1.ObjectNameField, s.cfg.Node).String()}
		fill(ctx, s.state.nodes, s.client.core.Nodes(), own, s.nodes, &s.retries)
	})
	g.Go(func() {
		fill(ctx, s.state.cidrs, s.client.network.ServiceCIDRs(), metav1.ListOptions{}, s.cidrs, &s.retries)
	})
	g.Go(func() { s.restoreIfAway(ctx) })
	g.Go(func() { s.keepSaved(ctx) })
	s.convert(ctx)
	g.Wait()
}

// convert makes Snapshots of changes until ctx is done.
func (s *Source) convert(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.state.kick:
		}
		synced := s.state.synced()
		if !synced && !s.state.takeRestored() {
			continue
		}
		began := time.Now()
		s.publish(synced)
		select {
		case <-ctx.Done():
			return
		case <-time.After(min(settleShare*time.Since(began), settleTime)):
		}
	}
}

// publish makes the next Snapshot current, if it says anything new. Synced says that
// it is what the API says, and not a saved state.
func (s *Source) publish(synced bool) {
	last := s.current.Load()
	next, triggers := s.state.next(last)
	changed := last == nil || last.Hash() != next.Hash()
	if changed {
		s.current.Store(next)
	}
	first := synced && !s.heard.Swap(true)
	if first {
		s.log.Info("heard the Kubernetes API", "server", s.client.host, "service ports", next.Len())
		s.events.starting()
		s.saveProblem.Store(nil)
	}
	if changed || first {
		wake.Up(s.unsaved)
	}
	s.state.triggers.converted(triggers)
	// A slice may come before it has endpoints. What led to it has taken effect with
	// the next pass, as with kube-proxy.
	if changed || len(triggers[service.IPv4])+len(triggers[service.IPv6]) > 0 {
		wake.Up(s.changed)
	}
}
