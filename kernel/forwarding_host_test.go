package kernel_test

import (
	"os"
	"testing"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/test/kerneltest"
)

// TestForwardingOfThisNamespace: what is told is about the network namespace of
// the calling thread, as of now.
func TestForwardingOfThisNamespace(t *testing.T) {
	kerneltest.Namespace(t)
	paths := [2]string{service.IPv4: "/proc/sys/net/ipv4/ip_forward", service.IPv6: "/proc/sys/net/ipv6/conf/all/forwarding"}
	for _, want := range [][2]bool{{true, false}, {false, true}, {false, false}, {true, true}} {
		for _, fam := range service.Families {
			value := "0"
			if want[fam] {
				value = "1"
			}
			if err := os.WriteFile(paths[fam], []byte(value), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		got := kernel.Forwarding()
		if got[0].Supported != want[0] || got[1].Supported != want[1] {
			t.Errorf("%+v, want supported %v", got, want)
		}
	}
}
