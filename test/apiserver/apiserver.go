// Package apiserver runs the API server of Kubernetes, with etcd, in a namespace of a
// lab, for tests and for `make bench`. test/kube/setup.sh builds both. There are no
// controllers but those that the caller starts.
package apiserver

import (
	"context"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"kproxy.dev/kproxy/lab"
)

// AdminToken is the administrator's; the API server is reached from within the lab
// only.
const AdminToken = "administrator"

// Server is etcd and kube-apiserver. Its state is below a folder.
type Server struct {
	Namespace *lab.Namespace
	Etcd, API *lab.Process
	HTTP      *http.Client // the administrator's, from Start on

	address       netip.Addr // of the API server
	programs, dir string
}

// New describes a server at an address of a namespace. The programs are in the folder
// that setup.sh prints; services is the network of cluster IPs, and api are further
// arguments of the API server.
func New(programs, dir string, at *lab.Namespace, address netip.Addr, services string, api ...string) *Server {
	s := &Server{Namespace: at, address: address, programs: programs, dir: dir}
	s.Etcd = s.Program("etcd",
		"--data-dir", s.File("etcd"), "--unsafe-no-fsync", "--log-level", "warn", "--quota-backend-bytes", "8589934592",
		"--listen-client-urls", "http://127.0.0.1:2379", "--advertise-client-urls", "http://127.0.0.1:2379",
		"--listen-peer-urls", "http://127.0.0.1:2380", "--initial-advertise-peer-urls", "http://127.0.0.1:2380",
		"--initial-cluster", "default=http://127.0.0.1:2380")
	s.API = s.Program("kube-apiserver", append([]string{
		"--etcd-servers", "http://127.0.0.1:2379", "--bind-address", address.String(), "--secure-port", "6443",
		"--cert-dir", s.File("certificates"), "--token-auth-file", s.File("tokens.csv"), "--authorization-mode", "RBAC",
		"--service-cluster-ip-range", services, "--service-account-issuer", "https://kubernetes.default.svc",
		"--service-account-key-file", s.File("accounts.key"), "--service-account-signing-key-file", s.File("accounts.key"),
	}, api...)...)
	return s
}

// File is the path of a file of its state.
func (s *Server) File(name string) string { return filepath.Join(s.dir, name) }

// Program is one of the control plane's, in its namespace.
func (s *Server) Program(name string, args ...string) *lab.Process {
	return &lab.Process{Namespace: s.Namespace, Path: filepath.Join(s.programs, name), Args: args}
}

// Kubeconfig writes a file for who has the token, and returns its path.
func (s *Server) Kubeconfig(name, token string) (string, error) {
	cfg := clientcmdapi.NewConfig()
	cfg.Clusters["lab"] = &clientcmdapi.Cluster{Server: s.server(), CertificateAuthority: s.authority()}
	cfg.AuthInfos["user"] = &clientcmdapi.AuthInfo{Token: token}
	cfg.Contexts["lab"] = &clientcmdapi.Context{Cluster: "lab", AuthInfo: "user"}
	cfg.CurrentContext = "lab"
	return s.File(name), clientcmd.WriteToFile(*cfg, s.File(name))
}

// Start starts both, and returns when objects can be written.
func (s *Server) Start(ctx context.Context) error {
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		return fmt.Errorf("make key of service accounts: %w", err)
	}
	text := pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(key)})
	err = errors.Join(
		os.WriteFile(s.File("accounts.key"), text, 0o600),
		os.WriteFile(s.File("tokens.csv"), []byte(AdminToken+",admin,admin,system:masters\n"), 0o600),
	)
	for _, p := range []struct {
		process *lab.Process
		address string
	}{{s.Etcd, "127.0.0.1:2379"}, {s.API, s.host()}} {
		if err == nil {
			err = p.process.Start()
		}
		if err == nil {
			err = p.process.WaitReady(ctx, func() error { return s.listens(ctx, p.address) })
		}
	}
	if err == nil {
		s.HTTP, err = rest.HTTPClientFor(s.Config())
	}
	if err != nil {
		return fmt.Errorf("start the API server: %w", err)
	}
	return s.Await(ctx)
}

// Await waits until the API server, which has been started, is ready.
func (s *Server) Await(ctx context.Context) error {
	return s.API.WaitReady(ctx, func() error { return s.ready(ctx) })
}

// Config is the administrator's way to the API server, once that has a certificate.
func (s *Server) Config() *rest.Config {
	return &rest.Config{
		Host: s.server(), BearerToken: AdminToken, QPS: -1,
		TLSClientConfig: rest.TLSClientConfig{CAFile: s.authority()},
		Dial:            s.Namespace.Dial,
		WarningHandler:  rest.NoWarnings{}, // that external IPs are deprecated
		ContentConfig:   rest.ContentConfig{ContentType: "application/vnd.kubernetes.protobuf"},
	}
}

func (s *Server) server() string { return "https://" + s.host() }
func (s *Server) host() string   { return netip.AddrPortFrom(s.address, 6443).String() }

// authority is the certificate that the API server makes for itself.
func (s *Server) authority() string { return s.File("certificates/apiserver.crt") }

func (s *Server) listens(ctx context.Context, address string) error {
	conn, err := s.Namespace.Dial(ctx, "tcp", address)
	if err != nil {
		return err
	}
	return conn.Close()
}

// ready asks whether the API server is.
func (s *Server) ready(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	_, err := lab.Get(ctx, s.HTTP, s.server()+"/readyz")
	return err
}
