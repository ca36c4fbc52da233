package kube

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net/url"
	"strings"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
)

// lister is the part of a typed client that a watch needs; L is the list.
type lister[L runtime.Object] interface {
	List(context.Context, metav1.ListOptions) (L, error)
	Watch(context.Context, metav1.ListOptions) (watch.Interface, error)
}

// listWatch asks api for the objects that a selector leaves, and reports the
// outcome to h. A Reflector's own error handler isn't called for a refused
// connection, nor for success.
func listWatch[L runtime.Object](api lister[L], selectors metav1.ListOptions, h *health) cache.ListerWatcher {
	narrow := func(o metav1.ListOptions) metav1.ListOptions {
		o.LabelSelector, o.FieldSelector = selectors.LabelSelector, selectors.FieldSelector
		return o
	}
	return &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			list, err := api.List(ctx, narrow(o))
			h.note(ctx, listing, err)
			return list, err
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			w, err := api.Watch(ctx, narrow(o))
			if o.SendInitialEvents != nil && apierrors.IsInvalid(err) {
				return w, err // a server before Kubernetes 1.32; it is asked for a list next
			}
			h.note(ctx, watching, err)
			return w, err
		},
	}
}

// fill fills t with the objects of api that selectors leave, and follows them until ctx is done. A Reflector's own loop would wait
// up to a minute before it lists what it missed while an API server was restarted: its
// pauses don't end when the server is back, and they go on growing when a
// watch that has lasted for days can't be resumed.
func fill[L runtime.Object, T object](ctx context.Context, t *table[T], api lister[L], selectors metav1.ListOptions, h *health, again *retries) {
	r := cache.NewReflectorWithOptions(listWatch(api, selectors, h), t.fresh(), t, cache.ReflectorOptions{
		Name: "kproxy/" + h.kind, TypeDescription: h.kind,
		Backoff: backoff(), Clock: impatient{retries: again, done: ctx.Done()},
	})
	wait := backoff()
	for ctx.Err() == nil {
		start := time.Now()
		if err := r.ListAndWatchWithContext(ctx); err != nil {
			klog.FromContext(ctx).Info("list failed", "kind", h.kind, "error", err)
		}
		if time.Since(start) > steady {
			wait = backoff()
		}
		pause := wait.Step()
		if h.lacking() {
			pause = lackingPause
		}
		<-again.pause(pause, ctx.Done())
	}
}

// plain returns err on one line, without the URL of the request: the place is
// named where the error is shown.
func plain(err error) string {
	var u *url.Error
	if errors.As(err, &u) {
		err = u.Err
	}
	return strings.Join(strings.Fields(err.Error()), " ")
}

// How long a watch that fails waits before the next try.
const (
	retryFirst = 200 * time.Millisecond
	retryMax   = 10 * time.Second // up to twice that, with jitter; client-go's is 30 seconds
	// lackingPause is the same where the API has nothing of the kind, or not for this client.
	lackingPause = 10 * time.Minute
	// steady is how long a watch has to last for the next pause to be a
	// short one.
	steady = 2 * retryMax
)

func backoff() *wait.Backoff {
	return &wait.Backoff{
		Duration: retryFirst, Cap: retryMax, Factor: 2, Jitter: 1,
		Steps: int(math.Ceil(float64(retryMax) / float64(retryFirst))),
	}
}

// retries cuts short the pauses of all watches of one API server: when one of
// them works again, none has a reason to wait any longer. The zero value is
// ready to use, and safe for concurrent use.
type retries struct {
	mu    sync.Mutex
	again chan struct{} // closed by the next hurry; nil while no watch waits
}

// hurry ends every pause.
func (r *retries) hurry() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.again != nil {
		close(r.again)
		r.again = nil
	}
}

// pause returns a channel that receives after d, at the next hurry,
// or when done is closed.
func (r *retries) pause(d time.Duration, done <-chan struct{}) <-chan time.Time {
	r.mu.Lock()
	if r.again == nil {
		r.again = make(chan struct{})
	}
	again := r.again
	r.mu.Unlock()
	out := make(chan time.Time, 1)
	go func() {
		t := time.NewTimer(d)
		defer t.Stop()
		select {
		case <-t.C:
		case <-again:
		case <-done:
		}
		out <- time.Now()
	}()
	return out
}

// impatient is the clock of a Reflector. With it, the pauses that a Reflector
// makes while a server refuses connections, which otherwise nothing can cut
// short, are those of retries.
type impatient struct {
	clock.RealClock
	retries *retries
	done    <-chan struct{}
}

// After is time.After, unless the pause is cut short.
func (c impatient) After(d time.Duration) <-chan time.Time { return c.retries.pause(d, c.done) }

// health tells how one watch is doing. Safe for concurrent use.
type health struct {
	kind      string // "Services"
	log       *slog.Logger
	recovered func() // called when it works, at first and after it didn't
	failed    func() // called when it doesn't
	// lacks is called once, where what is followed may be missing: with the error that says that the API has nothing of
	// the kind, or not for this client. That is no failure then. It may be nil.
	lacks func(error)

	mu     sync.Mutex
	lack   bool
	worked bool
	during string // "list" or "watch", what fails; empty while it works
	since  time.Time
	err    error
}

// The requests of a watch.
const (
	listing  = "list"
	watching = "watch"
)

// note records the outcome of a request. A failed watch counts as working again with
// the next watch that works, not with the list before it.
func (h *health) note(ctx context.Context, request string, err error) {
	if ctx.Err() != nil || apierrors.IsResourceExpired(err) || apierrors.IsGone(err) {
		return // the end, or a request to list everything again: neither is a failure
	}
	switch {
	case h.lacks != nil && (apierrors.IsNotFound(err) || apierrors.IsForbidden(err)):
		h.mu.Lock()
		was := h.lack
		h.lack, h.during = true, ""
		h.mu.Unlock()
		if !was {
			h.lacks(err)
		}
	case err != nil:
		h.fails(request, err)
	default:
		h.works(request)
	}
}

// lacking reports whether the API said last that it has nothing of the kind, or not for this client.
func (h *health) lacking() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.lack
}

func (h *health) fails(request string, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.during == "" {
		h.since = time.Now()
		h.log.Warn("watch failed; what it said last stays in force", "kind", h.kind, "error", plain(err))
	}
	h.during, h.err = request, err
	h.failed()
}

func (h *health) works(request string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.during == watching && request == listing {
		return
	}
	was := h.during
	if was != "" {
		h.log.Info("watch works again", "kind", h.kind, "after", time.Since(h.since).Round(time.Millisecond))
	}
	if was != "" || !h.worked {
		h.recovered()
	}
	h.worked, h.lack, h.during, h.err = true, false, "", nil
}

// problem returns a line about what fails, empty while nothing does.
func (h *health) problem() string {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.during == "" {
		return ""
	}
	return fmt.Sprintf("%s: %s fails since %s: %s", h.kind, h.during, h.since.UTC().Format(time.RFC3339), plain(h.err))
}
