package programming

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	coreclient "k8s.io/client-go/kubernetes/typed/core/v1"
	discoveryclient "k8s.io/client-go/kubernetes/typed/discovery/v1"
	clientcache "k8s.io/client-go/tools/cache"
	watchtools "k8s.io/client-go/tools/watch"

	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/test/apiserver"
)

// cluster is the API server in a namespace. There are no controllers: Services and
// EndpointSlices are written as they are to be.
type cluster struct {
	*apiserver.Server
	kubeconfig string
	core       coreclient.CoreV1Interface
	discovery  discoveryclient.DiscoveryV1Interface

	world
	stopWatch context.CancelFunc
	mu        sync.Mutex // the watch writes, cases read
	written   map[string]string
	seen      map[string]event
}

// event says when a version of an object was reported.
type event struct {
	version string
	at      time.Time
}

// newCluster describes one whose state is below dir; programs holds etcd and
// kube-apiserver.
func newCluster(programs, dir string, at *lab.Backend, w world) *cluster {
	return &cluster{
		Server: apiserver.New(programs, dir, at.Namespace, at.Addresses[0], lab.ServiceCIDR4.String(),
			"--max-requests-inflight", "0", "--max-mutating-requests-inflight", "0", "--enable-priority-and-fairness=false"),
		world: w, written: map[string]string{}, seen: map[string]event{}, stopWatch: func() {},
	}
}

func (c *cluster) data() string { return c.File("etcd") }

// start starts it and returns when objects can be written.
func (c *cluster) start(ctx context.Context) (err error) {
	if err = c.Start(ctx); err == nil {
		c.kubeconfig, err = c.Kubeconfig("kubeconfig", apiserver.AdminToken)
	}
	if err == nil {
		c.core, err = coreclient.NewForConfigAndClient(c.Config(), c.HTTP)
	}
	if err == nil {
		c.discovery, err = discoveryclient.NewForConfigAndClient(c.Config(), c.HTTP)
	}
	return err
}

// stop ends both: etcd so that its data is whole.
func (c *cluster) stop() error {
	c.stopWatch()
	err := c.API.Kill()
	var exit *exec.ExitError
	// etcd dies of the signal when it has handled it.
	if stopped := c.Etcd.Stop(30 * time.Second); !errors.As(stopped, &exit) || c.Etcd.Running() {
		err = errors.Join(err, stopped)
	}
	return err
}

// writers is how many requests the API server gets at a time.
const writers = 16

// loadData copies kept data of etcd with all objects into the cluster's folder, and
// reports whether there was any.
func (c *cluster) loadData(ctx context.Context, kept string) (bool, error) {
	if _, err := os.Stat(kept); err != nil {
		return false, nil
	}
	now := time.Now()
	return true, errors.Join(os.Chtimes(kept, now, now), copyTree(ctx, kept, c.data()))
}

// keepData stops etcd for a moment and keeps its data.
func (c *cluster) keepData(ctx context.Context, kept string) error {
	if err := c.stop(); err != nil {
		return err
	}
	partly, err := os.MkdirTemp(filepath.Dir(kept), "new.")
	if err != nil {
		return fmt.Errorf("keep data: %w", err)
	}
	defer os.RemoveAll(partly)
	if err := copyTree(ctx, c.data(), filepath.Join(partly, "etcd")); err != nil {
		return err
	}
	// Another process may have been first; it has written the same.
	if err := os.Rename(filepath.Join(partly, "etcd"), kept); err != nil && !errors.Is(err, os.ErrExist) {
		return fmt.Errorf("keep data: %w", err)
	}
	return c.start(ctx)
}

func copyTree(ctx context.Context, from, to string) error {
	if out, err := exec.CommandContext(ctx, "cp", "-a", from, to).CombinedOutput(); err != nil {
		return fmt.Errorf("copy %s: %w: %s", from, err, out)
	}
	return nil
}

// populate writes every object.
func (c *cluster) populate(ctx context.Context, nodeAddresses []netip.Addr, backend netip.Addr) error {
	if err := c.awaitNamespace(ctx); err != nil {
		return err
	}
	n := node(nodeAddresses)
	made, err := c.core.Nodes().Create(ctx, n, metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("create node: %w", err)
	}
	made.Status = n.Status
	if _, err := c.core.Nodes().UpdateStatus(ctx, made, metav1.UpdateOptions{}); err != nil {
		return fmt.Errorf("update node: %w", err)
	}
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(writers)
	for i := range c.services {
		g.Go(func() error {
			return c.create(ctx, c.service(i), c.slice(i, 0))
		})
	}
	g.Go(func() error {
		s, slice := loaded(backend)
		return c.create(ctx, s, slice)
	})
	return g.Wait()
}

// create writes a service and its endpoints.
func (c *cluster) create(ctx context.Context, s *corev1.Service, slice *discoveryv1.EndpointSlice) error {
	_, err := c.core.Services(namespace).Create(ctx, s, metav1.CreateOptions{})
	if err == nil {
		_, err = c.discovery.EndpointSlices(namespace).Create(ctx, slice, metav1.CreateOptions{})
	}
	if err != nil {
		return fmt.Errorf("create %s: %w", s.Name, err)
	}
	return nil
}

// add writes a service that isn't world's, of so many endpoints; remove takes it away.
func (c *cluster) add(ctx context.Context, i, endpoints int) error {
	slice := c.slice(i, 0)
	slice.Endpoints = slice.Endpoints[:endpoints]
	return c.create(ctx, c.service(i), slice)
}

func (c *cluster) remove(ctx context.Context, i int) error {
	return errors.Join(
		c.core.Services(namespace).Delete(ctx, serviceName(i), metav1.DeleteOptions{}),
		c.discovery.EndpointSlices(namespace).Delete(ctx, serviceName(i), metav1.DeleteOptions{}),
	)
}

// awaitNamespace waits until the API server has made what a new cluster has.
func (c *cluster) awaitNamespace(ctx context.Context) error {
	for {
		_, err := c.core.Namespaces().Get(ctx, namespace, metav1.GetOptions{})
		if err == nil || !apierrors.IsNotFound(err) {
			return err
		}
		if err := lab.Sleep(ctx, 50*time.Millisecond); err != nil {
			return err
		}
	}
}

// watch notes when a watcher, other than the proxies, learns of a change. An API server
// ends a watch after half an hour to an hour; this one goes on.
func (c *cluster) watch(ctx context.Context) error {
	ctx, c.stopWatch = context.WithCancel(ctx)
	list, err := c.discovery.EndpointSlices(namespace).List(ctx, metav1.ListOptions{Limit: 1})
	if err != nil {
		return fmt.Errorf("list slices: %w", err)
	}
	changes, err := watchtools.NewRetryWatcherWithContext(ctx, list.ResourceVersion, &clientcache.ListWatch{
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			return c.discovery.EndpointSlices(namespace).Watch(ctx, o)
		},
	})
	if err != nil {
		return fmt.Errorf("watch slices: %w", err)
	}
	go func() {
		for e := range changes.ResultChan() {
			if slice, ok := e.Object.(*discoveryv1.EndpointSlice); ok {
				c.mu.Lock()
				c.seen[slice.Name] = event{slice.ResourceVersion, time.Now()}
				c.mu.Unlock()
			}
		}
	}()
	return nil
}

// move gives a movable service its endpoint at a side, whatever its version.
func (c *cluster) move(ctx context.Context, i, side int) error {
	now, err := c.discovery.EndpointSlices(namespace).Update(ctx, c.slice(i, side), metav1.UpdateOptions{})
	if err != nil {
		return fmt.Errorf("move %s: %w", serviceName(i), err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.written[now.Name] = now.ResourceVersion
	return nil
}

// reported returns when the watcher learned of the last move of a service, and false
// if it hasn't yet.
func (c *cluster) reported(i int) (time.Time, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	name := serviceName(i)
	e := c.seen[name]
	return e.at, e.version == c.written[name]
}
