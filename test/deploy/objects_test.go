// Package deploy tests the manifests in deploy/: that they are what Kubernetes
// takes and what they say of themselves, and that the DaemonSet's containers run
// with the privileges it gives them, from the image's root file system, in a real
// container runtime (runc), and serve real traffic. Capabilities, mounts and
// commands are read from the manifests, so tests and manifests can't differ.
package deploy

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	apps "k8s.io/api/apps/v1"
	core "k8s.io/api/core/v1"
	rbac "k8s.io/api/rbac/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"
)

// folder is that of the manifests, root the repository's.
const (
	root   = "../.."
	folder = root + "/deploy"
)

// manifests are what deploy/base holds.
type manifests struct {
	daemonSet   apps.DaemonSet
	configMap   core.ConfigMap
	account     core.ServiceAccount
	clusterRole rbac.ClusterRole
	binding     rbac.ClusterRoleBinding
}

// kustomization is the part of kustomize's file that deploy/ uses.
type kustomization struct {
	meta.TypeMeta `json:",inline"`
	Namespace     string   `json:"namespace"`
	Resources     []string `json:"resources"`
	Components    []string `json:"components"`
	Labels        []struct {
		Pairs map[string]string `json:"pairs"`
	} `json:"labels"`
	Images []struct {
		Name    string `json:"name"`
		NewName string `json:"newName"`
		NewTag  string `json:"newTag"`
	} `json:"images"`
	ConfigMapGenerator []struct {
		Name      string   `json:"name"`
		Namespace string   `json:"namespace"`
		Files     []string `json:"files"`
		Options   struct {
			DisableNameSuffixHash bool              `json:"disableNameSuffixHash"`
			Labels                map[string]string `json:"labels"`
		} `json:"options"`
	} `json:"configMapGenerator"`
	Patches []struct {
		Target struct {
			Kind string `json:"kind"`
			Name string `json:"name"`
		} `json:"target"`
		Patch string `json:"patch"`
	} `json:"patches"`
}

// load decodes the base, strictly: a field that Kubernetes doesn't have is an error.
func load(t *testing.T) *manifests {
	t.Helper()
	m := &manifests{}
	into := map[string]any{
		"DaemonSet": &m.daemonSet, "ConfigMap": &m.configMap, "ServiceAccount": &m.account,
		"ClusterRole": &m.clusterRole, "ClusterRoleBinding": &m.binding,
	}
	for _, name := range kustomize(t, filepath.Join(folder, "base")).Resources {
		for i, document := range documents(t, filepath.Join(folder, "base", name)) {
			var kind meta.TypeMeta
			if err := yaml.Unmarshal(document, &kind); err != nil {
				t.Fatalf("%s: document %d: %v", name, i+1, err)
			}
			target, ok := into[kind.Kind]
			if !ok {
				t.Fatalf("%s: a %s, which occurs twice or isn't expected", name, kind.Kind)
			}
			delete(into, kind.Kind)
			if err := yaml.UnmarshalStrict(document, target); err != nil {
				t.Fatalf("%s: %s: %v", name, kind.Kind, err)
			}
		}
	}
	for kind := range into {
		t.Fatalf("deploy/base has no %s", kind)
	}
	return m
}

// kustomize decodes a folder's kustomization, strictly.
func kustomize(t *testing.T, folder string) kustomization {
	t.Helper()
	var k kustomization
	text, err := os.ReadFile(filepath.Join(folder, "kustomization.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	if err := yaml.UnmarshalStrict(text, &k); err != nil {
		t.Fatalf("%s: %v", folder, err)
	}
	return k
}

// documents splits a file at its '---' lines.
func documents(t *testing.T, path string) [][]byte {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return bytes.Split(text, []byte("\n---\n"))
}

// container returns a container of the DaemonSet by its name.
func (m *manifests) container(name string) (*core.Container, error) {
	spec := &m.daemonSet.Spec.Template.Spec
	for _, list := range [][]core.Container{spec.InitContainers, spec.Containers} {
		for i := range list {
			if list[i].Name == name {
				return &list[i], nil
			}
		}
	}
	return nil, fmt.Errorf("the DaemonSet has no container %s", name)
}

// volume returns a volume of the DaemonSet by its name.
func (m *manifests) volume(name string) (*core.Volume, error) {
	volumes := m.daemonSet.Spec.Template.Spec.Volumes
	for i := range volumes {
		if volumes[i].Name == name {
			return &volumes[i], nil
		}
	}
	return nil, fmt.Errorf("the DaemonSet has no volume %s", name)
}

// dockerfile returns the instructions of deploy/Dockerfile, a line each.
func dockerfile(t *testing.T) []string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(folder, "Dockerfile"))
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for line := range strings.Lines(strings.ReplaceAll(string(text), "\\\n", "")) {
		if line = strings.TrimSpace(line); line != "" && !strings.HasPrefix(line, "#") {
			out = append(out, line)
		}
	}
	return out
}
