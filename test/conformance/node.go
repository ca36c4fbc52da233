package main

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"kproxy.dev/kproxy/lab"
)

//go:embed node.sh
var nodeScript string

//go:embed unnumbered.sh
var unnumberedPlugin string

//go:embed containerd.toml
var containerdConfig string

//go:embed kubelet.yaml
var kubeletConfig string

// podNetworks are the ways in which pods are connected to their node, as the first plugin
// of a CNI configuration without its addresses.
var podNetworks = map[string]string{
	"bridge":     `"type": "bridge", "bridge": "cni0", "isGateway": true, "hairpinMode": true`,
	"routed":     `"type": "ptp"`,
	"unnumbered": `"type": "unnumbered"`,
}

// node is one node of the cluster: namespaces of its own, with containerd and a kubelet.
type node struct {
	name     string
	number   int
	folder   string // what it keeps when it is restarted
	programs string
	process  *exec.Cmd
}

func (n *node) address4() string { return fmt.Sprintf("172.31.0.%d", 10+n.number) }
func (n *node) address6() string { return fmt.Sprintf("fd00:31::%d", 10+n.number) }
func (n *node) pods4() string    { return fmt.Sprintf("10.244.%d.0/24", n.number) }
func (n *node) pods6() string    { return fmt.Sprintf("fd00:10:244:%d::/64", n.number) }

func (n *node) podPrefix() netip.Prefix { return netip.MustParsePrefix(n.pods4()) }

// configure writes the configuration of a node among others.
func (n *node) configure(all []*node, podNetwork, kubeconfig string) error {
	var routes strings.Builder
	for _, other := range all {
		if other != n {
			fmt.Fprintf(&routes, "%s via %s\n%s via %s\n", other.pods4(), other.address4(), other.pods6(), other.address6())
		}
	}
	network := fmt.Sprintf(`{"cniVersion": "1.0.0", "name": "pods", "plugins": [
	{%s, "ipam": {"type": "host-local", "dataDir": "/run/cni-ipam", "ranges": [[{"subnet": %q}], [{"subnet": %q}]],
		"routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]}},
	{"type": "portmap", "capabilities": {"portMappings": true}}]}`, podNetworks[podNetwork], n.pods4(), n.pods6())
	access, err := os.ReadFile(kubeconfig)
	if err != nil {
		return err
	}
	etc := filepath.Join(n.folder, "etc")
	if err := errors.Join(os.MkdirAll(filepath.Join(etc, "cni"), 0o755), os.MkdirAll(filepath.Join(etc, "plugins"), 0o755)); err != nil {
		return err
	}
	for name, text := range map[string]string{
		"cni/10-pods.conflist": network,
		"plugins/unnumbered":   unnumberedPlugin,
		"containerd.toml":      containerdConfig,
		"kubelet.yaml":         kubeletConfig,
		"kubeconfig":           string(access),
		"resolv.conf":          "nameserver 127.0.0.1\n", // nothing outside answers
		"routes":               routes.String(),
		"zone":                 fmt.Sprintf("zone-%d", (n.number-1)%3+1),
	} {
		if err := os.WriteFile(filepath.Join(etc, name), []byte(text), 0o700); err != nil {
			return err
		}
	}
	return nil
}

// start boots the node: containerd and kubelet run some seconds later.
func (n *node) start(ctx context.Context) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	n.process = exec.Command(self, "first-process", "/bin/bash", "-c", nodeScript, "node.sh", n.name, n.folder, n.address4(), n.address6(), n.programs)
	log, err := os.OpenFile(filepath.Join(n.folder, "node.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer log.Close()
	n.process.Stdout, n.process.Stderr = log, log
	n.process.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWPID | syscall.CLONE_NEWNS | syscall.CLONE_NEWNET | syscall.CLONE_NEWUTS | syscall.CLONE_NEWIPC,
	}
	if err := n.process.Start(); err != nil {
		return fmt.Errorf("start node %s: %w", n.name, err)
	}
	const bridged = "nodes"
	_, err = run(ctx, "ip", "link", "add", n.link(), "type", "veth", "peer", "name", "eth0", "netns", strconv.Itoa(n.process.Process.Pid))
	if err == nil {
		_, err = run(ctx, "ip", "link", "set", n.link(), "master", bridged, "up")
	}
	for _, route := range [][]string{{"-4", n.pods4(), n.address4()}, {"-6", n.pods6(), n.address6()}} {
		if err == nil {
			_, err = run(ctx, "ip", route[0], "route", "replace", route[1], "via", route[2])
		}
	}
	return err
}

// crash ends the node at once, as a loss of power does; start boots it again.
func (n *node) crash() error {
	if err := n.process.Process.Kill(); err != nil {
		return err
	}
	_ = n.process.Wait() // killed
	// The kernel removes the link as well, but some time after the namespace's end.
	_, _ = run(context.Background(), "ip", "link", "del", n.link())
	return nil
}

// link is the machine's end of the node's.
func (n *node) link() string { return "veth-" + n.name }

// exec runs a program of the machine in the node's namespaces.
func (n *node) exec(ctx context.Context, args ...string) (string, error) {
	return run(ctx, "nsenter", append([]string{"-t", strconv.Itoa(n.process.Process.Pid), "-m", "-n", "-u", "-p"}, args...)...)
}

// load imports an archive of images.
func (n *node) load(ctx context.Context, archive string) error {
	_, err := n.exec(ctx, filepath.Join(n.programs, "bin/ctr"), "-n", "k8s.io", "images", "import", archive)
	return err
}

// run runs a program and returns what it prints; its errors hold what it complained of.
func run(ctx context.Context, name string, args ...string) (string, error) {
	return runWith(ctx, nil, name, args...)
}

func runWith(ctx context.Context, input io.Reader, name string, args ...string) (string, error) {
	var out, complaint strings.Builder
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = input, &out, &complaint
	cmd.WaitDelay = 5 * time.Second
	if err := cmd.Run(); err != nil {
		return out.String(), fmt.Errorf("%s %s: %w: %s", filepath.Base(name), strings.Join(args, " "), err, strings.TrimSpace(complaint.String()))
	}
	return out.String(), nil
}

// poll asks until there is no error any more, or returns the last one after a time.
func poll(ctx context.Context, within time.Duration, f func() error) error {
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	for {
		err := f()
		if err == nil {
			return nil
		}
		if lab.Sleep(ctx, 500*time.Millisecond) != nil {
			return errors.Join(fmt.Errorf("after %v", within), err)
		}
	}
}
