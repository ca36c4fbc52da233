package offline_test

import (
	"errors"
	"os"
	"os/exec"
	"strings"
	"testing"

	"kproxy.dev/kproxy/agent/offline"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/test/kerneltest"
)

// What a host lacks is found out without leaving anything there. A process of its own
// looks: threads other than the test's are in the namespace that the test came from.
func TestCheckHostChangesNothing(t *testing.T) {
	const inside = "KPROXY_TEST_CHECK_HOST"
	if os.Getenv(inside) == "" {
		kerneltest.Namespace(t)
		before := hostState(t)
		child := exec.Command(os.Args[0], "-test.run", "^"+t.Name()+"$")
		child.Env = append(os.Environ(), inside+"=1")
		if out, err := child.CombinedOutput(); err != nil {
			t.Errorf("%v: %s", err, out)
		}
		if after := hostState(t); after != before {
			t.Errorf("the host was\n%s\nand is\n%s", before, after)
		}
		return
	}
	r, err := offline.CheckHost(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range []plan.Mode{plan.ModeUserspace, plan.ModeIPTables, plan.ModeAuto} {
		if err := r.Missing[m]; err != nil {
			t.Errorf("mode %s: %v", m, err)
		}
	}
	if _, err := os.Stat("/proc/net/ip_vs"); err != nil && r.Missing[plan.ModeIPVS] == nil {
		if err := exec.Command("modprobe", "-n", "-q", "ip_vs").Run(); err != nil {
			t.Errorf("mode ipvs is possible without IPVS (%v)", err)
		}
	}
}

func TestCheckHostNamesWhatIsMissing(t *testing.T) {
	kerneltest.Namespace(t)
	t.Setenv("PATH", t.TempDir())
	r, err := offline.CheckHost(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range []plan.Mode{plan.ModeUserspace, plan.ModeAuto, plan.ModeNFTables} { // these do without
		if r.Missing[m] != nil {
			t.Errorf("mode %s: %v", m, r.Missing[m])
		}
	}
	if len(r.Auto) != 1 || r.Auto[0] != "nftables" {
		t.Errorf("mode auto offloads to %q", r.Auto)
	}
	for _, m := range []plan.Mode{plan.ModeIPTables, plan.ModeIPVS} {
		if missing := (*kernel.Missing)(nil); !errors.As(r.Missing[m], &missing) || missing.What != "iptables" || !strings.Contains(missing.How, "install") {
			t.Errorf("mode %s: %v", m, r.Missing[m])
		}
	}
}

// hostState returns, as text, what probes might change of the calling thread's namespace
// and of the kernel. Of the modules only IPVS counts: probes can't avoid loading others.
func hostState(t *testing.T) string {
	t.Helper()
	var b strings.Builder
	for _, line := range []string{"nft list ruleset", "iptables-legacy-save", "ip -o link", "ip rule", "ip route show table all"} {
		out, err := exec.Command("sh", "-c", line).CombinedOutput()
		if err != nil {
			t.Fatalf("%s: %v: %s", line, err, out)
		}
		b.WriteString("# " + line + "\n" + string(out))
	}
	sets, err := kernel.OpenIPSets()
	if err != nil {
		t.Fatal(err)
	}
	defer sets.Close()
	left, err := sets.List(nil)
	if err != nil || len(left) > 0 {
		t.Errorf("sets: %v (%v)", left, err)
	}
	for _, name := range []string{"/proc/thread-self/net/ip_vs", "/proc/sys/net/netfilter/nf_conntrack_acct"} {
		text, err := os.ReadFile(name)
		b.WriteString("# " + name + "\n" + string(text))
		if err != nil && !os.IsNotExist(err) {
			t.Fatal(err)
		}
	}
	return b.String()
}
