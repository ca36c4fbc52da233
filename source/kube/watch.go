package kube

import (
	"context"
	"errors"
	"math"
	"net/url"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/clock"
)

// Retries of a watch: client-go's, but for the longest pause, which there is
// 30 to 60 seconds. So long a node must not miss endpoints that changed while
// the API server restarted.
const (
	retryFirst = 800 * time.Millisecond
	retryMax   = 10 * time.Second // up to twice that, with jitter
)

func backoff() *wait.Backoff {
	return &wait.Backoff{
		Duration: retryFirst, Cap: retryMax, Factor: 2, Jitter: 1,
		Steps: int(math.Ceil(float64(retryMax) / float64(retryFirst))),
	}
}

// lister is the part of a typed client that a watch needs; L is the list.
type lister[L runtime.Object] interface {
	List(context.Context, metav1.ListOptions) (L, error)
	Watch(context.Context, metav1.ListOptions) (watch.Interface, error)
}

// listWatch asks api for the objects that a selector leaves, and tells h how
// that goes. A Reflector's own error handler wouldn't do: it isn't told of a
// refused connection, nor of success.
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

// follower fills a table with the objects that selectors leave.
type follower[L runtime.Object, T metav1.Object] struct {
	api       lister[L]
	selectors metav1.ListOptions
	health    *health
	table     *table[T]
	example   T // of what is in the table
}

// run follows until ctx is done.
func (f follower[L, T]) run(ctx context.Context) {
	r := cache.NewReflectorWithOptions(listWatch(f.api, f.selectors, f.health), f.example, f.table, cache.ReflectorOptions{
		Name: "kproxy/" + f.health.kind, TypeDescription: f.health.kind, Backoff: backoff(), Clock: stoppable{done: ctx.Done()},
	})
	r.RunWithContext(ctx)
}

// stoppable is a clock whose pauses end when done is closed. A Reflector that
// backs off from a server that refuses connections heeds nothing else.
type stoppable struct {
	clock.RealClock
	done <-chan struct{}
}

func (s stoppable) After(d time.Duration) <-chan time.Time {
	out := make(chan time.Time, 1)
	go func() {
		t := time.NewTimer(d)
		defer t.Stop()
		select {
		case now := <-t.C:
			out <- now
		case <-s.done:
			out <- time.Now()
		}
	}()
	return out
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
