package kube

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"

	kproxies "kproxy.dev/kproxy/cmd/kproxy/cluster"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/test/apiserver"
)

// TestPlugin: what `kubectl kproxy` says of nodes that don't answer, by a real API server's words: without a pod, with one
// that can't start, with a kubelet that takes connections and never answers, with none; and what it says to users who lack a right. test/conformance
// has nodes that do answer.
func TestPlugin(t *testing.T) {
	w := newWorld(t, plan.ModeUserspace)
	if out, err := w.kubectl(w.ctx, "apply", "--validate=strict", "-k", "../../deploy/plugin"); err != nil {
		t.Fatalf("kubectl apply -k deploy/plugin: %v\n%s", err, out)
	}
	host := w.net.Backends[pods]
	silent, err := host.Namespace.Listen(w.ctx, "tcp", host.Addresses[0].String()+":10250") // whose connections are never accepted
	w.must(err)
	defer silent.Close()
	for name, port := range map[string]int32{"hangs": 10250, "refuses": 10251, "waits": 10250} {
		node, err := w.client.core.Nodes().Create(w.ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
		w.must(err)
		node.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: host.Addresses[0].String()}, {Type: corev1.NodeHostName, Address: host.Addresses[0].String()}}
		node.Status.DaemonEndpoints.KubeletEndpoint.Port = port
		_, err = w.client.core.Nodes().UpdateStatus(w.ctx, node, metav1.UpdateOptions{})
		w.must(err)
		w.makePod("kproxy-"+name, name, name != "waits")
	}
	for user, roles := range map[string][]string{"stranger": nil, "lister": {"ClusterRole"}, "viewer": {"ClusterRole", "Role"}} {
		for _, kind := range roles {
			args := []string{"create", strings.ToLower(kind) + "binding", user, "--" + strings.ToLower(kind), "kproxy-viewer", "--user", user, "-n", "kube-system"}
			if out, err := w.kubectl(w.ctx, args...); err != nil {
				t.Fatalf("%v: %v\n%s", args, err, out)
			}
		}
		file, err := w.Kubeconfig(user+".kubeconfig", apiserver.AdminToken)
		w.must(err)
		access, err := clientcmd.LoadFromFile(file)
		w.must(err)
		for _, info := range access.AuthInfos {
			info.Impersonate = user
		}
		w.must(clientcmd.WriteToFile(*access, file))
	}
	link := filepath.Join(t.TempDir(), "kubectl-kproxy")
	path, err := filepath.Abs(binary)
	w.must(err)
	w.must(os.Symlink(path, link))
	plugin := func(user string, args ...string) (string, string, int) {
		t.Helper()
		cmd := host.Namespace.Command(w.ctx, link, append(args, "--kubeconfig", w.File(user+".kubeconfig"))...)
		var out, complaint bytes.Buffer
		cmd.Stdout, cmd.Stderr = &out, &complaint
		err := cmd.Run()
		if _, failed := err.(*exec.ExitError); err != nil && !failed {
			t.Fatal(err)
		}
		return out.String(), complaint.String(), cmd.ProcessState.ExitCode()
	}
	for user, want := range map[string]map[string]string{
		"viewer": {
			"node": "absent: no pod of kproxy", "waits": "absent: pod kproxy-waits doesn't run: ImagePullBackOff: no such image",
			"hangs": "timed out: not within 5s", "refuses": "failed: ",
		},
		"lister": {
			"node": "absent: no pod of kproxy", "waits": "absent: pod kproxy-waits doesn't run", "hangs": `forbidden: `,
			"refuses": `User "lister" cannot create resource "pods/portforward" in API group "" in the namespace "kube-system"`,
		},
	} {
		out, complaint, status := plugin(user, "status", "-o", "json", "--timeout", "5s")
		var r kproxies.Report
		if err := json.Unmarshal([]byte(out), &r); err != nil {
			t.Fatalf("as %s: %v, %s", user, err, complaint)
		}
		if status != 1 || !strings.Contains(complaint, "4 of 4 nodes didn't answer") || len(r.Nodes) != len(want) {
			t.Errorf("as %s: status %d, %q, %d nodes", user, status, complaint, len(r.Nodes))
		}
		for _, n := range r.Nodes {
			if got := fmt.Sprintf("%s: %s", n.State, n.Error); !strings.Contains(got, want[n.Node]) || want[n.Node] == "" {
				t.Errorf("as %s: node %s is %q, want %q", user, n.Node, got, want[n.Node])
			}
		}
	}
	// The dashboard says the same of each node, and of a right that is missing.
	for user, want := range map[string]map[string]string{
		"viewer":   {"node": "absent: no pod of kproxy", "waits": "absent: pod kproxy-waits doesn't run", "hangs": "timed out: not within", "refuses": "failed: "},
		"lister":   {"node": "absent: ", "waits": "absent: ", "hangs": "forbidden: ", "refuses": `User "lister" cannot create resource "pods/portforward"`},
		"stranger": {},
	} {
		w.asksDashboard(link, user, want)
	}
	for user, try := range map[string]struct{ command, want string }{
		"stranger": {"status", `list nodes: nodes is forbidden: User "stranger" cannot list resource "nodes" in API group "" at the cluster scope (deploy/plugin has roles with the rights)`},
		"viewer":   {"pin default/web kernel --node hangs", `cannot create resource "pods/exec"`},
	} {
		if _, complaint, status := plugin(user, strings.Fields(try.command)...); status != 1 || !strings.Contains(complaint, try.want) {
			t.Errorf("%s as %s: status %d, %q, want %q", try.command, user, status, complaint, try.want)
		}
	}
}

// asksDashboard waits until the dashboard of all nodes has each node's state, or says that nodes can't be listed where none is wanted.
func (w *world) asksDashboard(program, user string, want map[string]string) {
	w.Helper()
	host := w.net.Backends[pods].Namespace
	ctx, cancel := context.WithTimeout(w.ctx, time.Minute)
	defer cancel()
	cmd := host.Command(ctx, program, "ui", "--address", "127.0.0.1:8249", "--timeout", "5s", "--kubeconfig", w.File(user+".kubeconfig"))
	w.must(cmd.Start())
	defer func() {
		_ = cmd.Process.Kill() // it may have ended
		_ = cmd.Wait()
	}()
	client := host.HTTPClient(5 * time.Second)
	get := func(path string, into any) error {
		resp, err := client.Get("http://127.0.0.1:8249/api/v1/" + path)
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		return json.NewDecoder(resp.Body).Decode(into)
	}
	for {
		var list kproxies.NodeList
		var summary kproxies.Summary
		err := errors.Join(get("nodes", &list), get("summary", &summary))
		if err == nil && len(list.Rows) != len(want) {
			err = fmt.Errorf("%d nodes, want %d", len(list.Rows), len(want))
		}
		for _, n := range list.Rows {
			if got := fmt.Sprintf("%s: %s", n.State, n.Error); !strings.Contains(got, want[n.Node]) {
				err = fmt.Errorf("node %s is %q, want %q", n.Node, got, want[n.Node])
			}
		}
		denied := fmt.Sprintf("User %q cannot list resource \"nodes\"", user)
		if err == nil && len(want) == 0 && !strings.Contains(fmt.Sprint(summary.Verdict), denied) {
			err = fmt.Errorf("verdict %v, want %q", summary.Verdict, denied)
		}
		if err == nil {
			return
		}
		if ctx.Err() != nil {
			w.Fatalf("the dashboard as %s: %v", user, err)
		}
		time.Sleep(200 * time.Millisecond)
	}
}

// makePod registers a pod of kproxy as the DaemonSet's controller and its node's kubelet would.
func (w *world) makePod(name, node string, runs bool) {
	w.Helper()
	p, err := w.client.core.Pods("kube-system").Create(w.ctx, &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"k8s-app": "kproxy"}},
		Spec:       corev1.PodSpec{NodeName: node, HostNetwork: true, ServiceAccountName: "kproxy", Containers: []corev1.Container{{Name: "kproxy", Image: "kproxy"}}},
	}, metav1.CreateOptions{})
	w.must(err)
	s := corev1.ContainerStatus{Name: "kproxy", Ready: runs}
	p.Status.Phase = corev1.PodRunning
	if runs {
		s.State.Running = &corev1.ContainerStateRunning{}
	} else {
		p.Status.Phase = corev1.PodPending
		s.State.Waiting = &corev1.ContainerStateWaiting{Reason: "ImagePullBackOff", Message: "no such image"}
	}
	p.Status.ContainerStatuses = []corev1.ContainerStatus{s}
	_, err = w.client.core.Pods("kube-system").UpdateStatus(w.ctx, p, metav1.UpdateOptions{})
	w.must(err)
}
