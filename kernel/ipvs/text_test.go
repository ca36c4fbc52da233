package ipvs_test

import (
	"os/exec"
	"testing"

	"github.com/google/go-cmp/cmp"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/ipvs"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/test/kerneltest"
)

// manyKinds are virtual servers of every kind, in no order of ipvsadm's.
func manyKinds() kernel.Ruleset {
	sticky, hashed := virtual(service.TCP, "[fd00:96::2]:443", "[fd01::2]:8443", "[fd01::1]:8443"), virtual(service.TCP, "10.96.0.2:80", "10.1.0.1:8080")
	sticky.Persistence, sticky.Scheduler, sticky.SchedFlags = 10800, "mh", 0x8
	hashed.Scheduler, hashed.SchedFlags = "sh", 0x8
	return ruleset(
		virtual(service.SCTP, "10.96.0.1:7", "10.1.0.1:7"),
		virtual(service.UDP, "10.96.0.1:53", "10.1.0.1:53", "10.1.0.2:53=0"),
		virtual(service.TCP, "10.96.0.10:80", "10.1.0.9:8080", "10.1.0.10:8080"),
		virtual(service.TCP, "10.96.0.1:8080", "10.1.0.1:8080"),
		virtual(service.TCP, "[fd00:96::1]:80", "[fd01::1]:80"),
		sticky, hashed)
}

// TestTextIsIpvsadms: ipvsadm prints the same of what is in the kernel.
func TestTextIsIpvsadms(t *testing.T) {
	needsIPVS(t)
	if _, err := exec.LookPath("ipvsadm"); err != nil {
		t.Skip("needs ipvsadm")
	}
	kerneltest.Namespace(t)
	h := newHost(t)
	want := manyKinds()
	want.Addresses = nil
	if failed := h.bring(want); len(failed) > 0 {
		t.Fatal(failed)
	}
	if diff := cmp.Diff(kerneltest.SortServers(ipvs.Text(want)), kerneltest.Ipvsadm(t)); diff != "" {
		t.Errorf("Text and ipvsadm -Ln (-Text +ipvsadm):\n%s", diff)
	}
}
