package kerneltest

import (
	"os"
	"runtime"
	"sync"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
)

// Namespace moves the test to a network namespace of its own, with loopback up,
// until the test ends. It has no name, so it is gone with the test whatever
// happens. The test must stay on the calling goroutine; programs it runs are in
// the namespace as well. Programs of iptables' legacy variant lock the namespace
// instead of the machine, so that tests run in parallel.
func Namespace(t testing.TB) netns.NsHandle {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root: network namespaces")
	}
	LockPerNamespace()
	runtime.LockOSThread()
	before, err := netns.Get()
	if err != nil {
		t.Fatalf("get namespace: %v", err)
	}
	ns, err := netns.New()
	if err != nil {
		t.Fatalf("create namespace: %v", err)
	}
	t.Cleanup(func() {
		if err := netns.Set(before); err != nil {
			t.Errorf("return to namespace: %v", err) // the thread stays locked and ends with the goroutine
			return
		}
		ns.Close()
		before.Close()
		runtime.UnlockOSThread()
	})
	// Links use their IPv6 addresses at once, instead of after a second in which nobody objects (RFC 4862).
	if err := os.WriteFile("/proc/sys/net/ipv6/conf/default/accept_dad", []byte("0"), 0); err != nil && !os.IsNotExist(err) { // without IPv6
		t.Fatalf("set sysctl: %v", err)
	}
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		t.Fatalf("find loopback: %v", err)
	}
	if err := netlink.LinkSetUp(lo); err != nil {
		t.Fatalf("set loopback up: %v", err)
	}
	return ns
}

// LockPerNamespace has programs take the lock of xtables at the network namespace that they are in (xtables_lock in iptables/xshared.c).
var LockPerNamespace = sync.OnceFunc(func() { _ = os.Setenv("XTABLES_LOCKFILE", "/proc/self/ns/net") })
