package kube

import (
	"context"
	"errors"
	"net/url"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
)

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
type follower[L runtime.Object, T object] struct {
	api       lister[L]
	selectors metav1.ListOptions
	health    *health
	table     *table[T]
	example   T // of what is in the table
	retries   *retries
}

// run follows until ctx is done. A Reflector's own loop would wait up to a
// minute before it lists what it missed while an API server was restarted: its
// pauses don't end when the server is back, and they go on growing when a
// watch that has lasted for days can't be resumed.
func (f follower[L, T]) run(ctx context.Context) {
	r := cache.NewReflectorWithOptions(listWatch(f.api, f.selectors, f.health), f.example, f.table, cache.ReflectorOptions{
		Name: "kproxy/" + f.health.kind, TypeDescription: f.health.kind,
		Backoff: backoff(), Clock: impatient{retries: f.retries, done: ctx.Done()},
	})
	wait := backoff()
	for ctx.Err() == nil {
		start := time.Now()
		if err := r.ListAndWatchWithContext(ctx); err != nil {
			klog.FromContext(ctx).Info("list failed", "kind", f.health.kind, "error", err)
		}
		if time.Since(start) > steady {
			wait = backoff()
		}
		<-f.retries.pause(wait.Step(), ctx.Done())
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
