package kube

import (
	"context"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	appsv1 "k8s.io/client-go/kubernetes/typed/apps/v1"
	corev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	discoveryv1 "k8s.io/client-go/kubernetes/typed/discovery/v1"
	eventsv1 "k8s.io/client-go/kubernetes/typed/events/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"kproxy.dev/kproxy/lab"
)

// adminToken is the administrator's; the API server is reached from within a
// lab only.
const adminToken = "administrator"

// cluster is a Kubernetes control plane in a namespace: etcd, kube-apiserver and
// kube-controller-manager. Its state is below dir.
type cluster struct {
	namespace *lab.Namespace
	address   netip.Addr // of the API server, and what else answers in the namespace
	programs  string     // the folder that holds them
	dir       string

	etcd, api, controllers *lab.Process
	client                 clients
}

// clients are the administrator's, for what the tests need of the API: all of
// client-go takes long to compile.
type clients struct {
	core      corev1.CoreV1Interface
	discovery discoveryv1.DiscoveryV1Interface
	apps      appsv1.AppsV1Interface
	events    eventsv1.EventsV1Interface
}

func newClients(cfg *rest.Config) (c clients, err error) {
	h, err := rest.HTTPClientFor(cfg)
	if err != nil {
		return c, err
	}
	var errs [4]error
	c.core, errs[0] = corev1.NewForConfigAndClient(cfg, h)
	c.discovery, errs[1] = discoveryv1.NewForConfigAndClient(cfg, h)
	c.apps, errs[2] = appsv1.NewForConfigAndClient(cfg, h)
	c.events, errs[3] = eventsv1.NewForConfigAndClient(cfg, h)
	return c, errors.Join(errs[:]...)
}

// controllers are those of kube-controller-manager that the tests are about, and
// those without which objects stay incomplete or never go. There are no kubelet
// and no scheduler: the tests play them.
const controllers = "endpointslice-controller,deployment-controller,replicaset-controller," +
	"serviceaccount-controller,namespace-controller,garbage-collector-controller"

func newCluster(programs, dir string, namespace *lab.Namespace, address netip.Addr) (*cluster, error) {
	c := &cluster{namespace: namespace, address: address, programs: programs, dir: dir}
	if err := c.writeFiles(); err != nil {
		return nil, err
	}
	c.etcd = c.program("etcd",
		"--data-dir", c.file("etcd"), "--unsafe-no-fsync", "--log-level", "warn",
		"--listen-client-urls", "http://127.0.0.1:2379", "--advertise-client-urls", "http://127.0.0.1:2379",
		"--listen-peer-urls", "http://127.0.0.1:2380", "--initial-advertise-peer-urls", "http://127.0.0.1:2380",
		"--initial-cluster", "default=http://127.0.0.1:2380")
	c.api = c.program("kube-apiserver",
		"--etcd-servers", "http://127.0.0.1:2379", "--bind-address", address.String(), "--secure-port", "6443",
		"--cert-dir", c.file("certificates"), "--token-auth-file", c.file("tokens.csv"), "--authorization-mode", "RBAC", "--allow-privileged",
		"--service-cluster-ip-range", serviceNetworks, "--service-account-issuer", "https://kubernetes.default.svc",
		"--service-account-key-file", c.file("accounts.key"), "--service-account-signing-key-file", c.file("accounts.key"))
	c.controllers = c.program("kube-controller-manager",
		"--kubeconfig", c.file("admin.kubeconfig"), "--controllers", controllers, "--leader-elect=false",
		"--service-account-private-key-file", c.file("accounts.key"), "--kube-api-qps", "200", "--kube-api-burst", "400",
		"--cert-dir", c.file("certificates"), "-v", "0")
	return c, nil
}

// serviceNetworks hold the cluster IPs of package lab's conventions.
const serviceNetworks = "10.96.0.0/12,fd00:96::/112"

func (c *cluster) file(name string) string { return filepath.Join(c.dir, name) }

func (c *cluster) program(name string, args ...string) *lab.Process {
	return &lab.Process{Namespace: c.namespace, Path: filepath.Join(c.programs, name), Args: args, Output: keep(name)}
}

// server is the API server's URL.
func (c *cluster) server() string { return "https://" + c.host() }

func (c *cluster) host() string { return netip.AddrPortFrom(c.address, 6443).String() }

// authority is the certificate that the API server makes for itself.
func (c *cluster) authority() string { return c.file("certificates/apiserver.crt") }

func (c *cluster) writeFiles() error {
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		return fmt.Errorf("make key of service accounts: %w", err)
	}
	text := pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(key)})
	return errors.Join(
		os.WriteFile(c.file("accounts.key"), text, 0o600),
		os.WriteFile(c.file("tokens.csv"), []byte(adminToken+",admin,admin,system:masters\n"), 0o600),
		c.kubeconfig("admin.kubeconfig", adminToken),
	)
}

// kubeconfig writes a file for who has the token.
func (c *cluster) kubeconfig(name, token string) error {
	cfg := clientcmdapi.NewConfig()
	cfg.Clusters["lab"] = &clientcmdapi.Cluster{Server: c.server(), CertificateAuthority: c.authority()}
	cfg.AuthInfos["user"] = &clientcmdapi.AuthInfo{Token: token}
	cfg.Contexts["lab"] = &clientcmdapi.Context{Cluster: "lab", AuthInfo: "user"}
	cfg.CurrentContext = "lab"
	return clientcmd.WriteToFile(*cfg, c.file(name))
}

// start starts all, and returns when Services and Pods can be made.
func (c *cluster) start(ctx context.Context) error {
	if err := c.etcd.Start(); err != nil {
		return err
	}
	if err := c.etcd.WaitReady(ctx, c.listens(ctx, "127.0.0.1:2379")); err != nil {
		return err
	}
	if err := c.api.Start(); err != nil {
		return err
	}
	if err := c.awaitAPI(ctx); err != nil {
		return err
	}
	if err := c.controllers.Start(); err != nil {
		return err
	}
	cfg := &rest.Config{
		Host: c.server(), BearerToken: adminToken, QPS: -1,
		TLSClientConfig: rest.TLSClientConfig{CAFile: c.authority()},
		Dial:            c.namespace.Dial, Timeout: time.Minute,
		WarningHandler: rest.NoWarnings{}, // that external IPs are deprecated
		ContentConfig:  rest.ContentConfig{ContentType: "application/vnd.kubernetes.protobuf"},
	}
	var err error
	c.client, err = newClients(cfg)
	return err
}

// awaitAPI waits until the API server says that it is ready.
func (c *cluster) awaitAPI(ctx context.Context) error {
	return c.api.WaitReady(ctx, func() error {
		if err := c.listens(ctx, c.host())(); err != nil {
			return err
		}
		out, err := c.kubectl(ctx, "get", "--raw", "/readyz")
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	})
}

// listens is a test for [lab.Process.WaitReady]: somebody accepts at address.
func (c *cluster) listens(ctx context.Context, address string) func() error {
	return func() error {
		conn, err := c.namespace.Dial(ctx, "tcp", address)
		if err != nil {
			return err
		}
		return conn.Close()
	}
}

// kubectl runs kubectl as the administrator.
func (c *cluster) kubectl(ctx context.Context, args ...string) (string, error) {
	cmd := c.namespace.Command(ctx, filepath.Join(c.programs, "kubectl"), append([]string{"--kubeconfig", c.file("admin.kubeconfig")}, args...)...)
	cmd.Env = append(os.Environ(), "HOME="+c.dir) // for what it caches
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// stop ends all; nothing that they hold is needed any more.
func (c *cluster) stop() error {
	return errors.Join(c.controllers.Kill(), c.api.Kill(), c.etcd.Kill())
}
