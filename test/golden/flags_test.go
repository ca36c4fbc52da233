package golden

import (
	"strings"
	"testing"

	"golang.org/x/tools/txtar"

	"kproxy.dev/kproxy/config"
)

// flagsSection holds a scenario's flags, "--name=value" in any number of lines.
const flagsSection = "flags"

// flagsOf returns a scenario's flags.
func flagsOf(a *txtar.Archive) []string {
	for _, f := range a.Files {
		if f.Name == flagsSection {
			return strings.Fields(string(f.Data))
		}
	}
	return nil
}

// configOf returns the default configuration with a scenario's flags applied.
func configOf(t *testing.T, a *txtar.Archive) config.Config {
	t.Helper()
	c := config.Default()
	lists := map[string]*[]string{
		"--cluster-cidr": &c.ClusterCIDRs, "--exclude-cluster-cidr": &c.ExcludeClusterCIDRs, "--service-cidr": &c.ServiceCIDRs, "--nodeport-addresses": &c.NodePortAddresses,
	}
	texts := map[string]*string{
		"--detect-local-mode": &c.DetectLocalMode, "--pod-bridge-interface": &c.PodBridge, "--pod-interface-name-prefix": &c.PodInterfacePrefix,
	}
	for _, flag := range flagsOf(a) {
		name, value, _ := strings.Cut(flag, "=")
		switch {
		case lists[name] != nil:
			*lists[name] = append(*lists[name], strings.Split(value, ",")...)
		case texts[name] != nil:
			*texts[name] = value
		case flag == "--iptables-localhost-nodeports=false":
			c.LocalhostNodePorts = false
		default:
			t.Fatalf("flag %s isn't for scenarios", flag)
		}
	}
	c.Manifests = []string{"manifests"}
	if err := c.Validate(); err != nil {
		t.Fatal(err)
	}
	return c
}
