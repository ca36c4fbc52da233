package kernel

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"kproxy.dev/kproxy/plan"
)

func TestForwarding(t *testing.T) {
	const v4, v6 = "net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding"
	tests := []struct {
		name     string
		settings map[string]string
		want     [2]plan.Capability
	}{
		{"both on", map[string]string{v4: "1\n", v6: "1\n"}, [2]plan.Capability{
			{Name: "IPv4 forwarding", Supported: true, Reason: "sysctl net.ipv4.ip_forward"},
			{Name: "IPv6 forwarding", Supported: true, Reason: "sysctl net.ipv6.conf.all.forwarding"},
		}},
		{"IPv6 off, the kernel's default", map[string]string{v4: "1\n", v6: "0\n"}, [2]plan.Capability{
			{Name: "IPv4 forwarding", Supported: true, Reason: "sysctl net.ipv4.ip_forward"},
			{Name: "IPv6 forwarding", Reason: "sysctl net.ipv6.conf.all.forwarding"},
		}},
		{"IPv4 off, another value for IPv6", map[string]string{v4: "0\n", v6: "2\n"}, [2]plan.Capability{
			{Name: "IPv4 forwarding", Reason: "sysctl net.ipv4.ip_forward"},
			{Name: "IPv6 forwarding", Supported: true, Reason: "sysctl net.ipv6.conf.all.forwarding"},
		}},
		{"no IPv6", map[string]string{v4: "1\n"}, [2]plan.Capability{
			{Name: "IPv4 forwarding", Supported: true, Reason: "sysctl net.ipv4.ip_forward"},
			{Name: "IPv6 forwarding", Supported: true, Reason: "no IPv6"},
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			root := t.TempDir()
			for path, value := range tt.settings {
				path = filepath.Join(root, path)
				if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(path, []byte(value), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			if diff := cmp.Diff(tt.want, forwardingUnder(root)); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
	t.Run("a setting that can't be read", func(t *testing.T) {
		root := t.TempDir()
		if err := os.MkdirAll(filepath.Join(root, v4), 0o755); err != nil { // a directory
			t.Fatal(err)
		}
		if c := forwardingUnder(root)[0]; !c.Supported || !strings.Contains(c.Reason, "read sysctl net.ipv4.ip_forward: ") {
			t.Errorf("%+v, want it supported and the error told", c)
		}
	})
}
