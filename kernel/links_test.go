package kernel_test

import (
	"fmt"
	"os/exec"
	"strings"
	"testing"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/kerneltest"
)

// TestLinks: networks whose hosts reach each other directly, and only those.
func TestLinks(t *testing.T) {
	kerneltest.Namespace(t)
	for _, line := range []string{
		"link add lan type veth peer name lan-peer", "address add 10.9.0.1/24 dev lan", "address add fd09::1/64 dev lan nodad",
		"link add pod type veth peer name pod-peer", "address add 10.8.0.1/32 dev pod",
		"link add off type veth peer name off-peer", "address add 10.7.0.1/24 dev off",
		"link add tunnel type veth peer name tunnel-peer", "address add 10.6.0.1 peer 10.6.0.2 dev tunnel",
		"link set lan up", "link set lan-peer up", "link set pod up", "link set pod-peer up", "link set tunnel up", "link set tunnel-peer up",
	} {
		if out, err := exec.Command("ip", strings.Fields(line)...).CombinedOutput(); err != nil {
			t.Fatalf("ip %s: %v: %s", line, err, out)
		}
	}
	links, err := kernel.Links()
	if err != nil {
		t.Fatal(err)
	}
	if got, want := fmt.Sprint(links), "[10.9.0.0/24 fd09::/64]"; got != want {
		t.Errorf("links %s, want %s", got, want)
	}
}
