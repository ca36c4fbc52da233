// Package helm tests deploy/helm: that the chart says the same as deploy/'s kustomizations, with the libraries that
// helm and kubectl render by. It is a module of its own for these.
package helm

import (
	"fmt"
	"io"
	"log"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"helm.sh/helm/v3/pkg/chart"
	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
	"helm.sh/helm/v3/pkg/lint"
	"helm.sh/helm/v3/pkg/lint/support"
	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"
	"sigs.k8s.io/yaml"
)

const (
	digest = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
	deploy = "../../deploy"
	folder = deploy + "/helm/kproxy"
)

func TestMain(m *testing.M) {
	log.SetOutput(io.Discard) // of helm, about the chart's links
	os.Exit(m.Run())
}

// objects are manifests by kind and name.
type objects map[string]map[string]any

func decode(t *testing.T, text string) objects {
	t.Helper()
	out := objects{}
	for _, document := range strings.Split("\n"+text, "\n---\n") {
		var o map[string]any
		if err := yaml.Unmarshal([]byte(document), &o); err != nil {
			t.Fatalf("%v in\n%s", err, document)
		}
		if o == nil {
			continue
		}
		name := fmt.Sprint(o["kind"], " ", o["metadata"].(map[string]any)["name"])
		if out[name] != nil {
			t.Fatalf("%s is there twice", name)
		}
		out[name] = o
	}
	return out
}

// load reads the chart, or that of a release, which KPROXY_CHART names (test/deploy).
func load(t *testing.T) *chart.Chart {
	t.Helper()
	name := os.Getenv("KPROXY_CHART")
	if name == "" {
		name = folder
	}
	c, err := loader.Load(name)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// template is `helm template --namespace NAMESPACE` with values.
func template(t *testing.T, namespace, values string) (objects, error) {
	t.Helper()
	c := load(t)
	given, err := chartutil.ReadValues([]byte(values))
	if err != nil {
		t.Fatal(err)
	}
	all, err := chartutil.ToRenderValues(c, given, chartutil.ReleaseOptions{Name: "kproxy", Namespace: namespace}, nil)
	if err != nil {
		return nil, err
	}
	files, err := engine.Render(c, all)
	if err != nil {
		return nil, err
	}
	var text strings.Builder
	for _, name := range slices.Sorted(maps.Keys(files)) {
		if !strings.HasSuffix(name, ".tpl") {
			text.WriteString(files[name] + "\n---\n")
		}
	}
	return decode(t, text.String()), nil
}

// kustomized is `kubectl kustomize` of deploy/base with more.
func kustomized(t *testing.T, more string) objects {
	t.Helper()
	dir, err := os.MkdirTemp(deploy, "test") // kustomize takes no absolute paths
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	text := "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\nresources: [../base]\nimages: [{name: kproxy, newTag: latest}]\n" + more
	if err := os.WriteFile(filepath.Join(dir, "kustomization.yaml"), []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	m, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(filesys.MakeFsOnDisk(), dir)
	if err != nil {
		t.Fatal(err)
	}
	out, err := m.AsYaml()
	if err != nil {
		t.Fatal(err)
	}
	return decode(t, string(out))
}

// TestSame: with values, the chart renders what kustomize makes with the components that stand for them.
func TestSame(t *testing.T) {
	for _, tc := range []struct{ name, values, kustomization string }{
		{"as it is", "", ""},
		{"mode userspace", "mode: userspace", "components: [../components/mode-userspace]"},
		{"mode iptables", "mode: iptables", "components: [../components/mode-iptables]"},
		{"mode ipvs", "mode: ipvs", "components: [../components/mode-ipvs]"},
		{"mode nftables", "mode: nftables", "components: [../components/mode-nftables]"},
		{"kubeadm", "existingConfigMap: kube-proxy", "components: [../components/kubeadm]"},
		{"trial", "{existingConfigMap: kube-proxy, nodeSelector: {kproxy.dev/proxy: kproxy}}", "components: [../components/kubeadm, ../components/chosen-nodes]"},
		{"metrics", "metricsOnNode: true", "components: [../components/metrics]"},
		{"dashboard of all nodes", "ui: true", "components: [../components/ui]"},
		{"dashboard of all nodes beside the plugin's roles", "{ui: true, pluginRoles: true}", "resources: [../base, ../plugin]\ncomponents: [../components/ui]"},
		{"all", "{mode: nftables, existingConfigMap: kube-proxy, metricsOnNode: true, nodeSelector: {kproxy.dev/proxy: kproxy}}",
			"components: [../components/kubeadm, ../components/mode-nftables, ../components/metrics, ../components/chosen-nodes]"},
		{"image", "image: {repository: registry.example/kproxy, tag: v1}", "images: [{name: kproxy, newName: registry.example/kproxy, newTag: v1}]"},
		{"image by its digest", "{image: {repository: registry.example/kproxy, tag: v1, digest: sha256:" + digest + "}, ui: true}",
			"components: [../components/ui]\nimages: [{name: kproxy, newName: registry.example/kproxy, digest: sha256:" + digest + "}]"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			want := kustomized(t, tc.kustomization)
			got, err := template(t, "kube-system", tc.values)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("(-kustomize +helm):\n%s", diff)
			}
		})
	}
}

// TestValues: what has no kustomization to compare with.
func TestValues(t *testing.T) {
	container := func(t *testing.T, o objects) map[string]any {
		t.Helper()
		spec := o["DaemonSet kproxy"]["spec"].(map[string]any)["template"].(map[string]any)["spec"].(map[string]any)
		return spec["containers"].([]any)[0].(map[string]any)
	}
	t.Run("namespace", func(t *testing.T) {
		got, err := template(t, "proxies", "{pluginRoles: true, ui: true}")
		if err != nil {
			t.Fatal(err)
		}
		for name, o := range got {
			text, err := yaml.Marshal(o)
			if err != nil {
				t.Fatal(err)
			}
			if strings.Contains(string(text), "kube-system") {
				t.Errorf("%s is about kube-system:\n%s", name, text)
			}
		}
		for _, name := range []string{"Role kproxy-viewer", "ClusterRole kproxy-viewer", "Role kproxy-operator", "ClusterRole kproxy-operator", "ClusterRole kproxy-tracer"} {
			if got[name] == nil {
				t.Errorf("there is no %s", name)
			}
		}
	})
	t.Run("configuration", func(t *testing.T) {
		got, err := template(t, "kube-system", "config: {clusterCIDR: 10.42.0.0/16, conntrack: {maxPerCore: 0}}")
		if err != nil {
			t.Fatal(err)
		}
		var conf map[string]any
		text := got["ConfigMap kproxy"]["data"].(map[string]any)["config.conf"].(string)
		if err := yaml.Unmarshal([]byte(text), &conf); err != nil {
			t.Fatal(err)
		}
		if conf["clusterCIDR"] != "10.42.0.0/16" || conf["kind"] != "KubeProxyConfiguration" || conf["healthzBindAddress"] != "0.0.0.0:10256" || conf["conntrack"] == nil {
			t.Errorf("config.conf is\n%s", text)
		}
	})
	t.Run("API server", func(t *testing.T) {
		got, err := template(t, "kube-system", "apiServer: {host: 192.0.2.1}")
		if err != nil {
			t.Fatal(err)
		}
		env := fmt.Sprint(container(t, got)["env"])
		for _, want := range []string{"map[name:KUBERNETES_SERVICE_HOST value:192.0.2.1]", "map[name:KUBERNETES_SERVICE_PORT value:6443]"} {
			if !strings.Contains(env, want) {
				t.Errorf("environment %s lacks %s", env, want)
			}
		}
	})
	for values, want := range map[string]string{
		"mode: iptable":            "mode",
		"tolerations: []":          "tolerations",
		"image: {tag: 1}":          "tag",
		"apiServer: {port: 70000}": "port",
		"{config: {mode: ipvs}, existingConfigMap: kube-proxy}": "existingConfigMap",
	} {
		t.Run("refused: "+values, func(t *testing.T) {
			if _, err := template(t, "kube-system", values); err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%v, want an error about %s", err, want)
			}
		})
	}
}

// TestLint is `helm lint --strict`, for each mode.
func TestLint(t *testing.T) {
	for _, values := range []map[string]any{nil, {"mode": "nftables", "metricsOnNode": true, "pluginRoles": true, "ui": true}} {
		for _, m := range lint.All(folder, values, "kube-system", true).Messages {
			if m.Severity >= support.WarningSev {
				t.Errorf("%v: %s", values, m)
			}
		}
	}
}

// TestDocumented: each value has a line of comment before it, and a place in the schema.
func TestDocumented(t *testing.T) {
	text, err := os.ReadFile(folder + "/values.yaml")
	if err != nil {
		t.Fatal(err)
	}
	schema := string(load(t).Schema)
	before := ""
	for line := range strings.Lines(string(text)) {
		name, _, ok := strings.Cut(line, ":")
		if ok && !strings.HasPrefix(strings.TrimSpace(line), "#") {
			if name != "image" && !strings.HasPrefix(line, " ") && !strings.HasPrefix(before, "#") {
				t.Errorf("%s has no comment before it", name)
			}
			if !strings.HasPrefix(line, "   ") && name != "  requests" && !strings.Contains(schema, `"`+strings.TrimSpace(name)+`"`) {
				t.Errorf("%s isn't in the schema", name)
			}
		}
		before = line
	}
}
