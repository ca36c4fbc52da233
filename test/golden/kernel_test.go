package golden

import (
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/tools/txtar"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/ipvs"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/source/file"
	"kproxy.dev/kproxy/test/kerneltest"
	"kproxy.dev/kproxy/test/program"
	"kproxy.dev/kproxy/web"
)

// settleTime bounds the wait for kproxy to have programmed the kernel, in a
// virtual machine without help of the processor as well.
const settleTime = 2 * time.Minute

// TestKernel runs kproxy on the manifests of every scenario and compares what
// `ipvsadm -Ln`, `ip address` and `ipset save` print with the scenario's
// sections. Mode auto beside a firewall programs what mode ipvs does where a scenario says nothing else
// of it, as TestScenarios finds, and is tried where it does.
func TestKernel(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	if err := ipvs.Load(); err != nil {
		t.Skipf("needs IPVS in the kernel: %v", err)
	}
	if _, err := exec.LookPath("ipvsadm"); err != nil {
		t.Skipf("needs ipvsadm: %v", err)
	}
	files, err := filepath.Glob("*.txtar")
	if err != nil {
		t.Fatal(err)
	}
	binary := kproxy(t)
	for _, mode := range []plan.Mode{plan.ModeIPVS, plan.ModeAuto} {
		for _, file := range files {
			if mode == plan.ModeAuto && !differs(t, file) {
				continue
			}
			t.Run(string(mode)+"/"+strings.TrimSuffix(file, ".txtar"), func(t *testing.T) { checkKernel(t, binary, mode, file) })
		}
	}
}

// differs reports whether a scenario has something to say of mode auto's virtual servers or sets.
func differs(t *testing.T, name string) bool {
	t.Helper()
	archive, err := txtar.ParseFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return slices.ContainsFunc(archive.Files, func(f txtar.File) bool { return f.Name == "auto/ipvs" || f.Name == "auto/sets" })
}

// kproxy is the program under test.
func kproxy(t *testing.T) string {
	t.Helper()
	path, err := program.Kproxy(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	return path
}

func checkKernel(t *testing.T, binary string, mode plan.Mode, name string) {
	archive, err := txtar.ParseFile(name)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	manifests := filepath.Join(dir, "manifests")
	if err := os.Mkdir(manifests, 0o755); err != nil {
		t.Fatal(err)
	}
	wantIPVS := kerneltest.SortServers(section(archive, mode, "ipvs"))
	wantSets := section(archive, mode, "sets")
	for _, f := range archive.Files {
		if strings.HasPrefix(f.Name, "manifests/") {
			if err := os.WriteFile(filepath.Join(manifests, filepath.Base(f.Name)), f.Data, 0o644); err != nil {
				t.Fatal(err)
			}
		}
	}
	kerneltest.Namespace(t)
	if mode == plan.ModeAuto { // else it would take nftables
		if out, err := exec.Command("iptables", "-P", "FORWARD", "DROP").CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	addNode(t, manifests)
	socket := filepath.Join(dir, "kproxy.sock")
	log := start(t, binary, dir, append([]string{"run", "--mode", string(mode), "--manifests", manifests, "--hostname-override", "node-1",
		"--health-check", "off", "--socket", socket, "--state-dir", filepath.Join(dir, "state")}, flagsOf(archive)...)...)
	client := web.NewClient(socket)
	deadline := time.Now().Add(settleTime)
	for {
		status, err := client.Status(t.Context())
		over := time.Now().After(deadline)
		if (err != nil || status.Sync.Generation == 0) && !over {
			time.Sleep(50 * time.Millisecond) // programs would only take kproxy's time
			continue
		}
		gotIPVS, gotSets := kerneltest.SortServers(kerneltest.Ipvsadm(t)+linkText(t)), savedSets(t)
		if wantIPVS == gotIPVS && wantSets == gotSets && err == nil && status.Sync.Generation > 0 {
			return
		}
		if over {
			text, _ := os.ReadFile(log)
			t.Fatalf("status: %v\nvirtual servers and addresses (-golden +kernel):\n%s\nsets (-golden +kernel):\n%s\nkproxy's log:\n%s",
				err, cmp.Diff(wantIPVS, gotIPVS), cmp.Diff(wantSets, gotSets), text)
		}
		time.Sleep(200 * time.Millisecond)
	}
}

// section returns what a scenario says of a mode, without comments; sets' lines
// are in order. Where mode auto has none, mode ipvs's is it.
func section(a *txtar.Archive, mode plan.Mode, name string) string {
	at := slices.IndexFunc(a.Files, func(f txtar.File) bool { return f.Name == string(mode)+"/"+name })
	if at < 0 && mode == plan.ModeAuto {
		return section(a, plan.ModeIPVS, name)
	}
	if at < 0 {
		return ""
	}
	var lines []string
	for line := range strings.Lines(string(a.Files[at].Data)) {
		if !strings.HasPrefix(line, "#") {
			lines = append(lines, line)
		}
	}
	if name == "sets" {
		slices.Sort(lines)
	}
	return strings.Join(lines, "")
}

// addNode gives the namespace the addresses that the scenario's Node object has,
// or those that stand for them.
func addNode(t *testing.T, manifests string) {
	t.Helper()
	snapshot, problems, err := file.Load([]string{manifests}, "node-1")
	if err != nil || len(problems) > 0 {
		t.Fatalf("load manifests: %v, %v", err, problems)
	}
	addresses := snapshot.Node().Addresses
	if len(addresses) == 0 {
		addresses = []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")}
	}
	link := &netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Name: "node0"}}
	if err := netlink.LinkAdd(link); err != nil {
		t.Fatal(err)
	}
	for _, a := range addresses {
		addr, err := netlink.ParseAddr(kernel.HostPrefix(a))
		if err == nil {
			err = netlink.AddrAdd(link, addr)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := netlink.LinkSetUp(link); err != nil {
		t.Fatal(err)
	}
}

// start runs kproxy until the test ends, and returns where its log is.
func start(t *testing.T, binary, dir string, args ...string) string {
	t.Helper()
	log, err := os.Create(filepath.Join(dir, "log"))
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	cmd := exec.Command(binary, args...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = dir, log, log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		timer := time.AfterFunc(settleTime, func() { _ = cmd.Process.Kill() })
		defer timer.Stop()
		if err := cmd.Wait(); err != nil {
			text, _ := os.ReadFile(log.Name())
			t.Errorf("kproxy: %v\n%s", err, text)
		}
	})
	return log.Name()
}

// linkText prints the addresses of kproxy's link as the goldens do.
func linkText(t *testing.T) string {
	t.Helper()
	link, err := netlink.LinkByName(kernel.DummyLink)
	if err != nil {
		return "" // not yet, or not needed
	}
	addrs, err := netlink.AddrList(link, netlink.FAMILY_ALL)
	if err != nil {
		t.Fatal(err)
	}
	var all []netip.Addr
	for _, a := range addrs {
		if ip, ok := netip.AddrFromSlice(a.IP); ok && !ip.IsLinkLocalUnicast() {
			all = append(all, ip.Unmap())
		}
	}
	slices.SortFunc(all, netip.Addr.Compare)
	var b strings.Builder
	for _, a := range all {
		family := [2]string{service.IPv4: "inet", service.IPv6: "inet6"}[service.FamilyOf(a)]
		fmt.Fprintf(&b, "%s %s %s\n", kernel.DummyLink, family, kernel.HostPrefix(a))
	}
	return b.String()
}

// savedSets prints the sets that have entries as the goldens do, in order, but
// for the heartbeat's.
func savedSets(t *testing.T) string {
	t.Helper()
	out, err := exec.Command("ipset", "save").Output()
	if err != nil {
		t.Fatalf("ipset save: %v", err)
	}
	var lines []string
	created := map[string]string{}
	for line := range strings.Lines(string(out)) {
		words := strings.Fields(line)
		switch {
		case strings.HasPrefix(words[1], kernel.SetAlive), strings.HasPrefix(words[1], kernel.SetStarting):
		case words[0] == "create":
			created[words[1]] = strings.Join(words[:3], " ") + "\n"
		case words[0] == "add":
			lines = append(lines, strings.Join(words[:3], " ")+"\n", created[words[1]])
		}
	}
	slices.Sort(lines)
	return strings.Join(slices.Compact(lines), "")
}
