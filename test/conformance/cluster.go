package main

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"

	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/test/apiserver"
)

//go:embed coredns.yaml
var dns string

// Addresses of the cluster. The nodes' networks are on a bridge in the network of the control
// plane, where the tests run as well.
const (
	controlPlane    = "172.31.0.1"
	serviceNetworks = "10.96.0.0/16,fd00:10:96::/112"
	podNetworkRange = "10.244.0.0/16,fd00:10:244::/56"
	// A client that isn't of the nodes' network, for load balancers.
	outside4, outside6 = "172.33.0.1", "fd00:33::1"
)

// cluster is a control plane and nodes.
type cluster struct {
	options
	server *apiserver.Server
	here   *os.File // the network of the control plane
	nodes  []*node
	kube   string // path of the administrator's kubeconfig
	proxy  string // that serves now, a key of proxies; empty: none
}

// kubectl runs kubectl as the administrator.
func (c *cluster) kubectl(ctx context.Context, args ...string) (string, error) {
	return run(ctx, c.program("kubectl"), append([]string{"--kubeconfig", c.kube}, args...)...)
}

// apply makes objects of a manifest.
func (c *cluster) apply(ctx context.Context, manifest string) error {
	_, err := runWith(ctx, strings.NewReader(manifest), c.program("kubectl"), "--kubeconfig", c.kube, "apply", "-f", "-")
	return err
}

func (c *cluster) program(name string) string { return filepath.Join(c.programs, "bin", name) }

// start starts the control plane and the nodes. Pods run, and services lead nowhere yet.
func (c *cluster) start(ctx context.Context) error {
	if err := c.network(ctx); err != nil {
		return err
	}
	network, err := os.Open("/proc/self/ns/net")
	if err != nil {
		return err
	}
	c.here = network // for as long as the cluster lives
	if err := c.startControlPlane(ctx); err != nil {
		return err
	}
	for i := range c.options.nodes {
		name := fmt.Sprintf("n%d", i+1)
		c.nodes = append(c.nodes, &node{name: name, number: i + 1, folder: filepath.Join(c.state, name), programs: c.programs})
	}
	for _, n := range c.nodes {
		if err := errors.Join(n.configure(c.nodes, c.podNetwork, c.kube), n.start(ctx)); err != nil {
			return err
		}
	}
	for _, n := range c.nodes {
		if err := poll(ctx, 5*time.Minute, func() error {
			_, err := c.kubectl(ctx, "wait", "--for=condition=Ready", "node/"+n.name, "--timeout=20s")
			return err
		}); err != nil {
			return fmt.Errorf("node %s isn't ready, see its logs in %s: %w", n.name, c.results, err)
		}
	}
	return nil
}

// network makes the bridge of the nodes.
func (c *cluster) network(ctx context.Context) error {
	_, err := runWith(ctx, strings.NewReader(`link set lo up
link add nodes type bridge
address add `+controlPlane+`/24 dev nodes
address add fd00:31::1/64 dev nodes nodad
address add `+outside4+`/32 dev lo
address add `+outside6+`/128 dev lo nodad
link set nodes up
neighbour add 172.31.0.254 lladdr 02:00:00:00:00:fe dev nodes nud permanent
neighbour add fd00:31::fe lladdr 02:00:00:00:00:fe dev nodes nud permanent
route add 172.32.0.0/16 via 172.31.0.254 src `+outside4+`
route add fd00:32::/64 via fd00:31::fe src `+outside6+`
`), "ip", "-batch", "-") // what goes to a load balancer that isn't there gets no answer, by a neighbour that isn't there
	if err != nil {
		return err
	}
	_, err = run(ctx, "sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1", "net.ipv4.conf.all.rp_filter=0",
		// A client's connections to a load balancer are spread over nodes by their ports as well.
		"net.ipv4.fib_multipath_hash_policy=1", "net.ipv6.fib_multipath_hash_policy=1")
	return err
}

func (c *cluster) startControlPlane(ctx context.Context) error {
	address := netip.MustParseAddr(controlPlane)
	dir := filepath.Join(c.state, "controlplane")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	s := apiserver.New(filepath.Join(c.programs, "bin"), dir, lab.FromFD("control plane", int(c.here.Fd())), address, serviceNetworks,
		"--allow-privileged", "--kubelet-preferred-address-types", "InternalIP")
	c.server = s
	var err error
	if s.Etcd.Output, err = c.log("etcd"); err != nil {
		return err
	}
	if s.API.Output, err = c.log("kube-apiserver"); err != nil {
		return err
	}
	if err := s.Start(ctx); err != nil {
		return err
	}
	if c.kube, err = s.Kubeconfig("admin.kubeconfig", apiserver.AdminToken); err != nil {
		return err
	}
	access := []string{"--kubeconfig", c.kube, "--authentication-kubeconfig", c.kube, "--authorization-kubeconfig", c.kube, "--leader-elect=false", "--bind-address", "127.0.0.1"}
	for name, args := range map[string][]string{
		"kube-scheduler": nil,
		"kube-controller-manager": {"--service-account-private-key-file", s.File("accounts.key"), "--root-ca-file", s.File("certificates/apiserver.crt"),
			"--cert-dir", s.File("certificates"), "--service-cluster-ip-range", serviceNetworks, "--use-service-account-credentials"},
	} {
		p := s.Program(name, append(access, args...)...)
		if p.Output, err = c.log(name); err != nil {
			return err
		}
		if err := p.Start(); err != nil {
			return err
		}
	}
	return nil
}

// log is the file of a program's log.
func (c *cluster) log(name string) (*os.File, error) {
	return os.Create(filepath.Join(c.results, name+".log"))
}

// startDNS starts the cluster's DNS, once services work.
func (c *cluster) startDNS(ctx context.Context) error {
	if err := c.apply(ctx, dns); err != nil {
		return err
	}
	_, err := c.kubectl(ctx, "-n", "kube-system", "rollout", "status", "deployment/coredns", "--timeout", "3m")
	return err
}

// keepLogs copies what the nodes have logged to the results.
func (c *cluster) keepLogs() {
	for _, n := range c.nodes {
		for _, name := range []string{"node", "containerd", "kubelet"} {
			if text, err := os.ReadFile(filepath.Join(n.folder, name+".log")); err == nil {
				_ = os.WriteFile(filepath.Join(c.results, n.name+"-"+name+".log"), text, 0o644)
			}
		}
	}
}
