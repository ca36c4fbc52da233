package agent

import (
	"context"
	"time"

	"kproxy.dev/kproxy/source/file"
	"kproxy.dev/kproxy/source/kube"
)

// openSource reads how to reach what services come from. It talks to nobody.
func (a *Agent) openSource() error {
	if !a.cfg.Kubernetes() {
		a.source = file.New(file.Config{Paths: a.cfg.Manifests, Node: a.node, NodeAddresses: a.cfg.NodeAddresses(), Logger: a.log})
		return nil
	}
	k, err := kube.Open(kube.Config{
		Kubeconfig: a.cfg.Kubeconfig, Master: a.cfg.Master, Node: a.node, NodeAddresses: a.cfg.NodeAddresses(),
		QPS: float32(a.cfg.Client.QPS), Burst: a.cfg.Client.Burst, ContentType: a.cfg.Client.ContentType,
		UserAgent: "kproxy/" + a.version, Logger: a.log,
	})
	if err != nil {
		return err
	}
	kube.LogTo(a.log)
	a.source, a.record, a.eligible = k, k, k.NodeEligible
	return nil
}

// NodeEligible reports whether load balancers may send this node new
// connections. Manifests don't say; then they may.
func (a *Agent) NodeEligible() bool {
	return !a.isSetUp.Load() || a.eligible == nil || a.eligible()
}

// waitForSource waits until every place that services come from has been read
// once. A path that can't be read yet, or an API server that is away, must not look like
// one whose services were deleted: until then the kernel keeps what it holds.
func (a *Agent) waitForSource(ctx context.Context) error {
	look := time.NewTicker(100 * time.Millisecond)
	defer look.Stop()
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
		case <-look.C:
		}
	}
}

// unread are the places that have never been read, and whether that is because
// they can't be.
func (a *Agent) unread() (places []string, failing bool) {
	for _, s := range a.source.Status() {
		if !s.Synced {
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
		case <-a.reread:
			a.log.Info("reading the services again")
			a.source.Reread()
		}
	}
}
