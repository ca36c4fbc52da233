package deploy

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/web"
)

const (
	nodeName = "node"                  // what the downward API says
	program  = "/usr/local/bin/kproxy" // in the image
)

// within gives a bound for a machine of usual speed more room on a slow one: an
// emulated one says how slow it is in $KPROXY_E2E_SLOW.
func within(limit time.Duration) time.Duration {
	slow, err := strconv.ParseFloat(os.Getenv("KPROXY_E2E_SLOW"), 64)
	if err != nil || slow < 1 {
		return limit
	}
	return time.Duration(float64(limit) * slow)
}

// nodes numbers the nodes of this process, so that their names differ.
var nodes atomic.Int32

// node is a node of a small network, with a container runtime.
type node struct {
	*testing.T
	ctx    context.Context
	net    *lab.Network
	deploy *manifests
	dir    string // what the node's root is to volumes, and more
	image  string // the image's root file system
	client *web.Client
	id     string
	number atomic.Int32 // of containers
}

// newNode builds a network with a node that runs nothing.
func newNode(t *testing.T) *node {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root to make network namespaces")
	}
	if _, err := exec.LookPath("runc"); err != nil {
		t.Skip("needs the Debian package runc")
	}
	ctx, cancel := context.WithTimeout(context.Background(), within(4*time.Minute))
	t.Cleanup(cancel)
	cfg := lab.DefaultConfig()
	cfg.Prefix = fmt.Sprintf("kpd-%d-%d", os.Getpid(), nodes.Add(1))
	n := &node{T: t, ctx: ctx, net: lab.New(cfg), deploy: load(t), dir: t.TempDir(), id: cfg.Prefix}
	var err error
	n.image, err = image()
	n.must(err)
	n.client = web.NewClient(n.host("/run/kproxy/kproxy.sock"))
	n.must(makeDirectory(n.manifestDir()))
	n.must(n.net.Up(ctx))
	t.Cleanup(func() {
		if err := n.net.Down(); err != nil {
			t.Errorf("take the network down: %v", err)
		}
	})
	return n
}

// image is the image's root file system, for every test: nobody writes to it.
var image = sync.OnceValues(func() (string, error) {
	out, err := os.MkdirTemp("", "kproxy-image-")
	if err != nil {
		return "", err
	}
	packages, err := packages()
	if err != nil {
		return out, err
	}
	if err := run("cp", "-a", packages+"/.", out); err != nil {
		return out, err
	}
	if given := os.Getenv("KPROXY_BIN"); given != "" {
		return out, run("cp", given, out+program)
	}
	return out, run("env", "CGO_ENABLED=0", "go", "build", "-buildvcs=false", "-o", out+program, "kproxy.dev/kproxy/cmd/kproxy")
})

// packages makes the root file system that deploy/Dockerfile describes, all but
// kproxy, by the script that its stage root runs. Packages are fetched once and kept.
func packages() (string, error) {
	script, err := os.ReadFile(folder + "/rootfs.sh")
	if err != nil {
		return "", err
	}
	kept, err := filepath.Abs(fmt.Sprintf("%s/bin/deploy/rootfs-%x", root, sha256.Sum256(script)))
	if err != nil {
		return "", err
	}
	if _, err := os.Stat(kept); err == nil {
		return kept, nil
	}
	if err := makeDirectory(filepath.Dir(kept)); err != nil {
		return "", err
	}
	fresh, err := os.MkdirTemp(filepath.Dir(kept), "new-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(fresh)
	if err := errors.Join(os.Chmod(fresh, 0o755), asBuilt(folder+"/rootfs.sh", fresh)); err != nil {
		return "", err
	}
	// Under another name first: whoever finds it finds all of it.
	return kept, os.Rename(fresh, kept)
}

// asBuilt runs a script with the privileges that it has where images are built.
func asBuilt(words ...string) error {
	return run("setpriv", append([]string{"--bounding-set", "-net_admin,-net_raw,-sys_admin", "sh"}, words...)...)
}

func run(name string, args ...string) error {
	if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
		return fmt.Errorf("%s %v: %w\n%s", name, args, err, out)
	}
	return nil
}

func TestMain(m *testing.M) {
	status := m.Run()
	if nodes.Load() > 0 {
		if dir, err := image(); dir != "" {
			status = max(status, map[bool]int{true: 1}[errors.Join(err, os.RemoveAll(dir)) != nil])
		}
	}
	os.Exit(status)
}

func (n *node) must(err error) {
	n.Helper()
	if err != nil {
		n.Fatal(err)
	}
}

// host returns where the test keeps a path of the node.
func (n *node) host(path string) string { return filepath.Join(n.dir, "host", path) }

func (n *node) manifestDir() string { return n.host("/manifests") }

func makeDirectory(path string) error { return os.MkdirAll(path, 0o755) }

func touch(path string) error {
	f, err := os.OpenFile(path, os.O_CREATE, 0o644)
	return errors.Join(err, f.Close())
}

// shared is what only the machine's own network namespace has and sets: the size
// of conntrack's table, which is left alone here.
const shared = "conntrack: {maxPerCore: 0}\n"

// configMap writes the ConfigMap's data as the kubelet does: files are links
// into a directory that changes with a rename.
func (n *node) configMap() string {
	n.Helper()
	dir := n.host("/configmap")
	n.must(os.RemoveAll(dir))
	n.must(makeDirectory(dir + "/..1"))
	n.must(os.Symlink("..1", dir+"/..data"))
	for name, text := range n.deploy.configMap.Data {
		n.must(os.WriteFile(filepath.Join(dir, "..1", name), []byte(text+shared), 0o644))
		n.must(os.Symlink("..data/"+name, filepath.Join(dir, name)))
	}
	return dir
}

// edit changes a container's bundle before it starts.
type edit func(*bundle)

// without takes capabilities away.
func without(names ...string) edit {
	return func(b *bundle) {
		for kind, have := range b.Process.Capabilities {
			b.Process.Capabilities[kind] = slices.DeleteFunc(slices.Clone(have), func(c string) bool { return slices.Contains(names, c) })
		}
	}
}

// start starts a container of the DaemonSet, with the services from a directory
// instead of an API server. It ends with the test.
func (n *node) start(name string, edits ...edit) *lab.Process {
	n.Helper()
	c, err := n.deploy.container(name)
	n.must(err)
	b := n.bundleOf(c)
	b.Process.Args = append(b.Process.Args, "--manifests=/tmp", "--offload-after=1s")
	b.Process.Env = append(b.Process.Env, "KUBERNETES_SERVICE_HOST=192.0.2.1") // as the kubelet sets it in every pod
	b.Mounts = append(b.Mounts, ociMnt{"/tmp", "bind", n.manifestDir(), []string{"rbind", "ro"}})
	for _, e := range edits {
		e(b)
	}
	id := fmt.Sprintf("%s-%s-%d", n.id, name, n.number.Add(1))
	b.Linux.CgroupsPath = "/" + id
	dir := filepath.Join(n.dir, id)
	n.must(makeDirectory(dir))
	text, err := json.MarshalIndent(b, "", "\t")
	n.must(err)
	n.must(os.WriteFile(dir+"/config.json", text, 0o644))
	p := &lab.Process{Namespace: n.net.Node, Path: "runc", Args: []string{"--root", n.dir + "/runc", "run", "--bundle", dir, id}}
	n.Cleanup(func() {
		_ = exec.Command("runc", "--root", n.dir+"/runc", "delete", "--force", id).Run() // gone already, as a rule
		if p.Running() {
			n.must(p.Kill())
		}
		if n.Failed() {
			n.Logf("log of container %s:\n%s", id, p.Log())
		}
	})
	n.must(p.Start())
	return p
}

// inContainer is a command in the container that was started last, as kubectl exec and the kubelet's probes run it.
func (n *node) inContainer(ctx context.Context, name string, args ...string) *exec.Cmd {
	id := fmt.Sprintf("%s-%s-%d", n.id, name, n.number.Load())
	return n.net.Node.Command(ctx, "runc", append([]string{"--root", n.dir + "/runc", "exec", id}, args...)...)
}

// exec runs a command there.
func (n *node) exec(name string, args ...string) string {
	n.Helper()
	var out bytes.Buffer
	c := n.inContainer(n.ctx, name, args...)
	c.Stdout, c.Stderr = &out, &out
	if err := c.Run(); err != nil {
		n.Fatalf("exec %v: %v\n%s", args, err, &out)
	}
	return out.String()
}

// ready waits until the DaemonSet's probes would find the container ready.
func (n *node) ready(p *lab.Process) {
	n.Helper()
	ctx, cancel := context.WithTimeout(n.ctx, within(30*time.Second))
	defer cancel()
	c, err := n.deploy.container("kproxy")
	n.must(err)
	n.must(p.WaitReady(ctx, func() error {
		return errors.Join(n.probe(ctx, c.LivenessProbe), n.probe(ctx, c.ReadinessProbe))
	}))
}

// eventually polls until f returns nil.
func (n *node) eventually(what string, f func() error) {
	n.Helper()
	for start := time.Now(); ; time.Sleep(50 * time.Millisecond) {
		err := f()
		if err == nil {
			return
		}
		if time.Since(start) > within(time.Minute) {
			n.Fatalf("waited %s for %s: %v", within(time.Minute), what, err)
		}
	}
}

// carriedBy waits until all of the service is in a data plane.
func (n *node) carriedBy(name string, plane plan.DataPlane) {
	n.Helper()
	n.eventually(fmt.Sprintf("%s in %s", name, plane), func() error {
		st, err := n.client.Status(n.ctx)
		if err != nil {
			return err
		}
		for _, s := range st.Services {
			if s.Name == name && s.DataPlane != plane {
				return fmt.Errorf("%s is in %s, %s: %s", s.Port, s.DataPlane, s.State, s.Reason)
			}
		}
		return nil
	})
}

// sysctl sets a kernel setting of the node, if its kernel has it by now.
func (n *node) sysctl(name, value string) {
	n.Helper()
	n.must(n.net.Node.Do(func() error {
		if err := os.WriteFile("/proc/sys/net/"+name, []byte(value), 0); !errors.Is(err, os.ErrNotExist) {
			return err
		}
		return nil
	}))
}

// service describes the test's service: port 80, TCP and UDP, dual stack, every
// backend an endpoint.
func service(n *node) lab.Manifest {
	m := lab.NewManifest("web", 10, n.net.Backends...)
	m.Ports = m.Ports[:2]
	return m
}

// address is that of the test's service in a family.
func address(m lab.Manifest, family int) netip.AddrPort {
	return netip.AddrPortFrom(m.ClusterIPs[family], m.Ports[0].Port)
}

// crash kills the worker, a child of the container's first process, and waits until another one serves.
func (n *node) crash(p *lab.Process) {
	n.Helper()
	c, err := net.Dial("unix", n.host("/run/kproxy/kproxy.sock"))
	n.must(err)
	defer c.Close()
	raw, err := c.(*net.UnixConn).SyscallConn()
	n.must(err)
	var peer *unix.Ucred
	n.must(raw.Control(func(fd uintptr) { peer, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }))
	n.must(err)
	n.must(unix.Kill(int(peer.Pid), unix.SIGKILL))
	n.eventually("another process to go on", func() error {
		if !strings.Contains(p.Log(), "going on with what a kproxy left that crashed") {
			return errors.New("the log doesn't say so")
		}
		return nil
	})
	n.ready(p)
}
