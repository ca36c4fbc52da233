package agent

import (
	"context"
	"path/filepath"
	"time"

	"kproxy.dev/kproxy/agent/node"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/source"
	"kproxy.dev/kproxy/source/file"
	"kproxy.dev/kproxy/source/kube"
)

// openSource reads how to reach what services come from. It connects to nothing.
func (a *Agent) openSource() error {
	if !a.cfg.Kubernetes() {
		a.source = file.New(file.Config{Paths: a.cfg.Manifests, Node: a.node, NodeAddresses: a.cfg.NodeAddresses(), Logger: a.log})
		return nil
	}
	c := node.KubeConfig(&a.cfg, a.node, "kproxy/"+a.options.Version, a.log)
	c.StateMaxAge, c.WriteFile = a.cfg.StateMaxAge, node.ReplaceFile
	if c.StateMaxAge > 0 {
		c.StateFile = filepath.Join(a.cfg.StateDir, node.APIStateFile)
	}
	k, err := kube.Open(c)
	if err != nil {
		return err
	}
	kube.LogTo(a.log)
	a.source, a.record, a.eligible, a.triggers = k, k, k.NodeEligible, k.Triggers
	return nil
}

// Isolated reports whether most other nodes are silent to this one, where --healthz-isolated asks for it.
func (a *Agent) Isolated() bool {
	if !a.cfg.HealthzIsolated || !a.isSetUp.Load() {
		return false
	}
	v := a.passive.view()
	return v != nil && v.Isolated != nil
}

// NodeEligible reports whether load balancers may send this node new
// connections. Manifests don't say; then they may.
func (a *Agent) NodeEligible() bool {
	return !a.isSetUp.Load() || a.eligible == nil || a.eligible()
}

// waitForSource waits until every place that services come from has been read
// once, or what was saved of it. A path that can't be read yet, or an API server that is away,
// must not look like one whose services were deleted: until then the kernel keeps what it holds.
func (a *Agent) waitForSource(ctx context.Context) error {
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for said := false; ; {
		waiting, failing := a.unread()
		if a.source.Latest() != nil && len(waiting) == 0 {
			return nil
		}
		if !said && (a.source.Latest() != nil || failing) {
			a.log.Warn("waiting for services; what is programmed stays as it is", "from", waiting)
			said = true
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-a.source.Snapshots():
		case <-tick.C:
		}
	}
}

// unread are the places that have never been read, and whether that is because
// they can't be.
func (a *Agent) unread() (places []string, failing bool) {
	for _, s := range a.source.Status() {
		if !s.Synced && s.Saved.IsZero() {
			places, failing = append(places, s.Name), failing || len(s.Errors) > 0
		}
	}
	return places, failing
}

// rereadOnSignal has the source read again on SIGHUP.
func (a *Agent) rereadOnSignal(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-a.options.Reread:
			a.log.Info("reading the services again")
			a.source.Reread()
		}
	}
}

// objects reads Services from where they come from: manifests on disk (source/file)
// or the Kubernetes API (source/kube). Everything but Run may be called at any time.
type objects interface {
	// Run follows the source until ctx is done. Nothing that happens to the source
	// ends it.
	Run(ctx context.Context) error
	// Snapshots receives a value after every change of Latest; changes coalesce.
	Snapshots() <-chan struct{}
	// Latest is the last good state, nil before there was one.
	Latest() *service.Snapshot
	// Status says of each place whether it was read and what is wrong with it.
	Status() []source.Status
	// Reread has the source read again, whether or not it seems changed.
	Reread()
}

// recorder keeps events about Services where their users look for them: in the
// Kubernetes API. It doesn't wait, and gives up on what can't be written.
type recorder interface {
	// Event says of the Service named namespace/name that something happened, or of this node where both are empty.
	// reason is a word in camel case ("DataPlaneChanged"), action what kproxy did
	// or tried ("Offload"), note one sentence.
	Event(namespace, name string, warning bool, reason, action, note string)
}
