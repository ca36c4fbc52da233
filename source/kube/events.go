package kube

import (
	"context"
	"log/slog"
	"strings"
	"sync/atomic"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/scheme"
	typedeventsv1 "k8s.io/client-go/kubernetes/typed/events/v1"
	"k8s.io/client-go/tools/events"
	"k8s.io/client-go/util/flowcontrol"
)

// reporter is who the events say they are from.
const reporter = "kproxy"

// maxNote is the longest note that the API takes (events.k8s.io/v1, Event.note).
const maxNote = 1024

// recorder writes events into the API. client-go's broadcaster queues them,
// drops them when the queue is full, joins those that repeat themselves within
// minutes into one with a count, and retries what a server that is away didn't
// take. What it doesn't do is bound how many there are: that is limits' job.
// Safe for concurrent use.
type recorder struct {
	api    typedeventsv1.EventsV1Interface
	node   string
	uid    func(name) types.UID
	log    *slog.Logger
	limits limits
	to     atomic.Pointer[events.EventRecorderLogger] // nil while not open
}

func newRecorder(api typedeventsv1.EventsV1Interface, node string, uid func(name) types.UID, log *slog.Logger) *recorder {
	return &recorder{api: api, node: node, uid: uid, log: log, limits: newLimits()}
}

// open begins to write events, until close is called.
func (r *recorder) open(ctx context.Context) (close func()) {
	b := events.NewBroadcaster(&sink{EventSinkImpl: events.EventSinkImpl{Interface: r.api}, log: r.log})
	if err := b.StartRecordingToSinkWithContext(ctx); err != nil {
		r.log.Warn("events can't be written", "error", err)
	}
	to := b.NewRecorder(scheme.Scheme, reporter)
	r.to.Store(&to)
	return func() {
		r.to.Store(nil)
		b.Shutdown()
	}
}

// event says of a Service, of no name of this node, that something happened. It doesn't wait. What is too
// much is left out.
func (r *recorder) event(svc name, warning bool, reason, action, note string) {
	if !r.limits.allow(warning) {
		r.log.Debug("left out an event", "service", svc, "reason", reason, "note", note)
		return
	}
	var regarding *corev1.ObjectReference
	if svc.Name != "" {
		regarding = &corev1.ObjectReference{APIVersion: "v1", Kind: "Service", Namespace: svc.Namespace, Name: svc.Name, UID: r.uid(svc)}
	}
	r.write(regarding, warning, reason, action, note)
}

// starting says of this node what kube-proxy says of it.
func (r *recorder) starting() { r.write(nil, false, "Starting", "StartKproxy", "") }

// write writes an event about something on this node, nil for the node itself.
func (r *recorder) write(regarding *corev1.ObjectReference, warning bool, reason, action, note string) {
	to := r.to.Load()
	if to == nil {
		return
	}
	// Events about a Node have its name for a UID: kubelet and kube-proxy do so,
	// and `kubectl describe node` selects both.
	node := &corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: r.node, UID: types.UID(r.node)}
	kind := corev1.EventTypeNormal
	if warning {
		kind = corev1.EventTypeWarning
	}
	if len(note) > maxNote {
		note = strings.ToValidUTF8(note[:maxNote-3], "") + "..." // not in the middle of a rune
	}
	if regarding == nil {
		(*to).Eventf(node, nil, kind, reason, action, "%s", note)
		return
	}
	(*to).Eventf(regarding, node, kind, reason, action, "%s", note)
}

// noPlace reports whether an event couldn't be written because of where it belongs
// alone: its namespace is being deleted, or it or the event to count is gone. That
// says nothing of other events.
func noPlace(err error) bool {
	return apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) || apierrors.IsNotFound(err)
}

// sink says once when events can't be written, and once when they can again.
type sink struct {
	events.EventSinkImpl
	log    *slog.Logger
	failed atomic.Bool
}

// Create writes an event.
func (s *sink) Create(ctx context.Context, e *eventsv1.Event) (*eventsv1.Event, error) {
	out, err := s.EventSinkImpl.Create(ctx, e)
	return out, s.saw(ctx, err)
}

// Patch counts one more of an event that is there.
func (s *sink) Patch(ctx context.Context, e *eventsv1.Event, data []byte) (*eventsv1.Event, error) {
	out, err := s.EventSinkImpl.Patch(ctx, e, data)
	return out, s.saw(ctx, err)
}

func (s *sink) saw(ctx context.Context, err error) error {
	switch {
	case ctx.Err() != nil || noPlace(err):
	case err == nil && s.failed.Swap(false):
		s.log.Info("events are written again")
	case err != nil && !s.failed.Swap(true):
		s.log.Warn("events can't be written", "error", plain(err))
	}
	return err
}

// How many events one node may write. Every node of a cluster writes events
// about the same Services, and after a start thousands of Services are offloaded
// at the same time: what one node writes is to be bearable for an API server
// that hears a thousand of them. The log has everything.
const (
	eventsBurst  = 50
	eventsPerMin = 6
)

// limits says whether an event may be written. Warnings have a budget of their
// own: they are rare. Safe for concurrent use.
type limits struct {
	normal, warnings flowcontrol.PassiveRateLimiter
}

func newLimits() limits {
	budget := func() flowcontrol.PassiveRateLimiter {
		return flowcontrol.NewTokenBucketPassiveRateLimiter(eventsPerMin/60.0, eventsBurst)
	}
	return limits{budget(), budget()}
}

func (m *limits) allow(warning bool) bool {
	if warning {
		return m.warnings.TryAccept()
	}
	return m.normal.TryAccept()
}
