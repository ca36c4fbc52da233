// Package kube runs kproxy against a real Kubernetes API server, with the real
// controllers, on real packets: etcd, kube-apiserver and kube-controller-manager
// in one namespace of a lab, kproxy in the node's.
package kube

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/test/program"
	"kproxy.dev/kproxy/web"
)

// The folder of the control plane's programs, and the kproxy under test.
var programs, binary string

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	if os.Geteuid() != 0 {
		return m.Run() // every test says why it is skipped
	}
	return program.Run(prepare, m.Run)
}

// prepare finds the control plane's programs: $KPROXY_KUBE_BIN, or what setup.sh
// builds and keeps.
func prepare(kproxy, _ string) error {
	binary = kproxy
	if programs = os.Getenv("KPROXY_KUBE_BIN"); programs == "" {
		setup := exec.Command("./setup.sh")
		setup.Stderr = os.Stderr
		out, err := setup.Output()
		if err != nil {
			return fmt.Errorf("build the control plane: %w", err)
		}
		programs = strings.TrimSpace(string(out))
	}
	return nil
}

// worlds numbers the labs of this process, so that their namespaces differ.
var worlds atomic.Int32

// pods is how many backends of a lab are for Pods; the one after them holds the
// control plane.
const pods = 6

// world is a lab with a control plane, and kproxy on its node.
type world struct {
	*testing.T
	*cluster
	ctx    context.Context
	mode   plan.Mode
	net    *lab.Network
	proxy  *lab.Process
	status *web.Client
}

// newWorld builds a lab with a control plane that knows the node and has
// deploy/ applied; kproxy doesn't run yet.
func newWorld(t *testing.T, mode plan.Mode) *world {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root to make network namespaces")
	}
	t.Parallel() // worlds share nothing
	ctx, cancel := context.WithTimeout(context.Background(), 10*patience)
	t.Cleanup(cancel)
	cfg := lab.DefaultConfig()
	cfg.Prefix = fmt.Sprintf("kpk-%d-%d", os.Getpid(), worlds.Add(1))
	cfg.Backends = pods + 1
	w := &world{T: t, ctx: ctx, mode: mode, net: lab.New(cfg)}
	w.must(w.net.Up(ctx))
	t.Cleanup(func() {
		if err := w.net.Down(); err != nil {
			t.Errorf("take the lab down: %v", err)
		}
	})
	host := w.net.Backends[pods]
	host.Stop() // it serves nothing but the API
	w.cluster = newCluster(programs, memory(t), host.Namespace, host.Addresses[0])
	t.Cleanup(func() {
		t.Logf("CPU time: etcd %s, API server %s, controllers %s", cpuTime(w.Etcd), cpuTime(w.API), cpuTime(w.controllers))
		if err := w.cluster.stop(); err != nil {
			t.Errorf("stop the control plane: %v", err)
		}
		if t.Failed() {
			t.Logf("the API server's log ends with:\n%s", end(w.API.Log()))
			t.Logf("the controllers' log ends with:\n%s", end(w.controllers.Log()))
		}
	})
	began := time.Now()
	w.must(w.cluster.start(ctx))
	w.prepare()
	t.Logf("the control plane took %s to start", time.Since(began).Round(100*time.Millisecond))
	return w
}

// cpuTime returns the processor time that a program has used since it was started last, from proc(5).
func cpuTime(p *lab.Process) time.Duration {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.PID()))
	_, rest, ok := strings.Cut(string(text), ") ")
	fields := strings.Fields(rest)
	if err != nil || !ok || len(fields) < 13 {
		return 0
	}
	var ticks time.Duration
	for _, f := range fields[11:13] { // utime and stime, of 100 a second
		ticks += time.Duration(number(f))
	}
	return ticks * time.Second / 100
}

// memory is a folder that costs no disk where the machine has one; it goes with the test.
func memory(t *testing.T) string {
	t.Helper()
	const shm = "/dev/shm"
	if _, err := os.Stat(shm); err != nil {
		return t.TempDir()
	}
	dir, err := os.MkdirTemp(shm, "kproxy-kube-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// keep is a file that a program's whole log goes to, in $KPROXY_KUBE_LOGS; nil without.
func keep(program string) io.Writer {
	dir := os.Getenv("KPROXY_KUBE_LOGS")
	if dir == "" {
		return nil
	}
	f, err := os.OpenFile(filepath.Join(dir, program+".log"), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return nil
	}
	return f
}

// end is the last of a log.
func end(s string) string { return s[max(0, len(s)-8_000):] }

// prepare makes what a cluster has before kproxy comes: the node, deploy/, and
// a token of the service account that is in there.
func (w *world) prepare() {
	w.Helper()
	w.eventually("the namespaces of a new cluster", func() error {
		_, err := w.client.core.Namespaces().Get(w.ctx, "kube-system", metav1.GetOptions{})
		if err == nil {
			_, err = w.client.core.ServiceAccounts("default").Get(w.ctx, "default", metav1.GetOptions{})
		}
		return err
	})
	w.makeNode()
	if out, err := w.kubectl(w.ctx, "apply", "-k", "../../deploy"); err != nil {
		w.Fatalf("kubectl apply -k deploy: %v\n%s", err, out)
	}
	token, err := w.client.core.ServiceAccounts("kube-system").CreateToken(w.ctx, "kproxy", &authenticationv1.TokenRequest{}, metav1.CreateOptions{})
	w.must(err)
	_, err = w.Kubeconfig("kproxy.kubeconfig", token.Status.Token)
	w.must(err)
}

// makeNode registers the node as its kubelet would.
func (w *world) makeNode() {
	w.Helper()
	nodes := w.client.core.Nodes()
	node, err := nodes.Create(w.ctx, &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: "node", Labels: map[string]string{corev1.LabelHostname: "node", corev1.LabelTopologyZone: "here"}},
		Spec:       corev1.NodeSpec{PodCIDR: lab.PodCIDR4.String(), PodCIDRs: []string{lab.PodCIDR4.String(), lab.PodCIDR6.String()}},
	}, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		return
	}
	w.must(err)
	for _, a := range w.net.Config.NodeAddresses() {
		node.Status.Addresses = append(node.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: a.String()})
	}
	node.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
	_, err = nodes.UpdateStatus(w.ctx, node, metav1.UpdateOptions{})
	w.must(err)
}

func (w *world) must(err error) {
	w.Helper()
	if err != nil {
		w.Fatal(err)
	}
}

// run runs kproxy on the node, with the rights that deploy/ gives it, and
// waits until it is alive.
func (w *world) run(args ...string) {
	w.Helper()
	w.start(args...)
	w.awaitAlive()
}

// start is run without the wait. Further arguments win over the usual ones.
func (w *world) start(args ...string) {
	w.Helper()
	if w.proxy == nil {
		socket := w.File("kproxy.sock")
		w.status = web.NewClient(socket)
		w.proxy = &lab.Process{
			Namespace: w.net.Node, Path: binary, Output: keep("kproxy"),
			Args: append([]string{
				"run", "--mode", string(w.mode), "--kubeconfig", w.File("kproxy.kubeconfig"), "--socket", socket,
				"--state-dir", w.File("state"), "--hostname-override", "node",
				"--offload-after", "0s", "--offload-min-connections", "0", "--drain-timeout", "5s",
			}, args...),
		}
		w.Cleanup(func() {
			w.Logf("CPU time: kproxy %s", cpuTime(w.proxy))
			if w.proxy.Running() {
				w.must(w.proxy.Kill())
			}
			if w.Failed() {
				w.Logf("kproxy's log ends with:\n%s", end(w.proxy.Log()))
			}
		})
	}
	w.must(w.proxy.Start())
}

func (w *world) awaitAlive() {
	w.Helper()
	w.eventually("kproxy to be alive", func() error {
		st, err := w.status.Status(w.ctx)
		if err == nil && !st.Alive {
			err = errors.New("not alive")
		}
		return err
	})
}

// patience is how long anything may take that is waited for. It is no
// expectation: a loaded machine is slow, and an emulated one says how slow.
var patience = time.Minute * time.Duration(max(1, number(os.Getenv("KPROXY_E2E_SLOW"))))

func number(s string) int {
	n, _ := strconv.Atoi(s)
	return n
}

// eventually polls until f returns nil.
func (w *world) eventually(what string, f func() error) {
	w.Helper()
	start := time.Now()
	for {
		err := f()
		if err == nil {
			return
		}
		if waited := time.Since(start); waited > patience || w.ctx.Err() != nil {
			w.Fatalf("waited %s for %s: %v", waited.Round(time.Second), what, err)
		}
		time.Sleep(25 * time.Millisecond)
	}
}

// node runs a command on the node and returns what it printed.
func (w *world) node(name string, args ...string) string {
	w.Helper()
	out, err := w.net.Node.Output(w.ctx, name, args...)
	if err != nil {
		w.Fatalf("%s %s on the node: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

// answers waits until an exchange of a client with target is answered by one
// of the backends.
func (w *world) answers(target netip.AddrPort, backends ...string) {
	w.Helper()
	w.eventually(fmt.Sprintf("an answer of %v at %s", backends, target), func() error {
		ctx, cancel := context.WithTimeout(w.ctx, time.Second)
		defer cancel()
		a, err := w.net.Client.Ask(ctx, "tcp", target, "hello")
		if err != nil {
			return err
		}
		for _, b := range backends {
			if a.Backend == b {
				return nil
			}
		}
		return fmt.Errorf("answered by %s", a.Backend)
	})
}

// silent waits until target is answered no more, be it refused or dropped.
func (w *world) silent(target netip.AddrPort) {
	w.Helper()
	w.eventually("no answer at "+target.String(), func() error {
		ctx, cancel := context.WithTimeout(w.ctx, 300*time.Millisecond)
		defer cancel()
		if a, err := w.net.Client.Ask(ctx, "tcp", target, "hello"); err == nil {
			return fmt.Errorf("answered by %s", a.Backend)
		}
		return nil
	})
}

// traffic keeps new connections to target coming, until the test or its Stop.
func (w *world) traffic(target netip.AddrPort, rate float64) *lab.Traffic {
	w.Helper()
	tr, err := lab.StartTraffic(w.ctx, lab.TrafficConfig{
		From: w.net.Client, Network: "tcp", Target: target, Rate: rate, Count: int(rate * 600), Timeout: patience, Concurrency: 1024,
	})
	w.must(err)
	w.Cleanup(func() { tr.Stop() })
	return tr
}

// noneFailed checks a stretch of traffic.
func (w *world) noneFailed(what string, r lab.Results) {
	w.Helper()
	if err := r.Err(); err != nil {
		w.Errorf("%s: %v", what, err)
	} else {
		w.Logf("%s: %s", what, r)
	}
}
