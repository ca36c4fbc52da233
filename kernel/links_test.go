package kernel_test

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/test/kerneltest"
)

// TestLinks: networks whose hosts reach each other directly, and only those; behind
// a bridge, whether the node's rules see what they send each other.
func TestLinks(t *testing.T) {
	kerneltest.Namespace(t)
	for _, line := range []string{
		"link add lan type veth peer name lan-peer", "address add 10.9.0.1/24 dev lan", "address add fd09::1/64 dev lan nodad",
		"link add pod type veth peer name pod-peer", "address add 10.8.0.1/32 dev pod",
		"link add off type veth peer name off-peer", "address add 10.7.0.1/24 dev off",
		"link add tunnel type veth peer name tunnel-peer", "address add 10.6.0.1 peer 10.6.0.2 dev tunnel",
		"link add bridge type bridge", "address add 10.5.0.1/24 dev bridge", "address add fd05::1/64 dev bridge nodad", "link set bridge up",
		"link set lan up", "link set lan-peer up", "link set pod up", "link set pod-peer up", "link set tunnel up", "link set tunnel-peer up",
	} {
		if out, err := exec.Command("ip", strings.Fields(line)...).CombinedOutput(); err != nil {
			t.Fatalf("ip %s: %v: %s", line, err, out)
		}
	}
	for _, tt := range []struct{ calls, links, bridged string }{
		{"1", "[10.9.0.0/24 fd09::/64]", "[10.5.0.0/24 fd05::/64]"},
		{"0", "[10.5.0.0/24 10.9.0.0/24 fd05::/64 fd09::/64]", "[]"},
	} {
		for _, name := range []string{"iptables", "ip6tables"} {
			if err := os.WriteFile("/proc/sys/net/bridge/bridge-nf-call-"+name, []byte(tt.calls), 0o644); err != nil {
				t.Skipf("needs the module br_netfilter to see what bridges pass: %v", err)
			}
		}
		n, err := kernel.ReadNetworks()
		if err != nil {
			t.Fatal(err)
		}
		if fmt.Sprint(n.Links) != tt.links || fmt.Sprint(n.Bridged) != tt.bridged {
			t.Errorf("bridges call netfilter %s: links %s and bridged %s, want %s and %s", tt.calls, n.Links, n.Bridged, tt.links, tt.bridged)
		}
	}
}
