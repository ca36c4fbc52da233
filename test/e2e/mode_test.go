package e2e

import (
	"cmp"
	"flag"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/test/program"
)

// mode is the mode that kproxy is tested in: $KPROXY_E2E_MODE, or iptables.
var mode = plan.Mode(cmp.Or(os.Getenv("KPROXY_E2E_MODE"), string(plan.ModeIPTables)))

// hasIPVS: this host's kernel has IPVS.
var hasIPVS = program.HasIPVS()

// kernelPlane is the data plane that mode offloads to on this host.
var kernelPlane = map[plan.Mode]plan.DataPlane{
	plan.ModeIPTables: plan.IPTables,
	plan.ModeIPVS:     plan.IPVS,
	plan.ModeNFTables: plan.NFTables,
	plan.ModeAuto:     plan.NFTables,
}[mode]

// selectTests leaves out the tests whose names begin with another data plane than
// the one that mode offloads to: they aren't run, rather than skipped.
func selectTests() error {
	prefixes := map[plan.DataPlane]string{plan.IPTables: "TestIPTables", plan.IPVS: "TestIPVS", plan.NFTables: "TestNFTables"}
	delete(prefixes, kernelPlane)
	skip := flag.Lookup("test.skip").Value.String()
	for _, p := range prefixes {
		skip = strings.TrimPrefix(skip+"|^"+p, "|")
	}
	return flag.Set("test.skip", skip)
}

// variant names the iptables that this machine's programs are: nft, or legacy where the kernel has no nftables for IP.
var variant = func() string {
	if version, _ := exec.Command("iptables", "-V").Output(); strings.Contains(string(version), "legacy") {
		return "legacy"
	}
	return "nft"
}()

// setParallel has two tests run at a time for each processor unless -parallel says otherwise, as they mostly wait. In a slow guest
// one does: its processor has no time left that tests wait for, and what waits for it misses deadlines.
func setParallel() error {
	given := false
	flag.Visit(func(f *flag.Flag) { given = given || f.Name == "test.parallel" })
	if given {
		return nil
	}
	if slow > 1 {
		return flag.Set("test.parallel", "1")
	}
	return flag.Set("test.parallel", strconv.Itoa(2*runtime.NumCPU()))
}
