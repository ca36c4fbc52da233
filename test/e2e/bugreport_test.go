package e2e

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"kproxy.dev/kproxy/service"
)

// TestBugreport: a report of a node that serves has what a maintainer asks for, as tar(1) unpacks it; masked, it has no address and
// no name of the node's; and one of a kproxy that was killed has what the kernel goes on with.
func TestBugreport(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	w.must(m.Write(w.manifests))
	w.start()
	w.pin("web", "line", service.PreferKernel)
	w.hold(frontends(m)[0])
	rules, virtual := "rules/iptables-nft-save.txt", "" // as the kernel's file has virtual servers
	switch mode {
	case "nftables":
		rules = "rules/nft.txt"
	case "ipvs": // whose rules name sets only
		rules, virtual = "rules/ipset.txt", "tcp  10.96.0.10:80 "
	}

	report := w.report(t)
	for name, phrases := range map[string][]string{
		"index.html":        {"mode " + string(mode) + ", alive", `<a href="` + rules + `">`},
		"status.json":       {`"name":"web"`},
		"status.txt":        {"default/web:line", "10.2.0.2:9000"},
		"describe.txt":      {"default/web:line"},
		"events.txt":        {"default/web:line"},
		"config.json":       {`"mode":"` + string(mode) + `"`},
		"log.txt":           {"level=INFO"},
		"metrics.txt":       {"kproxy_"},
		"sysctl.txt":        {"net.ipv4.ip_forward = 1", "nf_conntrack_max"},
		"conntrack.txt":     {"TCP 10.1.0.2:", "-> 10.96.0.10:80, replies 10.2.0."},
		"rules/ip-rule.txt": {"ipv4"},
		"interfaces.txt":    {"10.1.0.1/"},
		"net.txt":           {virtual},
		rules:               {"10.96.0.10"},
	} {
		for _, p := range phrases {
			if !strings.Contains(strings.ToLower(report[name]), strings.ToLower(p)) {
				t.Errorf("%s lacks %q: %.500q", name, p, report[name])
			}
		}
	}

	masked := w.report(t, "--mask")
	for name, text := range masked {
		for _, secret := range []string{"10.2.0.", "10.96.0.", "fd00:2:", "fd00::96:", "0A0200", "0A6000"} {
			if strings.Contains(text, secret) {
				t.Errorf("masked, %s has %q", name, secret)
			}
		}
		if strings.Contains(text, "default/web") {
			t.Errorf("masked, %s names the service", name)
		}
	}
	if len(masked) != len(report) || !strings.Contains(masked["status.txt"], "default/name-") {
		t.Errorf("masked, %d of %d files, and the status\n%.500s", len(masked), len(report), masked["status.txt"])
	}

	w.must(w.proxy.Kill())
	dead := w.report(t)
	for name, text := range w.report(t, "--mask") {
		if strings.Contains(text, "default/web") || strings.Contains(text, "10.96.0.") {
			t.Errorf("of a dead one, masked, %s names the service", name)
		}
	}
	if !strings.Contains(dead["index.html"], "kproxy says nothing") || !strings.Contains(dead[rules], "10.96.0.10") {
		t.Errorf("of a dead one, the page is\n%.1000s\nand the rules are\n%.500s", dead["index.html"], dead[rules])
	}
}

// report makes a bug report and returns its files.
func (w *world) report(t *testing.T, args ...string) map[string]string {
	t.Helper()
	dir := t.TempDir()
	began := time.Now()
	w.ok(w.kproxy("bugreport", append(args, "--timeout", "5m", "--output", dir+"/report.tgz")...))
	info, err := os.Stat(dir + "/report.tgz")
	w.must(err)
	t.Logf("%d bytes in %s", info.Size(), time.Since(began).Round(time.Millisecond))
	if out, err := exec.Command("tar", "-xzf", dir+"/report.tgz", "--strip-components=1", "-C", dir).CombinedOutput(); err != nil {
		t.Fatalf("unpack: %v: %s", err, out)
	}
	w.must(os.Remove(dir + "/report.tgz"))
	files := map[string]string{}
	w.must(filepath.Walk(dir, func(path string, info os.FileInfo, err error) error {
		if err != nil || info.IsDir() {
			return err
		}
		text, err := os.ReadFile(path)
		files[strings.TrimPrefix(path, dir+"/")] = string(text)
		return err
	}))
	return files
}
