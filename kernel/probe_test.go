package kernel_test

import (
	"context"
	"os/exec"
	"strings"
	"testing"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/kerneltest"
)

func TestProbeOfThisHost(t *testing.T) {
	kerneltest.Namespace(t)
	sets, err := kernel.OpenIPSets()
	if err != nil {
		t.Fatal(err)
	}
	defer sets.Close()
	h, err := kernel.NewProber(sets).Probe(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range h.Caps.All {
		t.Logf("%-30s %-5t %s", c.Name, c.Supported, c.Reason)
		if !c.Supported && c.Name != "ipvs" {
			t.Errorf("%s isn't supported: %s", c.Name, c.Reason)
		}
	}
	if err := h.Missing(); err != nil || !h.Caps.IPTables.Supported || !h.IPv6 || !h.RandomFully || !h.SocketMatch {
		t.Errorf("Probe = %+v, missing %v", h, err)
	}
	if left, _ := sets.List(nil); len(left) > 0 {
		t.Errorf("sets left behind: %v", left)
	}
	for _, v := range []kernel.Variant{kernel.VariantNFT(), kernel.VariantLegacy()} {
		text, _ := exec.Command(v.Program[0] + "-save").Output()
		if s := string(text); kernelOwn(s) {
			t.Errorf("chains left behind:\n%s", s)
		}
	}
}

func kernelOwn(s string) bool { return strings.Contains(s, kernel.Prefix) }
