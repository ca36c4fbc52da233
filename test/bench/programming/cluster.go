package programming

import (
	"context"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	coreclient "k8s.io/client-go/kubernetes/typed/core/v1"
	discoveryclient "k8s.io/client-go/kubernetes/typed/discovery/v1"
	"k8s.io/client-go/rest"
	clientcache "k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	watchtools "k8s.io/client-go/tools/watch"

	"kproxy.dev/kproxy/lab"
)

// adminToken is every client's; the API server is reached from within the lab only.
const adminToken = "administrator"

// cluster is etcd and kube-apiserver in a namespace. There are no controllers:
// Services and EndpointSlices are written as they are to be.
type cluster struct {
	namespace *lab.Namespace
	address   netip.Addr
	dir       string // in memory, where the machine has such a folder
	etcd, api *lab.Process

	http      *http.Client
	core      coreclient.CoreV1Interface
	discovery discoveryclient.DiscoveryV1Interface

	world
	stopWatch context.CancelFunc
	mu        sync.Mutex // the watch writes, cases read
	written   map[string]string
	seen      map[string]event
}

// event is when a version of an object was reported.
type event struct {
	version string
	at      time.Time
}

// newCluster describes one whose state is below dir; programs holds etcd and
// kube-apiserver.
func newCluster(programs, dir string, at *lab.Backend, w world) *cluster {
	c := &cluster{namespace: at.Namespace, address: at.Addresses[0], dir: dir, world: w, written: map[string]string{}, seen: map[string]event{}, stopWatch: func() {}}
	program := func(name string, args ...string) *lab.Process {
		return &lab.Process{Namespace: c.namespace, Path: filepath.Join(programs, name), Args: args}
	}
	c.etcd = program("etcd",
		"--data-dir", c.data(), "--unsafe-no-fsync", "--log-level", "warn", "--quota-backend-bytes", "8589934592",
		"--listen-client-urls", "http://127.0.0.1:2379", "--advertise-client-urls", "http://127.0.0.1:2379",
		"--listen-peer-urls", "http://127.0.0.1:2380", "--initial-advertise-peer-urls", "http://127.0.0.1:2380",
		"--initial-cluster", "default=http://127.0.0.1:2380")
	c.api = program("kube-apiserver",
		"--etcd-servers", "http://127.0.0.1:2379", "--bind-address", c.address.String(), "--secure-port", "6443",
		"--cert-dir", c.file("certificates"), "--token-auth-file", c.file("tokens.csv"), "--authorization-mode", "RBAC",
		"--service-cluster-ip-range", lab.ServiceCIDR4.String(), "--service-account-issuer", "https://kubernetes.default.svc",
		"--service-account-key-file", c.file("accounts.key"), "--service-account-signing-key-file", c.file("accounts.key"),
		"--max-requests-inflight", "0", "--max-mutating-requests-inflight", "0", "--enable-priority-and-fairness=false")
	return c
}

func (c *cluster) file(name string) string { return filepath.Join(c.dir, name) }
func (c *cluster) data() string            { return c.file("etcd") }
func (c *cluster) kubeconfig() string      { return c.file("kubeconfig") }

// start starts both and returns when objects can be written.
func (c *cluster) start(ctx context.Context) error {
	if err := c.writeFiles(); err != nil {
		return err
	}
	if err := c.etcd.Start(); err != nil {
		return err
	}
	if err := c.etcd.WaitReady(ctx, func() error { return c.listens(ctx, "127.0.0.1:2379") }); err != nil {
		return err
	}
	if err := c.api.Start(); err != nil {
		return err
	}
	if err := c.api.WaitReady(ctx, func() error { return c.listens(ctx, c.host()) }); err != nil {
		return err
	}
	if err := c.connect(); err != nil {
		return err
	}
	return c.api.WaitReady(ctx, func() error { return c.ready(ctx) })
}

func (c *cluster) host() string { return netip.AddrPortFrom(c.address, 6443).String() }

func (c *cluster) writeFiles() error {
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		return fmt.Errorf("make key of service accounts: %w", err)
	}
	text := pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(key)})
	cfg := clientcmdapi.NewConfig()
	cfg.Clusters["lab"] = &clientcmdapi.Cluster{Server: "https://" + c.host(), CertificateAuthority: c.authority()}
	cfg.AuthInfos["user"] = &clientcmdapi.AuthInfo{Token: adminToken}
	cfg.Contexts["lab"] = &clientcmdapi.Context{Cluster: "lab", AuthInfo: "user"}
	cfg.CurrentContext = "lab"
	return errors.Join(
		os.WriteFile(c.file("accounts.key"), text, 0o600),
		os.WriteFile(c.file("tokens.csv"), []byte(adminToken+",admin,admin,system:masters\n"), 0o600),
		clientcmd.WriteToFile(*cfg, c.kubeconfig()),
	)
}

// authority is the certificate that the API server makes for itself.
func (c *cluster) authority() string { return c.file("certificates/apiserver.crt") }

func (c *cluster) listens(ctx context.Context, address string) error {
	conn, err := c.namespace.Dial(ctx, "tcp", address)
	if err != nil {
		return err
	}
	return conn.Close()
}

func (c *cluster) connect() error {
	cfg := &rest.Config{
		Host: "https://" + c.host(), BearerToken: adminToken, QPS: -1,
		TLSClientConfig: rest.TLSClientConfig{CAFile: c.authority()},
		Dial:            c.namespace.Dial, WarningHandler: rest.NoWarnings{},
		ContentConfig: rest.ContentConfig{ContentType: "application/vnd.kubernetes.protobuf"},
	}
	h, err := rest.HTTPClientFor(cfg)
	if err != nil {
		return fmt.Errorf("reach the API server: %w", err)
	}
	c.http = h
	if c.core, err = coreclient.NewForConfigAndClient(cfg, h); err == nil {
		c.discovery, err = discoveryclient.NewForConfigAndClient(cfg, h)
	}
	return err
}

// ready asks whether the API server is.
func (c *cluster) ready(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://"+c.host()+"/readyz", nil)
	if err != nil {
		return err
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("status %s: %s", resp.Status, text)
	}
	return err
}

// stop ends both: etcd so that its data is whole.
func (c *cluster) stop() error {
	c.stopWatch()
	err := c.api.Kill()
	var exit *exec.ExitError
	// etcd dies of the signal when it has handled it.
	if stopped := c.etcd.Stop(30 * time.Second); !errors.As(stopped, &exit) || c.etcd.Running() {
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
func (c *cluster) populate(ctx context.Context, nodeAddresses []netip.Addr) error {
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
			if _, err := c.core.Services(namespace).Create(ctx, c.service(i), metav1.CreateOptions{}); err != nil {
				return fmt.Errorf("create service %s: %w", serviceName(i), err)
			}
			if _, err := c.discovery.EndpointSlices(namespace).Create(ctx, c.slice(i, 0), metav1.CreateOptions{}); err != nil {
				return fmt.Errorf("create slice %s: %w", serviceName(i), err)
			}
			return nil
		})
	}
	return g.Wait()
}

// awaitNamespace waits until the API server has made what a new cluster has.
func (c *cluster) awaitNamespace(ctx context.Context) error {
	for {
		_, err := c.core.Namespaces().Get(ctx, namespace, metav1.GetOptions{})
		if err == nil || !apierrors.IsNotFound(err) {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(50 * time.Millisecond):
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

// reported is when the watcher learned of the last move of a service; false if it
// hasn't yet.
func (c *cluster) reported(i int) (time.Time, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	name := serviceName(i)
	e := c.seen[name]
	return e.at, e.version == c.written[name]
}
