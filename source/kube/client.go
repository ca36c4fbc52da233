package kube

import (
	"cmp"
	"context"
	"log/slog"
	"net"
	"net/http"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	discoveryv1 "k8s.io/client-go/kubernetes/typed/discovery/v1"
	eventsv1 "k8s.io/client-go/kubernetes/typed/events/v1"
	networkingv1 "k8s.io/client-go/kubernetes/typed/networking/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/flowcontrol"
	"k8s.io/klog/v2"
)

// dialTimeout is how long a silent API server keeps a watch from saying that it
// fails; client-go's own is 30 seconds.
const dialTimeout = 10 * time.Second

// client holds the parts of the API that are used, on one connection. Events
// have a rate limit of their own: they are the ones to wait.
type client struct {
	host      string
	authority string // see authorityOf
	core      corev1.CoreV1Interface
	discovery discoveryv1.DiscoveryV1Interface
	network   networkingv1.NetworkingV1Interface
	events    eventsv1.EventsV1Interface
}

func newClient(cfg Config) (*client, error) {
	rc, err := cfg.rest()
	if err != nil {
		return nil, err
	}
	if rc.Dial == nil { // cfg.Access may have one
		rc.Dial = (&net.Dialer{Timeout: dialTimeout, KeepAlive: 30 * time.Second}).DialContext
	}
	h, err := rest.HTTPClientFor(rc)
	if err != nil {
		return nil, configError("use what %s says: %s", cfg.place(), oneLine(err))
	}
	c, err := clientsOf(rc, h)
	if err != nil {
		return nil, configError("use what %s says: %s", cfg.place(), oneLine(err))
	}
	return c, nil
}

// place names where a user has configured the API.
func (c Config) place() string {
	switch {
	case c.Kubeconfig != "":
		return "--kubeconfig " + c.Kubeconfig
	case c.Master != "":
		return "--master " + c.Master
	}
	return "the service account of this pod"
}

func clientsOf(rc *rest.Config, h *http.Client) (*client, error) {
	c := &client{host: rc.Host, authority: authorityOf(rc)}
	forEvents := rest.CopyConfig(rc)
	if rc.QPS > 0 {
		rc.RateLimiter = flowcontrol.NewTokenBucketRateLimiter(rc.QPS, max(rc.Burst, 1))
	}
	var errs [4]error
	c.core, errs[0] = corev1.NewForConfigAndClient(rc, h)
	c.discovery, errs[1] = discoveryv1.NewForConfigAndClient(rc, h)
	c.network, errs[2] = networkingv1.NewForConfigAndClient(rc, h)
	c.events, errs[3] = eventsv1.NewForConfigAndClient(forEvents, h)
	return c, cmp.Or(errs[:]...)
}

// LogTo has client-go write its log, which otherwise goes to stderr in a format
// of its own, to log at level debug: kproxy says itself what matters of it. The
// setting is the whole process's; it is to be made before anything runs.
func LogTo(log *slog.Logger) { klog.SetSlogLogger(slog.New(quiet{log.Handler()})) }

// withLogger does the same for what runs with ctx.
func withLogger(ctx context.Context, log *slog.Logger) context.Context {
	return klog.NewContext(ctx, logr.FromSlogHandler(quiet{log.Handler()}))
}

// quiet is a handler that logs everything at level debug, and drops what is even
// finer: from klog's level 6 on client-go writes every request, and from
// 8 on what is in it, secrets too. Level n of klog is slog's -n (logr).
type quiet struct{ slog.Handler }

func (q quiet) Enabled(ctx context.Context, l slog.Level) bool {
	return l >= slog.LevelDebug && q.Handler.Enabled(ctx, slog.LevelDebug)
}

func (q quiet) Handle(ctx context.Context, r slog.Record) error {
	r.Level = slog.LevelDebug
	return q.Handler.Handle(ctx, r)
}

func (q quiet) WithAttrs(a []slog.Attr) slog.Handler { return quiet{q.Handler.WithAttrs(a)} }
func (q quiet) WithGroup(g string) slog.Handler      { return quiet{q.Handler.WithGroup(g)} }
