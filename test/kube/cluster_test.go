package kube

import (
	"context"
	"errors"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	appsv1 "k8s.io/client-go/kubernetes/typed/apps/v1"
	corev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	discoveryv1 "k8s.io/client-go/kubernetes/typed/discovery/v1"
	eventsv1 "k8s.io/client-go/kubernetes/typed/events/v1"
	networkingv1 "k8s.io/client-go/kubernetes/typed/networking/v1"
	"k8s.io/client-go/rest"
	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/test/apiserver"
)

// cluster is a Kubernetes control plane in a namespace: etcd, kube-apiserver and
// kube-controller-manager.
type cluster struct {
	*apiserver.Server
	address     netip.Addr // of the API server, and what else answers in the namespace
	controllers *lab.Process
	client      clients
}

// clients are the administrator's, for what the tests need of the API: all of
// client-go takes long to compile.
type clients struct {
	core      corev1.CoreV1Interface
	discovery discoveryv1.DiscoveryV1Interface
	apps      appsv1.AppsV1Interface
	events    eventsv1.EventsV1Interface
	network   networkingv1.NetworkingV1Interface
}

func newClients(cfg *rest.Config, h *http.Client) (c clients, err error) {
	var errs [5]error
	c.core, errs[0] = corev1.NewForConfigAndClient(cfg, h)
	c.discovery, errs[1] = discoveryv1.NewForConfigAndClient(cfg, h)
	c.apps, errs[2] = appsv1.NewForConfigAndClient(cfg, h)
	c.events, errs[3] = eventsv1.NewForConfigAndClient(cfg, h)
	c.network, errs[4] = networkingv1.NewForConfigAndClient(cfg, h)
	return c, errors.Join(errs[:]...)
}

// controllers are those of kube-controller-manager that the tests are about, and
// those without which objects stay incomplete or never go. There are no kubelet
// and no scheduler: the tests play them.
const controllers = "endpointslice-controller,deployment-controller,replicaset-controller," +
	"serviceaccount-controller,namespace-controller,garbage-collector-controller"

func newCluster(programs, dir string, namespace *lab.Namespace, address netip.Addr) *cluster {
	c := &cluster{Server: apiserver.New(programs, dir, namespace, address, serviceNetworks, "--allow-privileged"), address: address}
	c.controllers = c.Program("kube-controller-manager",
		"--kubeconfig", c.File("admin.kubeconfig"), "--controllers", controllers, "--leader-elect=false",
		"--service-account-private-key-file", c.File("accounts.key"), "--kube-api-qps", "200", "--kube-api-burst", "400",
		"--cert-dir", c.File("certificates"), "-v", "0")
	c.Etcd.Output, c.API.Output, c.controllers.Output = keep("etcd"), keep("kube-apiserver"), keep("kube-controller-manager")
	return c
}

// serviceNetworks hold the cluster IPs of package lab's conventions.
const serviceNetworks = "10.96.0.0/12,fd00:96::/112"

// start starts all, and returns when Services and Pods can be made.
func (c *cluster) start(ctx context.Context) error {
	if err := c.Start(ctx); err != nil {
		return err
	}
	if _, err := c.Kubeconfig("admin.kubeconfig", apiserver.AdminToken); err != nil {
		return err
	}
	if err := c.controllers.Start(); err != nil {
		return err
	}
	cfg := c.Config()
	cfg.Timeout = time.Minute
	h, err := rest.HTTPClientFor(cfg)
	if err == nil {
		c.client, err = newClients(cfg, h)
	}
	return err
}

// kubectl runs kubectl as the administrator.
func (c *cluster) kubectl(ctx context.Context, args ...string) (string, error) {
	cmd := c.Namespace.Command(ctx, filepath.Join(programs, "kubectl"), append([]string{"--kubeconfig", c.File("admin.kubeconfig")}, args...)...)
	cmd.Env = append(os.Environ(), "HOME="+c.File(".")) // for what it caches
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// stop ends all; nothing that they hold is needed any more.
func (c *cluster) stop() error {
	return errors.Join(c.controllers.Kill(), c.API.Kill(), c.Etcd.Kill())
}
