// Package deploy tests the manifests in deploy/: that they are what Kubernetes
// takes and what they say of themselves, and that the DaemonSet's containers run
// with the privileges it gives them, from the image's root file system, in a real
// container runtime (runc), and serve real traffic. Capabilities, mounts and
// commands are read from the manifests, so tests and manifests can't differ.
package deploy

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	apps "k8s.io/api/apps/v1"
	core "k8s.io/api/core/v1"
	rbac "k8s.io/api/rbac/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/strategicpatch"
	"k8s.io/kube-proxy/config/v1alpha1"
	"sigs.k8s.io/yaml"

	"kproxy.dev/kproxy/config"
)

// TestRules: kproxy may do what the ClusterRole system:node-proxier of
// Kubernetes lets kube-proxy do, no more (nodeProxierRules in
// plugin/pkg/auth/authorizer/rbac/bootstrappolicy/policy.go).
func TestRules(t *testing.T) {
	m := load(t)
	want := map[string][]string{
		"/endpoints": {"list", "watch"}, "/services": {"list", "watch"}, "/nodes": {"get", "list", "watch"},
		"discovery.k8s.io/endpointslices": {"list", "watch"}, "networking.k8s.io/servicecidrs": {"list", "watch"},
		"/events": {"create", "patch", "update"}, "events.k8s.io/events": {"create", "patch", "update"},
	}
	have := map[string][]string{}
	for _, r := range m.clusterRole.Rules {
		for _, g := range r.APIGroups {
			for _, resource := range r.Resources {
				have[g+"/"+resource] = append(have[g+"/"+resource], r.Verbs...)
			}
		}
	}
	if diff := cmp.Diff(want, have); diff != "" {
		t.Errorf("rules (-want +got):\n%s", diff)
	}
	if want := (rbac.RoleRef{APIGroup: rbac.GroupName, Kind: "ClusterRole", Name: m.clusterRole.Name}); m.binding.RoleRef != want {
		t.Errorf("the binding is to %v, want %v", m.binding.RoleRef, want)
	}
	subject := rbac.Subject{Kind: "ServiceAccount", Name: m.account.Name, Namespace: m.account.Namespace}
	if diff := cmp.Diff([]rbac.Subject{subject}, m.binding.Subjects); diff != "" {
		t.Errorf("subjects (-want +got):\n%s", diff)
	}
	if got := m.daemonSet.Spec.Template.Spec.ServiceAccountName; got != m.account.Name {
		t.Errorf("the pods have service account %q, want %q", got, m.account.Name)
	}
}

// TestPrivileges: the container that stays has two capabilities and nothing to
// write to but what it shares with the node.
func TestPrivileges(t *testing.T) {
	m := load(t)
	spec := m.daemonSet.Spec.Template.Spec
	c, err := m.container("kproxy")
	if err != nil {
		t.Fatal(err)
	}
	s := c.SecurityContext
	if *s.Privileged || *s.AllowPrivilegeEscalation || !*s.ReadOnlyRootFilesystem {
		t.Errorf("security context %+v, want one without privileges, on a read-only root", s)
	}
	want := &core.Capabilities{Drop: []core.Capability{"ALL"}, Add: []core.Capability{"NET_ADMIN", "NET_RAW"}}
	if diff := cmp.Diff(want, s.Capabilities); diff != "" {
		t.Errorf("capabilities (-want +got):\n%s", diff)
	}
	if spec.SecurityContext.SeccompProfile.Type != core.SeccompProfileTypeRuntimeDefault {
		t.Errorf("seccomp profile %v, want the runtime's", spec.SecurityContext.SeccompProfile)
	}
	if spec.HostPID || spec.HostIPC || !spec.HostNetwork {
		t.Errorf("hostPID %t, hostIPC %t, hostNetwork %t, want only the network", spec.HostPID, spec.HostIPC, spec.HostNetwork)
	}
	for _, v := range spec.Volumes {
		if v.HostPath != nil && *v.HostPath.Type == core.HostPathUnset {
			t.Errorf("volume %s may not be there: say with type what it is", v.Name)
		}
	}
	for _, mount := range c.VolumeMounts {
		if _, err := m.volume(mount.Name); err != nil {
			t.Error(err)
		}
	}
}

// TestTools: kubectl and what selects by the recommended labels find their way
// without being told (Kubernetes, "Recommended Labels" and "Well-Known Annotations").
func TestTools(t *testing.T) {
	m := load(t)
	pod := m.daemonSet.Spec.Template
	if _, err := m.container(pod.Annotations["kubectl.kubernetes.io/default-container"]); err != nil {
		t.Errorf("kubectl's default container: %v", err)
	}
	const label = "app.kubernetes.io/name"
	if on, of := pod.Labels[label], m.daemonSet.Labels[label]; on != "kproxy" || of != "kproxy" {
		t.Errorf("%s is %q on pods and %q on the DaemonSet, want kproxy", label, on, of)
	}
}

// TestUpdate: connections have the time to drain, and two pods can be on a node, of which the new
// one takes over: they declare no ports, which would be the node's, and share where the control socket is.
func TestUpdate(t *testing.T) {
	m := load(t)
	grace := time.Duration(*m.daemonSet.Spec.Template.Spec.TerminationGracePeriodSeconds) * time.Second
	if d := config.Default().DrainTimeout; grace < d+10*time.Second {
		t.Errorf("%s until the pod is killed, but draining alone may take %s", grace, d)
	}
	u := m.daemonSet.Spec.UpdateStrategy
	if r := u.RollingUpdate; u.Type != apps.RollingUpdateDaemonSetStrategyType || r.MaxSurge.IntValue() != 1 || r.MaxUnavailable.IntValue() != 0 {
		t.Errorf("update strategy %+v, want a rolling update with a surge", u)
	}
	components, err := filepath.Glob(folder + "/components/*")
	if err != nil || len(components) == 0 {
		t.Fatalf("components: %v (%v)", components, err)
	}
	for _, c := range components {
		for _, p := range kustomize(t, c).Patches {
			if p.Target.Kind == "DaemonSet" && strings.HasPrefix(p.Patch, "apiVersion:") {
				if err := m.patch(p.Patch); err != nil {
					t.Fatalf("%s: %v", c, err)
				}
			}
		}
	}
	kproxy, err := m.container("kproxy")
	if err != nil || len(kproxy.Ports) > 0 {
		t.Errorf("with every component it declares the ports %+v (%v), want none", kproxy.Ports, err)
	}
	socket := filepath.Dir(config.Default().Socket)
	if v, err := m.volume("run"); err != nil || v.HostPath == nil || v.HostPath.Path != socket {
		t.Errorf("%s, where the control socket is, isn't the node's: %v", socket, err)
	}
}

// TestProbes: they ask what kproxy serves, where it serves it; readiness is this container's.
func TestProbes(t *testing.T) {
	m := load(t)
	c, err := m.container("kproxy")
	if err != nil {
		t.Fatal(err)
	}
	_, port, _ := strings.Cut(configuration(t, m).HealthzBindAddress, ":")
	for name, p := range map[string]*core.Probe{"/livez startup": c.StartupProbe, "/livez": c.LivenessProbe} {
		path, _, _ := strings.Cut(name, " ")
		if p.HTTPGet.Path != path || p.HTTPGet.Port.String() != port {
			t.Errorf("probe %s asks port %s for %s, want %s", name, p.HTTPGet.Port.String(), p.HTTPGet.Path, port)
		}
	}
	if ask := c.ReadinessProbe.Exec; ask == nil || !slices.Equal(ask.Command, []string{c.Command[0], "ready"}) {
		t.Errorf("readiness is asked for by %+v", c.ReadinessProbe.ProbeHandler)
	}
}

// configuration decodes config.conf of the ConfigMap, strictly.
func configuration(t *testing.T, m *manifests) v1alpha1.KubeProxyConfiguration {
	t.Helper()
	var out v1alpha1.KubeProxyConfiguration
	if err := yaml.UnmarshalStrict([]byte(m.configMap.Data["config.conf"]), &out); err != nil {
		t.Fatalf("config.conf: %v", err)
	}
	return out
}

func TestConfiguration(t *testing.T) {
	m := load(t)
	c, d := configuration(t, m), config.Default()
	if c.Kind != "KubeProxyConfiguration" || c.APIVersion != v1alpha1.SchemeGroupVersion.String() {
		t.Errorf("config.conf is a %s of %s", c.Kind, c.APIVersion)
	}
	if c.HealthzBindAddress != d.HealthzBindAddress || c.MetricsBindAddress != d.MetricsBindAddress {
		t.Errorf("addresses %s and %s aren't the usual ones", c.HealthzBindAddress, c.MetricsBindAddress)
	}
	if v, err := m.volume("config"); err != nil || v.ConfigMap.Name != m.configMap.Name {
		t.Errorf("the pods don't mount the ConfigMap %s: %v", m.configMap.Name, err)
	}
}

// TestKustomizations: what they refer to is there, patches are about something,
// and what a strategic merge patch says is valid.
func TestKustomizations(t *testing.T) {
	m := load(t)
	names := map[string]string{"DaemonSet": m.daemonSet.Name, "ConfigMap": m.configMap.Name}
	files, err := filepath.Glob(folder + "/*/*/kustomization.yaml")
	if err != nil || len(files) == 0 {
		t.Fatalf("no components and overlays: %v", err)
	}
	for _, f := range append(files, folder+"/kustomization.yaml", folder+"/base/kustomization.yaml", folder+"/monitoring/kustomization.yaml") {
		dir := filepath.Dir(f)
		k := kustomize(t, dir)
		for _, r := range slices.Concat(k.Resources, k.Components) {
			if _, err := os.Stat(filepath.Join(dir, r)); err != nil {
				t.Errorf("%s: %v", f, err)
			}
		}
		for _, g := range k.ConfigMapGenerator {
			for _, file := range g.Files {
				if _, err := os.Stat(filepath.Join(dir, file[strings.Index(file, "=")+1:])); err != nil {
					t.Errorf("%s: %v", f, err)
				}
			}
		}
		for _, p := range k.Patches {
			if names[p.Target.Kind] != p.Target.Name {
				t.Errorf("%s: patches %s %s, which isn't in deploy/base", f, p.Target.Kind, p.Target.Name)
			}
			if !strings.HasPrefix(p.Patch, "- op:") {
				if p.Target.Kind != "DaemonSet" {
					continue
				}
				var d apps.DaemonSet
				if err := yaml.UnmarshalStrict([]byte(strings.ReplaceAll(p.Patch, "$patch: delete", "")), &d); err != nil {
					t.Errorf("%s: %v", f, err)
				}
			} else if strings.HasPrefix(filepath.Base(dir), "mode-") {
				checkModePatch(t, f, p.Patch)
			} else {
				checkArgumentPatch(t, f, p.Patch)
			}
		}
	}
}

// checkModePatch: a JSON patch (RFC 6902) gives both containers the same mode, one
// that kproxy has.
func checkModePatch(t *testing.T, file, patch string) {
	t.Helper()
	var ops []struct{ Op, Path, Value string }
	if err := yaml.UnmarshalStrict([]byte(patch), &ops); err != nil {
		t.Fatalf("%s: %v", file, err)
	}
	paths := map[string]string{}
	for _, o := range ops {
		mode, ok := strings.CutPrefix(o.Value, "--proxy-mode=")
		if o.Op != "add" || !ok || !slices.Contains(config.Modes, mode) || !strings.HasSuffix(filepath.Dir(file), mode) {
			t.Errorf("%s: %+v doesn't set the mode it is named for", file, o)
		}
		paths[o.Path] = mode
	}
	if len(paths) != 2 || paths["/spec/template/spec/initContainers/0/args/-"] != paths["/spec/template/spec/containers/0/args/-"] {
		t.Errorf("%s: patches %v, want both containers in the same mode", file, paths)
	}
}

// checkArgumentPatch: a JSON patch gives the container that runs kproxy one more
// argument, which is one of kproxy's flags.
func checkArgumentPatch(t *testing.T, file, patch string) {
	t.Helper()
	var ops []struct{ Op, Path, Value string }
	if err := yaml.UnmarshalStrict([]byte(patch), &ops); err != nil {
		t.Fatalf("%s: %v", file, err)
	}
	for _, o := range ops {
		flag, _, _ := strings.Cut(strings.TrimPrefix(o.Value, "--"), "=")
		if o.Op != "add" || o.Path != "/spec/template/spec/containers/0/args/-" || config.FlagOf("metricsBindAddress") != flag {
			t.Errorf("%s: %+v adds no flag that the metrics need", file, o)
		}
	}
}

// TestMonitoring: what the operator is told to scrape is what the pods serve.
func TestMonitoring(t *testing.T) {
	var monitor struct {
		Spec struct {
			JobLabel string `json:"jobLabel"`
			Selector struct {
				MatchLabels map[string]string `json:"matchLabels"`
			} `json:"selector"`
			PodMetricsEndpoints []struct {
				HonorLabels bool `json:"honorLabels"`
				Relabelings []struct {
					TargetLabel string `json:"targetLabel"`
					Replacement string `json:"replacement"`
				} `json:"relabelings"`
			} `json:"podMetricsEndpoints"`
		} `json:"spec"`
	}
	text, err := os.ReadFile(folder + "/monitoring/podmonitor.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if err := yaml.Unmarshal(text, &monitor); err != nil {
		t.Fatal(err)
	}
	labels := load(t).daemonSet.Spec.Template.Labels
	for name, value := range monitor.Spec.Selector.MatchLabels {
		if labels[name] != value {
			t.Errorf("the monitor selects pods with %s %s, those of the DaemonSet have %s", name, value, labels[name])
		}
	}
	if job := labels[monitor.Spec.JobLabel]; job != "kproxy" {
		t.Errorf("the job is called %q, alerts are about kproxy", job)
	}
	endpoint := monitor.Spec.PodMetricsEndpoints[0]
	addresses := 0
	for _, r := range endpoint.Relabelings {
		if r.TargetLabel == "__address__" && strings.HasSuffix(r.Replacement, fmt.Sprintf(":%d", config.MetricsPort)) {
			addresses++
		}
	}
	if addresses != 2 || !endpoint.HonorLabels {
		t.Errorf("the monitor scrapes %+v, the pods serve port %d at addresses of both families", endpoint, config.MetricsPort)
	}
}

// TestDockerfile: it builds with the Go that go.mod asks for, and the image has
// kproxy where the DaemonSet starts it.
func TestDockerfile(t *testing.T) {
	gomod, err := os.ReadFile(root + "/go.mod")
	if err != nil {
		t.Fatal(err)
	}
	version := regexp.MustCompile(`(?m)^go (\S+)$`).FindSubmatch(gomod)
	lines := dockerfile(t)
	if want := "FROM golang:" + string(version[1]) + "-"; !slices.ContainsFunc(lines, func(l string) bool { return strings.HasPrefix(l, want) }) {
		t.Errorf("the Dockerfile doesn't build with the Go of go.mod: no %q", want)
	}
	last := lines[slices.Index(lines, "FROM scratch"):]
	for _, want := range []string{"COPY --from=root /rootfs /", "COPY --from=build /kproxy " + program} {
		if !slices.Contains(last, want) {
			t.Errorf("the final stage lacks %q:\n%s", want, strings.Join(last, "\n"))
		}
	}
	m := load(t)
	for _, name := range []string{"init", "kproxy"} {
		if c, err := m.container(name); err != nil || c.Command[0] != program {
			t.Errorf("container %s doesn't start %s: %v", name, program, err)
		}
	}
}

// folder is that of the manifests, root the repository's.
const (
	root   = "../.."
	folder = root + "/deploy"
)

// manifests holds the objects of deploy/base.
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

// patch applies a strategic merge patch to the DaemonSet.
func (m *manifests) patch(text string) error {
	patch, err := yaml.YAMLToJSON([]byte(text))
	if err != nil {
		return err
	}
	was, err := json.Marshal(m.daemonSet)
	if err != nil {
		return err
	}
	is, err := strategicpatch.StrategicMergePatch(was, patch, apps.DaemonSet{})
	if err != nil {
		return err
	}
	m.daemonSet = apps.DaemonSet{}
	return json.Unmarshal(is, &m.daemonSet)
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

// TestReadersRights: a viewer, and the dashboard that stays, may do what they need and no more: they execute nothing, and connect
// to pods of kproxy's namespace alone. An operator executes commands there alone.
func TestReadersRights(t *testing.T) {
	got := map[string][]string{}
	for _, file := range []string{"plugin/roles.yaml", "components/ui/ui.yaml"} {
		for _, document := range documents(t, filepath.Join(folder, file)) {
			var role rbac.Role // whose fields a ClusterRole has as well
			if err := yaml.Unmarshal(document, &role); err != nil {
				t.Fatal(err)
			}
			for _, rule := range role.Rules {
				of := strings.TrimSpace(role.Name + " " + role.Namespace)
				got[of] = append(got[of], fmt.Sprint(rule.APIGroups, rule.Resources, rule.ResourceNames, rule.Verbs))
			}
		}
	}
	want := map[string][]string{
		"kproxy-viewer": {"[] [nodes] [] [list]", "[] [pods] [] [get list]"},
		"kproxy-viewer kube-system": {
			"[] [pods/portforward] [] [get create]",
			"[apps] [deployments] [kproxy-ui] [get]", // of which kubectl port-forward deployment/kproxy-ui looks up the pods
		},
		"kproxy-operator":             {"[] [services nodes] [] [list watch]", "[discovery.k8s.io] [endpointslices] [] [list watch]"},
		"kproxy-operator kube-system": {"[] [pods/exec] [] [get create]", "[] [pods/log] [] [get]"},
		"kproxy-tracer":               {"[] [pods/ephemeralcontainers] [] [patch]", "[] [pods/log] [] [get]"},
		"kproxy-ui":                   {"[] [nodes] [] [list]"},
		"kproxy-ui kube-system":       {"[] [pods] [] [list]", "[] [pods/portforward] [] [get create]"},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
