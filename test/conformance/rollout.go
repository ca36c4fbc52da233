package main

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"time"
)

//go:embed load.yaml
var loadManifest string

// rollout does with the cluster what docs/migration.md says, while a client on each node asks a
// service again and again.
func (c *cluster) rollout(ctx context.Context) error {
	if err := c.apply(ctx, loadManifest); err != nil {
		return err
	}
	if err := c.rolledOut(ctx, "default", "server", "client"); err != nil {
		return err
	}
	mode := strings.Split(c.modes, ",")[0]
	component := proxies[mode].component
	if err := c.steps(ctx, []step{
		{"nothing", func(context.Context) error { return nil }},
		{"kube-proxy to kproxy, node by node", func(ctx context.Context) error { return c.trial(ctx, component) }},
		{"restart of the DaemonSet", c.restart},
		{"upgrade to another image", func(ctx context.Context) error { return c.upgrade(ctx, component) }},
		{"a node without its API server", c.withoutAPI},
		{"kproxy to kube-proxy, node by node", c.back},
		{"kube-proxy to kproxy again", func(ctx context.Context) error { return c.trial(ctx, component) }},
	}); err != nil {
		return err
	}
	if err := c.reboot(ctx); err != nil {
		return fmt.Errorf("a node that reboots: %w", err)
	}
	return nil
}

// step changes who serves.
type step struct {
	name string
	do   func(context.Context) error
}

// steps takes steps, and prints after each how many connections of the clients on the nodes failed. A step after which the service
// has failed anybody ends with an error.
func (c *cluster) steps(ctx context.Context, steps []step) error {
	fmt.Println("| step | answered | failed | kept connections | broken |\n|---|---|---|---|---|")
	var errs []error
	for _, step := range steps {
		before, err := c.counts(ctx)
		if err != nil {
			return err
		}
		if err := step.do(ctx); err != nil {
			return fmt.Errorf("%s: %w", step.name, err)
		}
		time.Sleep(10 * time.Second) // what the step broke fails in this time
		after, err := c.counts(ctx)
		if err != nil {
			return err
		}
		answered, failed, broken := after["answered"]-before["answered"], after["failed"]-before["failed"], after["broken"]-before["broken"]
		fmt.Printf("| %s | %d | %d | %d | %d |\n", step.name, answered, failed, len(c.nodes)-before["broken"], broken)
		if failed > 0 || broken > 0 || answered == 0 {
			errs = append(errs, fmt.Errorf("%s: %d answered, %d failed, %d kept connections broken", step.name, answered, failed, broken))
		}
	}
	return errors.Join(errs...)
}

// reboot lets a node lose its power and boot again, and waits until its client is answered. What is
// lost meanwhile isn't counted: others go on asking the endpoint there until its node counts as gone.
func (c *cluster) reboot(ctx context.Context) error {
	n := c.nodes[len(c.nodes)-1]
	if err := errors.Join(n.crash(), n.start(ctx)); err != nil {
		return err
	}
	began := time.Now()
	return poll(ctx, 5*time.Minute, func() error {
		logs, err := c.kubectl(ctx, "logs", "-l", "app=client", "--tail=-1", "--max-log-requests=9", "--prefix", "--since="+time.Since(began).Round(time.Second).String())
		if err != nil {
			return err
		}
		pod, err := c.kubectl(ctx, "get", "pod", "-l", "app=client", "--field-selector", "spec.nodeName="+n.name, "-o", "name")
		if err != nil {
			return err
		}
		if !strings.Contains(logs, "["+strings.TrimSpace(pod)+"/client] answered") {
			return fmt.Errorf("node %s: its client isn't answered", n.name)
		}
		fmt.Printf("a node that reboots: its client is answered after %.0f s\n", time.Since(began).Seconds())
		return nil
	})
}

// counts returns how many lines of the clients' logs begin with each word.
func (c *cluster) counts(ctx context.Context) (map[string]int, error) {
	logs, err := c.kubectl(ctx, "logs", "-l", "app=client", "--tail=-1", "--max-log-requests=9")
	if err != nil {
		return nil, err
	}
	count := map[string]int{}
	for line := range strings.Lines(logs) {
		word, _, _ := strings.Cut(strings.TrimSpace(line), " ")
		count[word]++
	}
	return count, nil
}

func (c *cluster) rolledOut(ctx context.Context, namespace string, sets ...string) error {
	for _, set := range sets {
		if _, err := c.kubectl(ctx, "-n", namespace, "rollout", "status", "daemonset/"+set, "--timeout", "5m"); err != nil {
			return err
		}
	}
	return nil
}

// trial moves the nodes from kube-proxy to kproxy, as docs/migration.md says under "One node first".
func (c *cluster) trial(ctx context.Context, component string) error {
	_, err := c.kubectl(ctx, "-n", "kube-system", "patch", "daemonset", "kube-proxy", "--patch", `{"spec": {"template": {"spec": {"affinity":
		{"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchExpressions":
		[{"key": "kproxy.dev/proxy", "operator": "NotIn", "values": ["kproxy"]}]}]}}}}}}}`)
	if err != nil {
		return err
	}
	if err := c.rolledOut(ctx, "kube-system", "kube-proxy"); err != nil {
		return err
	}
	overlay, err := c.overlay("overlays/trial", component)
	if err != nil {
		return err
	}
	if _, err := c.kubectl(ctx, "apply", "-k", overlay); err != nil {
		return err
	}
	for _, n := range c.nodes {
		if _, err := c.kubectl(ctx, "label", "node", n.name, "kproxy.dev/proxy=kproxy"); err != nil {
			return err
		}
		var pod string
		if err := poll(ctx, 3*time.Minute, func() (err error) {
			pod, err = c.podOf(ctx, n)
			return err
		}); err != nil {
			return err
		}
		if _, err := c.kubectl(ctx, "-n", "kube-system", "wait", "--for=condition=Ready", pod, "--timeout=3m"); err != nil {
			return err
		}
		if _, err := c.kubectl(ctx, "-n", "kube-system", "exec", pod, "--", "kproxy", "cleanup", "--kube-proxy"); err != nil {
			return err
		}
	}
	return nil
}

// podOf is kproxy's pod on a node.
func (c *cluster) podOf(ctx context.Context, n *node) (string, error) {
	pod, err := c.kubectl(ctx, "-n", "kube-system", "get", "pod", "-l", "k8s-app=kproxy", "--field-selector", "spec.nodeName="+n.name, "-o", "name")
	if pod = strings.TrimSpace(pod); err == nil && (pod == "" || strings.Contains(pod, "\n")) {
		err = fmt.Errorf("node %s has not one pod of kproxy, but %q", n.name, pod)
	}
	return pod, err
}

func (c *cluster) restart(ctx context.Context) error {
	_, err := c.kubectl(ctx, "-n", "kube-system", "rollout", "restart", "daemonset/kproxy")
	return errors.Join(err, c.rolledOut(ctx, "kube-system", "kproxy"))
}

// upgrade rolls out the same program as an image of another name.
func (c *cluster) upgrade(ctx context.Context, component string) error {
	from := "docker.io/library/kproxy:" + c.version
	if component == "mode-nftables" {
		from += "-nftables"
	}
	for _, n := range c.nodes {
		if _, err := n.exec(ctx, filepath.Join(c.programs, "bin/ctr"), "-n", "k8s.io", "images", "tag", "--force", from, "docker.io/library/kproxy:next"); err != nil {
			return err
		}
	}
	_, err := c.kubectl(ctx, "-n", "kube-system", "set", "image", "daemonset/kproxy", "kproxy=kproxy:next", "init=kproxy:next")
	return errors.Join(err, c.rolledOut(ctx, "kube-system", "kproxy"))
}

// withoutAPI cuts a node off from the API server, lets its kproxy die there, waits until the kubelet
// has started it again, by what the API said last, and reconnects the node.
func (c *cluster) withoutAPI(ctx context.Context) error {
	n := c.nodes[0]
	if _, err := run(ctx, "nft", "table inet cut { chain input { type filter hook input priority 0; iifname nodes tcp dport 6443 ip saddr "+n.address4()+" drop; }; }"); err != nil {
		return err
	}
	first, err := n.exec(ctx, "pgrep", "-o", "-x", "kproxy")
	if err == nil {
		_, err = n.exec(ctx, "kill", "-KILL", strings.TrimSpace(first))
	}
	if err == nil {
		err = poll(ctx, 2*time.Minute, func() error {
			now, err := n.exec(ctx, "pgrep", "-o", "-x", "kproxy")
			if err == nil && now == first {
				err = errors.New("kproxy hasn't died")
			}
			if err == nil {
				_, err = n.exec(ctx, "curl", "-sf", "http://"+n.address4()+":10256/livez")
			}
			return err
		})
	}
	time.Sleep(10 * time.Second)
	_, errMend := run(ctx, "nft", "delete table inet cut")
	return errors.Join(err, errMend, c.rolledOut(ctx, "kube-system", "kproxy"))
}

// back moves the nodes to kube-proxy again.
func (c *cluster) back(ctx context.Context) error {
	for _, n := range c.nodes {
		if _, err := c.kubectl(ctx, "label", "node", n.name, "kproxy.dev/proxy-"); err != nil {
			return err
		}
		if err := poll(ctx, 3*time.Minute, func() error {
			pods, err := c.kubectl(ctx, "-n", "kube-system", "get", "pod", "-l", "k8s-app in (kproxy, kube-proxy)", "--field-selector", "spec.nodeName="+n.name,
				"-o", "jsonpath={range .items[*]}{.metadata.labels.k8s-app}={.status.containerStatuses[0].ready} {end}")
			if err == nil && strings.TrimSpace(pods) != "kube-proxy=true" {
				err = fmt.Errorf("on node %s there are %s", n.name, pods)
			}
			return err
		}); err != nil {
			return err
		}
		if _, err := n.exec(ctx, c.kproxy(), "cleanup"); err != nil {
			return err
		}
	}
	return nil
}
