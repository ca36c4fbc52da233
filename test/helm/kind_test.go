package helm

import (
	"os"
	"strings"
	"testing"

	"sigs.k8s.io/kind/pkg/apis/config/v1alpha4"
	"sigs.k8s.io/yaml"
)

// TestKind: deploy/kind.yaml is what kind reads, without kube-proxy, and the command for it in docs/helm.md names the networks
// and the name of the API server that kind then chooses.
func TestKind(t *testing.T) {
	text, err := os.ReadFile(deploy + "/kind.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var c v1alpha4.Cluster
	if err := yaml.UnmarshalStrict(text, &c); err != nil {
		t.Fatal(err)
	}
	v1alpha4.SetDefaultsCluster(&c)
	if c.Kind != "Cluster" || c.APIVersion != "kind.x-k8s.io/v1alpha4" || c.Networking.KubeProxyMode != "none" || c.Name != "" || len(c.Nodes) < 2 { // of the name kind, as nothing else is given
		t.Errorf("deploy/kind.yaml is %+v", c)
	}
	page, err := os.ReadFile("../../docs/helm.md")
	if err != nil {
		t.Fatal(err)
	}
	if want := "--set config.clusterCIDR=" + c.Networking.PodSubnet + " --set apiServer.host=kind-control-plane"; !strings.Contains(string(page), want) {
		t.Errorf("docs/helm.md has no %q", want)
	}
}
