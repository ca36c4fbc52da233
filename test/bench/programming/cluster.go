package main

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
	"time"

	corev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	discoveryv1 "k8s.io/client-go/kubernetes/typed/discovery/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"kproxy.dev/kproxy/lab"
)

// adminToken is everybody's; the API server is reached from within the lab only.
const adminToken = "administrator"

// cluster is etcd and kube-apiserver in a namespace. There are no controllers:
// Services and EndpointSlices are written as they are to be.
type cluster struct {
	namespace *lab.Namespace
	address   netip.Addr
	dir       string // in memory, where the machine has such a folder
	etcd, api *lab.Process

	http      *http.Client
	core      corev1.CoreV1Interface
	discovery discoveryv1.DiscoveryV1Interface
}

// newCluster describes one whose state is below dir; programs holds etcd and
// kube-apiserver.
func newCluster(programs, dir string, at *lab.Backend) *cluster {
	c := &cluster{namespace: at.Namespace, address: at.Addresses[0], dir: dir}
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
	if c.core, err = corev1.NewForConfigAndClient(cfg, h); err == nil {
		c.discovery, err = discoveryv1.NewForConfigAndClient(cfg, h)
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
	err := c.api.Kill()
	var exit *exec.ExitError
	// etcd dies of the signal when it has handled it.
	if stopped := c.etcd.Stop(30 * time.Second); !errors.As(stopped, &exit) || c.etcd.Running() {
		err = errors.Join(err, stopped)
	}
	return err
}
