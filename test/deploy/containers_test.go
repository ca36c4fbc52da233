package deploy

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	core "k8s.io/api/core/v1"

	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/plan"
)

// probe asks what the kubelet asks, on the node's own address.
func (n *node) probe(ctx context.Context, p *core.Probe) error {
	client := n.net.Node.HTTPClient(0) // ctx bounds it
	url := fmt.Sprintf("http://%s:%s%s", n.net.Config.NodeAddresses()[0], p.HTTPGet.Port.String(), p.HTTPGet.Path)
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", p.HTTPGet.Path, resp.Status)
	}
	return nil
}

// asBooted makes the node's settings what they are on a node that nobody has
// set up.
func (n *node) asBooted() {
	n.Helper()
	n.sysctl("ipv4/ip_forward", "0")
	n.sysctl("ipv4/tcp_early_demux", "1")
	n.sysctl("ipv4/udp_early_demux", "1")
	n.sysctl("netfilter/nf_conntrack_acct", "0")
}

// initialize runs the init container to its end.
func (n *node) initialize(edits ...edit) error {
	n.Helper()
	ctx, cancel := context.WithTimeout(n.ctx, within(time.Minute))
	defer cancel()
	p := n.start("init", edits...)
	if err := p.Wait(ctx); err != nil {
		return fmt.Errorf("init container: %w:\n%s", err, p.Log())
	}
	return nil
}

// holdsRules makes a variant of iptables the one that holds the node's rules, by
// the chain that the kubelet leaves as a hint.
func (n *node) holdsRules(variant string) {
	n.Helper()
	for _, program := range []string{"iptables-" + variant, "ip6tables-" + variant} {
		if out, err := n.net.Node.Command(n.ctx, program, "-t", "mangle", "-N", "KUBE-IPTABLES-HINT").CombinedOutput(); err != nil {
			n.Fatalf("%s: %v\n%s", program, err, out)
		}
	}
}

// asks exchanges with the service from the client, over both protocols and
// families, and checks that the endpoint sees the client's own address.
func (n *node) asks(m lab.Manifest) {
	n.Helper()
	for family, client := range n.net.Config.ClientAddresses(0) {
		for _, network := range []string{"tcp", "udp"} {
			ctx, cancel := context.WithTimeout(n.ctx, within(10*time.Second))
			a, err := n.net.Client.Ask(ctx, network, address(m, family), "hello")
			cancel()
			if err != nil {
				n.Fatalf("%s to %s: %v", network, address(m, family), err)
			}
			if a.Peer != client {
				n.Errorf("%s to %s: the endpoint saw %s, want the client's address %s", network, address(m, family), a.Peer, client)
			}
		}
	}
}

// TestServe: with the privileges of the DaemonSet kproxy can all it can as a
// privileged container, in every data plane of this host, and a pod that
// replaces another loses no connection.
func TestServe(t *testing.T) {
	for _, variant := range []string{"nft", "legacy"} {
		t.Run(variant, func(t *testing.T) {
			n := newNode(t)
			n.holdsRules(variant)
			n.asBooted()
			m := service(n)
			n.must(m.Write(n.manifestDir()))

			n.must(n.initialize())
			first := n.start("kproxy")
			n.ready(first)
			if log := first.Log(); strings.Contains(log, "not permitted") {
				t.Errorf("after the init container something is left to set:\n%s", log)
			}
			n.asks(m)
			if st := n.exec("kproxy", program, "status"); !strings.Contains(st, "web") {
				t.Errorf("kproxy status in the container says:\n%s", st)
			}
			capabilities := n.capabilities()
			if c := capabilities["iptables"]; !c.Supported || !strings.Contains(c.Reason, variant) {
				t.Errorf("kproxy works with %q, want the variant that has the node's rules, %s", c.Reason, variant)
			}
			plane := plan.IPTables
			if capabilities["ipvs"].Supported {
				plane = plan.IPVS
			}
			n.carriedBy("web", plane)
			n.asks(m)

			n.replace(first, m, plane)
			if diff := cmp.Diff(n.privileged(), capabilities); diff != "" {
				t.Errorf("what kproxy can do (-as a privileged container +as deployed):\n%s", diff)
			}
			n.cleanUp(variant)
		})
	}
}

// replace updates the pod while clients go on.
func (n *node) replace(first *lab.Process, m lab.Manifest, plane plan.DataPlane) {
	n.Helper()
	traffic, err := lab.StartTraffic(n.ctx, lab.TrafficConfig{From: n.net.Client, Target: address(m, 0), Network: "tcp", Rate: 50, Count: 5000, Timeout: within(2 * time.Second)})
	n.must(err)
	grace := time.Duration(*n.deploy.daemonSet.Spec.Template.Spec.TerminationGracePeriodSeconds) * time.Second
	n.must(first.Stop(within(grace)))
	second := n.start("kproxy")
	n.ready(second)
	n.carriedBy("web", plane)
	results := traffic.Stop()
	if failed := results.Failed(); len(results) == 0 || len(failed) > 0 {
		n.Errorf("%d of %d connections failed while the pod was replaced:\n%s", len(failed), len(results), failed)
	}
	n.asks(m)
	n.must(second.Stop(within(grace)))
}

// capabilities are what kproxy says it can do.
func (n *node) capabilities() map[string]plan.CapStatus {
	n.Helper()
	st, err := n.client.Status(n.ctx)
	n.must(err)
	out := map[string]plan.CapStatus{}
	for _, c := range st.Capabilities {
		out[c.Name] = c
	}
	return out
}

// privileged are the capabilities of kproxy in a privileged container.
func (n *node) privileged() map[string]plan.CapStatus {
	n.Helper()
	c, err := n.deploy.container("init")
	n.must(err)
	all := n.bundleOf(c)
	p := n.start("kproxy", func(b *bundle) {
		b.Process.Capabilities, b.Linux = all.Process.Capabilities, linux{Namespaces: b.Linux.Namespaces, CgroupsPath: b.Linux.CgroupsPath}
	})
	n.ready(p)
	out := n.capabilities()
	n.must(p.Stop(within(time.Minute)))
	return out
}

// cleanUp runs kproxy cleanup with the privileges of the DaemonSet, as who goes
// back to kube-proxy does, and checks that nothing of kproxy's is left.
func (n *node) cleanUp(variant string) {
	n.Helper()
	ctx, cancel := context.WithTimeout(n.ctx, within(time.Minute))
	defer cancel()
	p := n.start("kproxy", func(b *bundle) { b.Process.Args = []string{program, "cleanup"} })
	if err := p.Wait(ctx); err != nil {
		n.Fatalf("kproxy cleanup: %v\n%s", err, p.Log())
	}
	for _, show := range []string{"iptables-" + variant + "-save", "ip6tables-" + variant + "-save", "ipset list -name", "ip link", "ip rule"} {
		words := strings.Fields(show)
		out, err := n.net.Node.Command(n.ctx, words[0], words[1:]...).CombinedOutput()
		if text := strings.ToLower(string(out)); err != nil || strings.Contains(text, "kproxy") || strings.Contains(text, "lookup 10249") {
			n.Errorf("after kproxy cleanup, %s: %v\n%s", show, err, out)
		}
	}
}

// TestEachCapabilityIsNeeded: without one of them kproxy doesn't run, and says
// what it lacks.
func TestEachCapabilityIsNeeded(t *testing.T) {
	tests := []struct {
		variant, without, want string
	}{
		{"nft", "CAP_NET_ADMIN", "CAP_NET_ADMIN"},
		{"legacy", "CAP_NET_ADMIN", "CAP_NET_ADMIN"},
		{"legacy", "CAP_NET_RAW", "CAP_NET_RAW"},
	}
	for _, tt := range tests {
		t.Run(tt.variant+" without "+tt.without, func(t *testing.T) {
			n := newNode(t)
			n.holdsRules(tt.variant)
			n.must(service(n).Write(n.manifestDir()))
			p := n.start("kproxy", without(tt.without))
			ctx, cancel := context.WithTimeout(n.ctx, within(20*time.Second))
			defer cancel()
			err := p.Wait(ctx)
			var exit *exec.ExitError
			if !errors.As(err, &exit) || exit.ExitCode() != 3 || !strings.Contains(p.Log(), tt.want) {
				t.Errorf("it ended with %v, want exit status 3 and a word about %s:\n%s", err, tt.want, p.Log())
			}
		})
	}
}

// TestWithoutInit: where the init container has not run, kproxy serves all the
// same and says what is wrong and what to do; and the init container without
// privileges fails.
func TestWithoutInit(t *testing.T) {
	n := newNode(t)
	n.asBooted()
	m := service(n)
	n.must(m.Write(n.manifestDir()))
	c, err := n.deploy.container("kproxy")
	n.must(err)
	main := n.bundleOf(c)
	weak := func(b *bundle) { b.Process.Capabilities, b.Linux = main.Process.Capabilities, main.Linux }
	if err := n.initialize(weak); err == nil || !strings.Contains(err.Error(), "privileged container") {
		t.Errorf("an init container that isn't privileged ended with %v, want an error that says so", err)
	}

	p := n.start("kproxy")
	n.ready(p)
	have := n.capabilities()
	// Accounting is on by now: the kernel turns it on itself for a rule that counts
	// bytes (connbytes_mt_check).
	for _, name := range []string{"sysctl net.ipv4.ip_forward", "sysctl net.ipv4.tcp_early_demux"} {
		if c := have[name]; c.Supported || !strings.Contains(c.Reason, "--init-only") || !strings.Contains(c.Reason, "sysctl -w") {
			t.Errorf("status says of %s: %+v, want that it isn't set, and the remedy", name, c)
		}
	}
	n.asks(m) // in userspace, which needs no forwarding
}
