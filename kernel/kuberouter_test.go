package kernel_test

import (
	"os/exec"
	"strings"
	"testing"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/test/kerneltest"
)

// TestSentIsFiltered: kube-router's chain is found in both variants of iptables.
func TestSentIsFiltered(t *testing.T) {
	kerneltest.Namespace(t)
	found := func(when string, want bool) {
		t.Helper()
		if got, err := kernel.SentIsFiltered(); err != nil || got != want {
			t.Errorf("%s: %v (%v), want %v", when, got, err, want)
		}
	}
	found("nothing is there", false)
	for _, program := range []string{"iptables-nft", "ip6tables-nft", "iptables-legacy", "ip6tables-legacy"} {
		for _, line := range []string{"-N OTHER", "-N KUBE-ROUTER-OUTPUT", "-X KUBE-ROUTER-OUTPUT"} {
			if out, err := exec.Command(program, strings.Fields("-w 5 "+line)...).CombinedOutput(); err != nil {
				t.Fatalf("%s %s: %v: %s", program, line, err, out)
			}
			found(program+" "+line, line == "-N KUBE-ROUTER-OUTPUT")
		}
	}
}
