package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"k8s.io/client-go/tools/clientcmd"

	kproxies "kproxy.dev/kproxy/cmd/kproxy/cluster"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/trace"
)

// roles of deploy/plugin that users of the cluster have: all by a ClusterRole, and in the namespace
// of kproxy's pods by a Role.
var roles = map[string]struct{ cluster, pods []string }{
	"operator": {[]string{"kproxy-viewer", "kproxy-operator"}, []string{"kproxy-viewer", "kproxy-operator"}},
	"viewer":   {[]string{"kproxy-viewer"}, []string{"kproxy-viewer"}},
	"tracer":   {[]string{"kproxy-viewer", "kproxy-tracer"}, []string{"kproxy-viewer"}},
	"lister":   {[]string{"kproxy-viewer"}, nil}, // sees the pods, and may not connect to them
	"stranger": {},
}

// plugin asks all nodes by `kubectl kproxy`, with the rights that deploy/plugin gives and without, while a node's
// kproxy hangs, while a node can't be reached and while one has none, and checks what it says.
func (c *cluster) plugin(ctx context.Context) error {
	if err := c.preparePlugin(ctx); err != nil {
		return err
	}
	for _, step := range []struct {
		name string
		do   func(context.Context) error
	}{
		{"status", c.pluginStatus}, {"trace", c.pluginTrace}, {"trace --in-pod", c.pluginInPod}, {"connections, events, top", c.pluginLists}, {"drift", c.pluginDrift},
		{"bugreport", c.pluginBugreport}, {"pin", c.pluginPin}, {"rights", c.pluginRights}, {"ui", c.pluginUI}, {"a kproxy that hangs", c.pluginHangs}, {"a node that can't be reached", c.pluginCut},
		{"a node without kproxy", c.pluginAbsent}, {"ui, a node without kproxy", c.pluginUIAbsent},
	} {
		if err := step.do(ctx); err != nil {
			return fmt.Errorf("kubectl kproxy: %s: %w", step.name, err)
		}
		fmt.Printf("kubectl kproxy: %s: as it should be\n", step.name)
	}
	return nil
}

func (c *cluster) preparePlugin(ctx context.Context) error {
	if err := c.apply(ctx, loadManifest); err != nil {
		return err
	}
	if _, err := c.kubectl(ctx, "apply", "-k", filepath.Join(c.repository, "deploy/plugin")); err != nil {
		return err
	}
	for user, has := range roles {
		for _, role := range has.cluster {
			if _, err := c.kubectl(ctx, "create", "clusterrolebinding", user+"-"+role, "--clusterrole", role, "--user", user); err != nil {
				return err
			}
		}
		for _, role := range has.pods {
			if _, err := c.kubectl(ctx, "-n", "kube-system", "create", "rolebinding", user+"-"+role, "--role", role, "--user", user); err != nil {
				return err
			}
		}
		access, err := clientcmd.LoadFromFile(c.kube)
		if err != nil {
			return err
		}
		for _, info := range access.AuthInfos {
			info.Impersonate = user
		}
		if err := clientcmd.WriteToFile(*access, c.access(user)); err != nil {
			return err
		}
	}
	return errors.Join(os.Symlink(c.kproxy(), filepath.Join(c.state, "kubectl-kproxy")), c.rolledOut(ctx, "default", "server", "client"))
}

// access is the kubeconfig of a user.
func (c *cluster) access(user string) string { return filepath.Join(c.state, user+".kubeconfig") }

// kproxyAs runs `kubectl kproxy` as a user.
func (c *cluster) kproxyAs(ctx context.Context, user string, args ...string) (string, error) {
	return run(ctx, "env", c.pluginArgs(user, args...)...)
}

// pluginArgs are env's to run `kubectl kproxy` as a user.
func (c *cluster) pluginArgs(user string, args ...string) []string {
	search := filepath.Join(c.programs, "bin") + ":" + c.state + ":" + os.Getenv("PATH") // kubectl looks for plugins there
	return append([]string{"PATH=" + search, "KUBECONFIG=" + c.access(user), "kubectl", "kproxy"}, args...)
}

// report returns what `kubectl kproxy status` says, and an error if its exit status isn't the one that goes with it.
func (c *cluster) report(ctx context.Context, args ...string) (r kproxies.Report, err error) {
	out, failed := c.kproxyAs(ctx, "viewer", append([]string{"status", "-o", "json", "--timeout", "5s"}, args...)...)
	if err := json.Unmarshal([]byte(out), &r); err != nil {
		return r, errors.Join(err, failed)
	}
	silent := 0
	for _, n := range r.Nodes {
		if n.Version == "" {
			silent++
		}
	}
	if silent > 0 != (failed != nil) || silent > 0 && !strings.Contains(failed.Error(), fmt.Sprintf("%d of %d nodes didn't answer", silent, len(c.nodes))) {
		return r, fmt.Errorf("%d of %d nodes answered nothing, and the error is %v", silent, len(c.nodes), failed)
	}
	return r, nil
}

// stateOf waits until the report has a node in a state.
func (c *cluster) stateOf(ctx context.Context, n *node, want kproxies.State) error {
	return poll(ctx, 2*time.Minute, func() error {
		r, err := c.report(ctx)
		if err != nil {
			return err
		}
		for _, of := range r.Nodes {
			if of.Node == n.name && of.State != want || of.Node != n.name && of.State != "alive" {
				return fmt.Errorf("node %s is %q (%s), want %q on %s alone", of.Node, of.State, of.Error, want, n.name)
			}
		}
		if len(r.Nodes) != len(c.nodes) {
			return fmt.Errorf("%d nodes are listed, want all %d", len(r.Nodes), len(c.nodes))
		}
		return nil
	})
}

func (c *cluster) pluginStatus(ctx context.Context) error {
	return poll(ctx, 2*time.Minute, func() error {
		r, err := c.report(ctx, "svc/server")
		if err != nil {
			return err
		}
		if len(r.Nodes) != len(c.nodes) || len(r.Services) != 1 {
			return fmt.Errorf("%d nodes and %d services, want %d and 1", len(r.Nodes), len(r.Services), len(c.nodes))
		}
		if s := r.Services[0]; s.Nodes != len(c.nodes) || s.Endpoints != len(c.nodes) || s.Connections.Total == 0 {
			return fmt.Errorf("service %+v, want it on each node, with an endpoint on each and connections", s)
		}
		return nil
	})
}

// client is the pod on a node that asks the service.
func (c *cluster) client(ctx context.Context, n *node) (string, error) {
	name, err := c.kubectl(ctx, "get", "pod", "-l", "app=client", "--field-selector", "spec.nodeName="+n.name, "-o", "name")
	return strings.TrimSpace(name), err
}

func (c *cluster) pluginTrace(ctx context.Context) error {
	for _, n := range c.nodes {
		// In the kernel, once it is there: in userspace, the way to an endpoint on the pod's own bridge isn't known for certain.
		if err := poll(ctx, 2*time.Minute, func() error { return c.traceFrom(ctx, n) }); err != nil {
			return err
		}
	}
	out, err := c.kproxyAs(ctx, "viewer", "trace", "node/n1", "10.96.0.80:80")
	if err == nil && !strings.Contains(out, "on node n1\nFORWARDED") {
		err = fmt.Errorf("from node n1: %s", out)
	}
	return err
}

// traceFrom traces from the client on a node.
func (c *cluster) traceFrom(ctx context.Context, n *node) error {
	pod, err := c.client(ctx, n)
	if err != nil {
		return err
	}
	out, err := c.kproxyAs(ctx, "viewer", "trace", pod, "svc/server:80", "-o", "json")
	if err != nil {
		return err
	}
	var r trace.Result
	if err := json.Unmarshal([]byte(out), &r); err != nil {
		return err
	}
	if want := n.podPrefix(); r.Verdict != trace.Forwarded || r.Service != "default/server" || !want.Contains(r.From) {
		return fmt.Errorf("from %s on %s: %s to %q from %s, want forwarded to default/server from %s: %+v", pod, n.name, r.Verdict, r.Service, r.From, want, r.Findings)
	}
	return nil
}

// pluginInPod traces from a pod that has a rule of its own for one address, as a service mesh has for all; in a namespace
// whose Pod Security forbids it; and without the right.
func (c *cluster) pluginInPod(ctx context.Context) error {
	n := c.nodes[1]
	pod, err := c.client(ctx, n)
	if err != nil {
		return err
	}
	if _, err := c.kproxyAs(ctx, "viewer", "trace", "--in-pod", pod, "svc/server:80"); err == nil || !strings.Contains(err.Error(), `User "viewer" cannot patch resource "pods/ephemeralcontainers"`) {
		return fmt.Errorf("without the right: %w", err)
	}
	first, err := n.exec(ctx, "pgrep", "-o", "-f", "until curl")
	if err != nil {
		return err
	}
	rule := []string{"iptables", "-t", "nat", "-A", "OUTPUT", "-d", "10.96.0.1", "-p", "tcp", "-j", "REDIRECT", "--to-ports", "15001"}
	if strings.Split(c.modes, ",")[0] == "nftables" { // whose image has no iptables to read that with
		rule = []string{"nft", "table ip mesh { chain output { type nat hook output priority -100; ip daddr 10.96.0.1 tcp dport 443 redirect to :15001; }; }"}
	}
	if _, err := n.exec(ctx, append([]string{"nsenter", "-t", strings.TrimSpace(first), "-n"}, rule...)...); err != nil {
		return err
	}
	for address, want := range map[string]struct {
		verdict trace.Verdict
		first   trace.Verdict
		words   string
	}{
		"10.96.0.80:80": {trace.Forwarded, trace.Leaves, ""},
		"10.96.0.1:443": {trace.Refused, trace.Refused, "in " + strings.Replace(pod, "/", " default/", 1) + ": a rule leads the packet to 127.0.0.1:15001"},
	} {
		out, err := c.kproxyAs(ctx, "tracer", "trace", "--in-pod", pod, address, "-o", "json")
		if err != nil {
			return err
		}
		var r trace.Result
		if err := json.Unmarshal([]byte(out), &r); err != nil {
			return err
		}
		if r.Verdict != want.verdict || r.Departure == nil || r.Departure.Verdict != want.first || len(r.Departure.Steps) == 0 || !strings.Contains(r.Culprit, want.words) {
			return fmt.Errorf("from %s to %s: want %s, and %s in the pod: %s", pod, address, want.verdict, want.first, out)
		}
	}
	for _, args := range [][]string{
		{"create", "namespace", "guarded"}, {"label", "namespace", "guarded", "pod-security.kubernetes.io/enforce=baseline"},
		{"-n", "guarded", "run", "guarded", "--image=localhost/agnhost:conformance", "--image-pull-policy=Never", "--", "pause"},
		{"-n", "guarded", "wait", "--for=condition=Ready", "--timeout=2m", "pod/guarded"},
	} {
		if _, err := c.kubectl(ctx, args...); err != nil {
			return err
		}
	}
	if _, err := c.kproxyAs(ctx, "tracer", "trace", "--in-pod", "-n", "guarded", "pod/guarded", "10.96.0.80:80"); err == nil || !strings.Contains(err.Error(), "Pod Security of namespace guarded forbids") {
		return fmt.Errorf("where Pod Security forbids it: %w", err)
	}
	return nil
}

func (c *cluster) pluginLists(ctx context.Context) error {
	for words, want := range map[string]string{
		"connections svc/server": "default/server", "events svc/server": "default/server", "top": "default/server/tcp", "top nodes": "n1 ",
		"status": "default/server ", "status -o name": "default/server\n", "status -o yaml": "name: server",
	} {
		out, err := c.kproxyAs(ctx, "viewer", strings.Fields(words)...)
		if err == nil && !strings.Contains(out, want) {
			err = fmt.Errorf("no %q in what it prints: %s", want, out)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", words, err)
		}
	}
	out, err := c.kproxyAs(ctx, "viewer", "status", "svc/servr")
	if err == nil || !strings.Contains(err.Error(), "did you mean default/server?") {
		return fmt.Errorf("a service that isn't there: %w, %s", err, out)
	}
	return nil
}

// pluginDrift stops a node's kproxy and changes what it has in the kernel. That is found, and gone once it goes on.
func (c *cluster) pluginDrift(ctx context.Context) error {
	same := func() error {
		out, err := c.kproxyAs(ctx, "operator", "drift", "--timeout", "30s")
		if err == nil && strings.Count(out, ": no difference") != len(c.nodes) {
			err = errors.New("not every node is listed")
		}
		if err != nil {
			err = fmt.Errorf("%w: %s", err, out)
		}
		return err
	}
	if err := poll(ctx, 3*time.Minute, same); err != nil || strings.Split(c.modes, ",")[0] != "nftables" {
		return err
	}
	n := c.nodes[1]
	if _, err := n.exec(ctx, "pkill", "-STOP", "-f", "kproxy run"); err != nil {
		return err
	}
	_, err := n.exec(ctx, "nft", "insert rule ip kproxy services counter accept")
	if err == nil {
		var out string
		out, err = c.kproxyAs(ctx, "operator", "drift", "--timeout", "30s")
		if err == nil || !strings.Contains(out, "node "+n.name+": not all is known: timed out: ") || !strings.Contains(out, "    + ip chain services") ||
			strings.Count(out, ": no difference") != len(c.nodes)-1 {
			err = fmt.Errorf("another program's rule isn't found on %s: %w: %s", n.name, err, out)
		} else {
			err = nil
		}
	}
	_, goOn := n.exec(ctx, "pkill", "-CONT", "-f", "kproxy run")
	return errors.Join(err, goOn, poll(ctx, 3*time.Minute, same))
}

// pluginBugreport takes reports of all nodes, and of one. In none is the token of a kproxy's service account, which here is where
// kproxy quotes it.
func (c *cluster) pluginBugreport(ctx context.Context) error {
	n := c.nodes[1]
	pod, err := c.podOf(ctx, n)
	if err != nil {
		return err
	}
	uid, err := c.kubectl(ctx, "-n", "kube-system", "get", pod, "-o", "jsonpath={.metadata.uid}")
	if err != nil {
		return err
	}
	token, err := n.exec(ctx, "bash", "-c", "cat /var/lib/kubelet/pods/"+uid+"/volumes/kubernetes.io~projected/*/token")
	if err == nil {
		_, err = c.kubectl(ctx, "annotate", "service", "server", "kproxy.dev/retries="+token)
	}
	if err == nil {
		err = poll(ctx, time.Minute, func() error { return c.reportsOf(ctx, c.nodes) })
	}
	if err == nil {
		err = c.reportsOf(ctx, []*node{n}, "--node", n.name)
	}
	_, undo := c.kubectl(ctx, "annotate", "service", "server", "kproxy.dev/retries-")
	return errors.Join(err, undo)
}

// reportsOf takes reports, which have to be those of some nodes: each with the service's status, with a secret left out, and its rules.
func (c *cluster) reportsOf(ctx context.Context, nodes []*node, args ...string) error {
	dir, err := os.MkdirTemp(c.state, "reports")
	if err != nil {
		return err
	}
	archive := dir + ".tar.gz"
	if _, err := c.kproxyAs(ctx, "operator", append([]string{"bugreport", "--output", archive}, args...)...); err != nil {
		return err
	}
	if _, err := run(ctx, "tar", "-xzf", archive, "-C", dir); err != nil {
		return err
	}
	folders, err := filepath.Glob(dir + "/*")
	if err != nil || len(folders) != len(nodes) {
		return fmt.Errorf("reports %q of %d nodes: %w", folders, len(nodes), err)
	}
	for i, n := range nodes {
		if !strings.HasPrefix(filepath.Base(folders[i]), "kproxy-bugreport-"+n.name+"-") {
			return fmt.Errorf("report %s isn't that of node %s", folders[i], n.name)
		}
		for where, want := range map[string]string{"status.txt": "default/server", "status.json": "[secret]", "rules": "10.96.0.80"} {
			if _, err := run(ctx, "grep", "-rqF", "-e", want, filepath.Join(folders[i], where)); err != nil {
				return fmt.Errorf("no %q in %s of node %s: %w", want, where, n.name, err)
			}
		}
	}
	if leaks, err := run(ctx, "grep", "-rlE", `eyJ[A-Za-z0-9_-]{10}`, dir); err == nil { // as a JSON Web Token begins
		return fmt.Errorf("a token is in %s", leaks)
	}
	return nil
}

func (c *cluster) pluginPin(ctx context.Context) error {
	n := c.nodes[0]
	if _, err := c.kproxyAs(ctx, "operator", "pin", "svc/server", "kernel"); err != nil {
		return err
	}
	out, err := c.kproxyAs(ctx, "operator", "pin", "svc/server", "userspace", "--node", n.name)
	if err != nil || out != "node "+n.name+": default/server: userspace\n" {
		return fmt.Errorf("on one node: %w, %q", err, out)
	}
	if strings.Split(c.modes, ",")[0] != "userspace" {
		err = poll(ctx, time.Minute, func() error {
			r, err := c.report(ctx, "svc/server")
			if err != nil {
				return err
			}
			d := r.Services[0].Differences
			if i := slices.IndexFunc(d, func(d kproxies.Difference) bool { return d.Node == n.name && d.What == "in "+string(plan.Userspace) }); i < 0 || d[i].Since.IsZero() {
				return fmt.Errorf("differences %+v, want one of %s, since a moment", d, n.name)
			}
			return nil
		})
	}
	out, undo := c.kproxyAs(ctx, "operator", "pin", "svc/server", "auto")
	if strings.Count(out, "auto\n") != len(c.nodes) {
		return errors.Join(err, undo, fmt.Errorf("on all nodes: %q", out))
	}
	return errors.Join(err, undo)
}

// pluginRights: who lacks a right is told which.
func (c *cluster) pluginRights(ctx context.Context) error {
	for _, try := range []struct{ user, command, want string }{
		{"stranger", "status", `User "stranger" cannot list resource "nodes"`},
		{"stranger", "trace pod/x svc/server", `User "stranger" cannot list resource "nodes"`},
		{"lister", "top", `forbidden: `},
		{"lister", "top", `User "lister" cannot create resource "pods/portforward"`},
		{"viewer", "pin svc/server kernel", `User "viewer" cannot create resource "pods/exec"`},
		{"viewer", "drift", `User "viewer" cannot list resource`},
		{"viewer", "bugreport --output /dev/null", `User "viewer" cannot create resource "pods/exec"`},
	} {
		out, err := c.kproxyAs(ctx, try.user, strings.Fields(try.command)...)
		if err == nil || !strings.Contains(err.Error(), try.want) {
			return fmt.Errorf("%s as %s: %w, want an error with %s; it prints %s", try.command, try.user, err, try.want, out)
		}
	}
	return nil
}

// pluginHangs stops all processes of a node's kproxy for a while.
func (c *cluster) pluginHangs(ctx context.Context) error {
	n := c.nodes[1]
	if _, err := n.exec(ctx, "pkill", "-STOP", "-f", "kproxy run"); err != nil {
		return err
	}
	err := c.stateOf(ctx, n, kproxies.TimedOut)
	_, goOn := n.exec(ctx, "pkill", "-CONT", "-f", "kproxy run")
	return errors.Join(err, goOn, c.rolledOut(ctx, "kube-system", "kproxy"))
}

// pluginCut keeps the API server from a node's kubelet for a while.
func (c *cluster) pluginCut(ctx context.Context) error {
	n := c.nodes[2]
	if _, err := run(ctx, "nft", "table inet cut { chain output { type filter hook output priority 0; tcp dport 10250 ip daddr "+n.address4()+" drop; }; }"); err != nil {
		return err
	}
	err := c.stateOf(ctx, n, kproxies.TimedOut)
	_, mend := run(ctx, "nft", "delete table inet cut")
	return errors.Join(err, mend)
}

// pluginAbsent keeps the DaemonSet off a node.
func (c *cluster) pluginAbsent(ctx context.Context) error {
	n := c.nodes[2]
	_, err := c.kubectl(ctx, "-n", "kube-system", "patch", "daemonset", "kproxy", "--patch", `{"spec": {"template": {"spec": {"affinity":
		{"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchExpressions":
		[{"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["`+n.name+`"]}]}]}}}}}}}`)
	return errors.Join(err, c.rolledOut(ctx, "kube-system", "kproxy"), c.stateOf(ctx, n, kproxies.Absent))
}
