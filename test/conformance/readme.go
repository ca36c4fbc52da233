package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// registry is the name of the image in a registry, which isn't there: nodes have the image as if they had pulled it.
const registry = "registry.example/kproxy"

// unreleased ends the version of a release that README names and whose notes there may not be yet, without which none is made.
const unreleased = "-conformance"

// installers are programs of others that pages call, and where Go finds them, in the versions of test/helm.
var installers = map[string]string{"helm": "helm.sh/helm/v3/cmd/helm", "kind": "sigs.k8s.io/kind"}

// prelude is bash for what the pages' commands call and isn't here as they take it. All else runs as it is written.
const prelude = `set -euo pipefail
sudo() { "$@"; } # who runs this is root
# kubeadm makes kube-proxy again, of a template: the file has what that makes.
kubeadm() { [[ $* == "init phase addon kube-proxy" ]] && kubectl apply -f "$KUBE_PROXY"; }
# kind reads deploy/kind.yaml, and then finds no docker to start nodes with. Nodes are there already, and have the image.
kind() {
	local said
	case $1 in
	create)
		! said=$(DOCKER_HOST=unix:///none KIND_EXPERIMENTAL_PROVIDER=docker command kind "$@" 2>&1) || return 1
		[[ $said == *"failed to get docker info"* ]] || { echo "$said" >&2; return 1; }
		;;
	*) [[ $* == "load docker-image kproxy:latest" ]] ;;
	esac
}
# The API server has another name than kind's.
helm() { command helm "${@/kind-control-plane/` + controlPlane + `}"; }
`

// buildInstallers builds what pages call besides a release.
func (o *options) buildInstallers(ctx context.Context) error {
	for name, path := range installers {
		module := strings.TrimSuffix(path, "/cmd/"+name)
		version, err := run(ctx, "go", "-C", filepath.Join(o.repository, "test/helm"), "list", "-mod=mod", "-m", "-f", "{{.Version}}", module)
		if err == nil {
			_, err = run(ctx, "env", "CGO_ENABLED=0", "GOFLAGS=-buildvcs=false -trimpath", "GOBIN="+filepath.Join(o.state, "installers"), "go", "install", path+"@"+strings.TrimSpace(version))
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// follow follows, by their own text, docs/helm.md on a cluster that never had a service proxy, then README on one with
// kube-proxy, and back.
func (c *cluster) follow(ctx context.Context) error {
	if err := c.prepareFollow(ctx); err != nil {
		return err
	}
	if err := c.steps(ctx, []step{{"docs/helm.md: kind", c.followKind}}); err != nil {
		return err
	}
	if err := c.leaveKind(ctx); err != nil {
		return err
	}
	if err := c.serve(ctx, "kube-proxy"); err != nil {
		return err
	}
	if _, err := c.kubectl(ctx, "rollout", "restart", "daemonset/client"); err != nil { // what failed meanwhile isn't counted
		return err
	}
	if err := c.rolledOut(ctx, "default", "client"); err != nil {
		return err
	}
	return c.steps(ctx, []step{{"README: quick start", c.followQuickStart}, {"README: back", c.followBack}})
}

// prepareFollow has nodes know the image by the names that manifests and the chart have, and gives the load to the cluster.
func (c *cluster) prepareFollow(ctx context.Context) error {
	ctr := []string{c.program("ctr"), "-n", "k8s.io", "images"}
	for _, n := range c.nodes {
		for _, args := range [][]string{
			{"import", "--local", "--digests", "--base-name", registry, c.released("kproxy-" + c.version + "-image.tar")},
			{"tag", "docker.io/library/kproxy:" + c.version, "docker.io/library/kproxy:latest"},
		} {
			if _, err := n.exec(ctx, append(ctr, args...)...); err != nil {
				return err
			}
		}
	}
	return errors.Join(
		os.WriteFile(c.kubeProxyFile(), []byte(kubeProxyObjects("iptables")), 0o644),
		unix.Mount("tmpfs", "/usr/local/bin", "tmpfs", 0, ""), // README installs there, and the machine's is left alone
		c.apply(ctx, loadManifest),
		c.rolledOut(ctx, "default", "server", "client"),
	)
}

func (c *cluster) kubeProxyFile() string { return filepath.Join(c.state, "kube-proxy.yaml") }

// bash runs commands of a page in a folder, on a node unless it is nil.
func (c *cluster) bash(ctx context.Context, n *node, folder, commands string) (string, error) {
	exec := run
	if n != nil {
		exec = func(ctx context.Context, name string, args ...string) (string, error) {
			return n.exec(ctx, append([]string{name}, args...)...)
		}
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Minute)
	defer cancel()
	path := strings.Join([]string{"/usr/local/bin", filepath.Join(c.programs, "bin"), filepath.Join(c.state, "installers"), os.Getenv("PATH")}, ":")
	out, err := exec(ctx, "env", "PATH="+path, "KUBECONFIG="+c.kube, "KUBE_PROXY="+c.kubeProxyFile(), "bash", "-c", prelude+"cd "+folder+"\n"+commands)
	if err != nil {
		err = fmt.Errorf("%w; it prints %s", err, out)
	}
	return out, err
}

var block = regexp.MustCompile("(?s)\n```\n(.*?)```\n")

// commands returns the blocks of a page below a heading.
func (c *cluster) commands(page, heading string, want int) ([]string, error) {
	text, err := os.ReadFile(filepath.Join(c.repository, page))
	if err != nil {
		return nil, err
	}
	_, section, _ := strings.Cut(string(text), "\n## "+heading+"\n")
	section, _, _ = strings.Cut(section, "\n## ")
	here := strings.NewReplacer("amd64", runtime.GOARCH, strings.TrimSuffix(c.version, unreleased), c.version)
	var out []string
	for _, m := range block.FindAllStringSubmatch(section, -1) {
		out = append(out, here.Replace(m[1]))
	}
	if len(out) != want {
		return nil, fmt.Errorf("%s has %d blocks of commands below %q, want %d", page, len(out), heading, want)
	}
	return out, nil
}

func (c *cluster) followKind(ctx context.Context) error {
	blocks, err := c.commands("docs/helm.md", "kind", 1)
	if err != nil {
		return err
	}
	if _, err := c.bash(ctx, nil, c.repository, blocks[0]); err != nil {
		return err
	}
	return c.rolledOut(ctx, "kube-system", "kproxy")
}

// leaveKind removes kproxy again.
func (c *cluster) leaveKind(ctx context.Context) error {
	if _, err := c.bash(ctx, nil, c.repository, "helm uninstall kproxy --namespace kube-system --wait --cascade foreground"); err != nil {
		return err
	}
	return c.onNodes(ctx, c.kproxy()+" cleanup")
}

// onNodes runs commands of a page on each node, in the folder of the release.
func (c *cluster) onNodes(ctx context.Context, commands string) error {
	for _, n := range c.nodes {
		if _, err := c.bash(ctx, n, c.released(""), commands); err != nil {
			return fmt.Errorf("node %s: %w", n.name, err)
		}
	}
	return nil
}

// left fails where a node has rules or tables with a name, a regular expression.
func (c *cluster) left(ctx context.Context, name string) error {
	return c.onNodes(ctx, "has=$(nft list tables && iptables-save)\n! grep -iE '"+name+"' <<<$has >&2")
}

// divide returns the lines that a comment says are for nodes, and the others.
func divide(commands, comment string) (nodes, others string) {
	for line := range strings.Lines(commands) {
		if strings.Contains(line, comment) {
			nodes += line
		} else {
			others += line
		}
	}
	return nodes, others
}

// followQuickStart follows README's quick start, after which every node serves and kube-proxy has left nothing.
func (c *cluster) followQuickStart(ctx context.Context) error {
	blocks, err := c.commands("README.md", "Quick start in a cluster", 2)
	if err != nil {
		return err
	}
	first, others := divide(blocks[0], "# on a node")
	if said, err := c.bash(ctx, c.nodes[0], c.released(""), first); err != nil || !strings.Contains(said, "VERDICT: this host can run kproxy") {
		return fmt.Errorf("on a node: %w: %s", err, said)
	}
	said, err := c.bash(ctx, nil, c.released(""), others)
	if err != nil {
		return err
	}
	for _, n := range c.nodes {
		if !regexp.MustCompile(`(?m)^` + n.name + ` +alive +` + regexp.QuoteMeta(c.version) + ` `).MatchString(said) {
			return fmt.Errorf("node %s doesn't serve: %s", n.name, said)
		}
	}
	if !regexp.MustCompile(fmt.Sprintf(`(?m)^default/server +10\.96\.0\.80:80/tcp .*/%d `, len(c.nodes))).MatchString(said) {
		return fmt.Errorf("the service isn't there: %s", said)
	}
	return c.left(ctx, "kube-proxy|kube-svc-")
}

// followBack follows README's way back, after which kube-proxy serves and kproxy has left nothing.
func (c *cluster) followBack(ctx context.Context) error {
	blocks, err := c.commands("README.md", "Quick start in a cluster", 2)
	if err != nil {
		return err
	}
	if _, err := c.bash(ctx, nil, c.released(""), blocks[1]); err != nil {
		return err
	}
	if err := c.rolledOut(ctx, "kube-system", "kube-proxy"); err != nil {
		return err
	}
	return poll(ctx, 2*time.Minute, func() error { return c.left(ctx, "kproxy") })
}
