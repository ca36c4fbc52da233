package agent

import (
	"context"
	"time"

	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/source"
)

// objects is where Services come from: manifests on disk (source/file) or the
// Kubernetes API (source/kube). Everything but Run may be called at any time.
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

// triggered is a source that knows what its changes come from.
type triggered interface {
	// Triggers returns, once and by family, when something happened in the cluster
	// that is in Latest.
	Triggers() [2][]time.Time
}

// recorder keeps events about Services where their users look for them: in the
// Kubernetes API. It doesn't wait, and gives up on what can't be written.
type recorder interface {
	// Event says of the Service named namespace/name that something happened.
	// reason is a word in camel case ("DataPlaneChanged"), action what kproxy did
	// or tried ("Offload"), note one sentence.
	Event(namespace, name string, warning bool, reason, action, note string)
}
