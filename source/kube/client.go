package kube

import (
	"net"
	"net/http"
	"time"

	corev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	discoveryv1 "k8s.io/client-go/kubernetes/typed/discovery/v1"
	eventsv1 "k8s.io/client-go/kubernetes/typed/events/v1"
	networkingv1 "k8s.io/client-go/kubernetes/typed/networking/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/flowcontrol"
)

// dialTimeout is how long a silent API server keeps a watch from saying that it
// fails; client-go's own is 30 seconds.
const dialTimeout = 10 * time.Second

// client holds the parts of the API that are used, on one connection. Events
// have a rate limit of their own: they are the ones to wait.
type client struct {
	host       string
	core       corev1.CoreV1Interface
	discovery  discoveryv1.DiscoveryV1Interface
	networking networkingv1.NetworkingV1Interface
	events     eventsv1.EventsV1Interface
}

func newClient(cfg Config) (*client, error) {
	rc, err := cfg.rest()
	if err != nil {
		return nil, err
	}
	rc.Dial = (&net.Dialer{Timeout: dialTimeout, KeepAlive: 30 * time.Second}).DialContext
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

func clientsOf(rc *rest.Config, h *http.Client) (c *client, err error) {
	c = &client{host: rc.Host}
	forEvents := rest.CopyConfig(rc)
	if rc.QPS > 0 {
		rc.RateLimiter = flowcontrol.NewTokenBucketRateLimiter(rc.QPS, max(rc.Burst, 1))
	}
	if c.core, err = corev1.NewForConfigAndClient(rc, h); err != nil {
		return nil, err
	}
	if c.discovery, err = discoveryv1.NewForConfigAndClient(rc, h); err != nil {
		return nil, err
	}
	if c.networking, err = networkingv1.NewForConfigAndClient(rc, h); err != nil {
		return nil, err
	}
	c.events, err = eventsv1.NewForConfigAndClient(forEvents, h)
	return c, err
}
