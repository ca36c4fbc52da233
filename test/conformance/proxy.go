package main

import (
	"context"
	_ "embed"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strings"
)

//go:embed kube-proxy.yaml
var kubeProxyManifest string

// proxies are what can serve the cluster: the component of deploy/ that sets kproxy's mode, or
// kube-proxy's mode.
var proxies = map[string]struct{ component, kubeProxyMode string }{
	"userspace":           {component: "mode-userspace"},
	"iptables":            {component: "mode-iptables"},
	"nftables":            {component: "mode-nftables"},
	"auto":                {},
	"kube-proxy":          {kubeProxyMode: "iptables"},
	"kube-proxy-nftables": {kubeProxyMode: "nftables"},
}

// release makes a release. This is done outside, where there is a network for Go's modules.
func (o *options) release(ctx context.Context) error {
	roots := filepath.Join(o.state, "roots") // of each processor
	if err := errors.Join(os.MkdirAll(roots, 0o755), os.Symlink(filepath.Join(o.programs, "rootfs"), filepath.Join(roots, runtime.GOARCH))); err != nil {
		return err
	}
	image := ""
	if o.readme {
		image = registry
		if err := o.buildInstallers(ctx); err != nil {
			return err
		}
	}
	_, err := run(ctx, "env", "VERSION="+o.version, "IMAGE="+image, "KPROXY_ARCHITECTURES="+runtime.GOARCH, "KPROXY_ROOTFS="+roots, filepath.Join(o.repository, "deploy/release.sh"), o.released(""))
	return err
}

// released is a file of the release.
func (o *options) released(name string) string { return filepath.Join(o.state, "release", name) }

// importImages imports the release's images on every node.
func (c *cluster) importImages(ctx context.Context) error {
	archives, err := filepath.Glob(c.released("*-linux-" + runtime.GOARCH + ".tar"))
	if err != nil {
		return err
	}
	for _, n := range c.nodes {
		for _, archive := range archives {
			if err := n.load(ctx, archive); err != nil {
				return err
			}
		}
	}
	return nil
}

// serve lets one proxy serve the cluster, after it has removed what the one before left. An empty
// name leaves none.
func (c *cluster) serve(ctx context.Context, name string) error {
	if err := c.removeProxy(ctx); err != nil {
		return err
	}
	if name == "" {
		return nil
	}
	c.proxy = name
	if err := c.kubeProxy(ctx, proxies[name].kubeProxyMode, proxies[name].kubeProxyMode != ""); err != nil {
		return err
	}
	set := "kube-proxy"
	if proxies[name].kubeProxyMode == "" {
		set = "kproxy"
		overlay, err := c.overlay("overlays/kubeadm", proxies[name].component)
		if err != nil {
			return err
		}
		if _, err := c.kubectl(ctx, "apply", "-k", overlay); err != nil {
			return err
		}
	}
	_, err := c.kubectl(ctx, "-n", "kube-system", "rollout", "status", "daemonset/"+set, "--timeout", "4m")
	return err
}

// kubeProxy makes kube-proxy's ConfigMap as kubeadm does, which kproxy reads as well, and, if it
// shall run, the rest of it.
func (c *cluster) kubeProxy(ctx context.Context, mode string, run bool) error {
	manifest := kubeProxyObjects(mode)
	if !run {
		manifest, _, _ = strings.Cut(manifest, "\n---\n")
	}
	return c.apply(ctx, manifest)
}

func kubeProxyObjects(mode string) string {
	return strings.NewReplacer("{{PODS}}", podNetworkRange, "{{MODE}}", mode, "{{API}}", "https://"+controlPlane+":6443").Replace(kubeProxyManifest)
}

// overlay makes a kustomization of one in deploy/, with the image that was made here and, unless it
// is empty, a component, and returns its folder.
func (c *cluster) overlay(base, component string) (string, error) {
	dir := filepath.Join(c.state, "kustomization")
	deploy, err := filepath.Rel(dir, filepath.Join(c.repository, "deploy"))
	if err != nil {
		return "", err
	}
	tag, components := c.version, ""
	if component == "mode-nftables" {
		tag += "-nftables" // the image without other programs
	}
	if component != "" {
		components = "components: [" + deploy + "/components/" + component + "]\n"
	}
	text := "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\nresources: [" + deploy + "/" + base + "]\n" + components +
		"images: [{name: kproxy, newTag: " + tag + "}]\n"
	return dir, errors.Join(os.MkdirAll(dir, 0o755), os.WriteFile(filepath.Join(dir, "kustomization.yaml"), []byte(text), 0o644))
}

// removeProxy ends the proxy that serves, and lets its program remove what it left on the nodes.
func (c *cluster) removeProxy(ctx context.Context) error {
	if c.proxy == "" {
		return nil
	}
	if _, err := c.kubectl(ctx, "-n", "kube-system", "delete", "daemonset", "--ignore-not-found", "kproxy", "kube-proxy", "--cascade=foreground", "--timeout=3m"); err != nil {
		return err
	}
	cleanup := []string{c.kproxy(), "cleanup"}
	if proxies[c.proxy].kubeProxyMode != "" {
		cleanup = []string{c.program("kube-proxy"), "--cleanup"}
	}
	for _, n := range c.nodes {
		if _, err := n.exec(ctx, cleanup...); err != nil {
			return err
		}
		if _, err := n.exec(ctx, "conntrack", "-F"); err != nil {
			return err
		}
	}
	c.proxy = ""
	return nil
}

// kproxy is the path of the program that the image has.
func (c *cluster) kproxy() string {
	return c.released("kproxy-" + c.version + "-linux-" + runtime.GOARCH)
}
