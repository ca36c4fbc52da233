package main

import (
	"archive/tar"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/urfave/cli/v2"

	"kproxy.dev/kproxy/plan"
)

// reported runs kproxy bugreport and returns the files of its archive.
func reported(t *testing.T, words ...string) map[string]string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "report.tar.gz")
	if got := runLine(t, append([]string{"bugreport", "--timeout", "10m", "--output", name}, words...)...); got.status != 0 || !strings.Contains(got.stdout, "open index.html") {
		t.Fatalf("%+v", got)
	}
	if info, err := os.Stat(name); err != nil || info.Mode().Perm() != 0o600 {
		t.Fatalf("%v, %v", info, err)
	}
	f, err := os.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	files := map[string]string{}
	for r := tar.NewReader(z); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return files
		} else if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		_, below, _ := strings.Cut(h.Name, "/")
		files[below] = string(text)
		files["folder"] = path.Dir(h.Name)
	}
}

func TestBugreport(t *testing.T) {
	f := dns()
	f.status.Node, f.status.Services[0].Namespace = "node-of-acme", "billing-acme"
	f.past = []plan.Event{{Time: time.Now(), Kind: "offload", Service: "billing-acme/invoices", Message: "it is steady"}}
	f.log = "level=INFO msg=\"took over\" token=s3cr3t-value from=192.0.2.77\n"
	socket := f.serve(t)
	files := reported(t, "--socket", socket)
	for name, want := range map[string]string{
		"index.html": "What stands out", "status.json": `"node-of-acme"`, "status.txt": "billing-acme/", "describe.txt": "Service:", "events.txt": "it is steady",
		"log.txt": "took over", "host.txt": "# /proc/version", "sysctl.txt": "net.ipv4.ip_forward = ", "rules/ip-rule.txt": "lookup", "versions.txt": "kproxy dev",
		"config.json": "example", "interfaces.txt": "127.0.0.1/8",
	} {
		if name == "rules/ip-rule.txt" {
			want = "rule "
		}
		if !strings.Contains(files[name], want) {
			t.Errorf("%s has no %q: %.300q", name, want, files[name])
		}
	}
	for name, text := range files {
		if strings.Contains(text, "s3cr3t") {
			t.Errorf("%s has the secret", name)
		}
	}
	masked := reported(t, "--socket", socket, "--mask")
	if len(masked) != len(files) {
		t.Errorf("masked, %d files of %d", len(masked), len(files))
	}
	for name, text := range masked {
		for _, secret := range []string{"acme", "invoices", "192.0.2.77", "s3cr3t"} {
			if strings.Contains(text, secret) || strings.Contains(name, secret) {
				t.Errorf("masked, %s has %q", name, secret)
			}
		}
	}
	if !strings.Contains(masked["log.txt"], "took over") {
		t.Errorf("masked, the log is %q", masked["log.txt"])
	}
	one, other := reported(t, "--socket", socket, "--mask-key", "k"), reported(t, "--socket", socket, "--mask-key", "k")
	if one["status.json"] != other["status.json"] || one["status.json"] == masked["status.json"] {
		t.Error("the same key doesn't make the same names, or another does")
	}
}

// Of many services a report has some, the one in trouble first, and a mask hides the names of all.
func TestBugreportOfManyServices(t *testing.T) {
	f := dns()
	like := f.status.Services[0]
	for i := range servicesReported {
		like.Namespace, like.Name = fmt.Sprintf("tenant-%d", i), "acme"
		f.status.Services = append(f.status.Services, like)
	}
	last := &f.status.Services[len(f.status.Services)-1]
	last.Namespace, last.Problems = "troubled", []string{"nobody knows"}
	f.log = fmt.Sprintf("level=INFO msg=\"it is about tenant-%d\"\n", servicesReported-2)
	socket := f.serve(t)
	files := reported(t, "--socket", socket)
	var st plan.Status
	if err := json.Unmarshal([]byte(files["status.json"]), &st); err != nil || len(st.Services) != servicesReported || st.Services[0].Namespace != "troubled" {
		t.Fatalf("%v; %d services, the first %+v", err, len(st.Services), st.Services[:1])
	}
	if log := reported(t, "--socket", socket, "--mask")["log.txt"]; strings.Contains(log, "tenant") || !strings.Contains(log, "it is about") {
		t.Errorf("masked, the log is %q", log)
	}
}

// A report names the kubeconfig that kproxy runs with, and has none of the credentials in it.
func TestBugreportHasNoCredentials(t *testing.T) {
	outsideOfPods(t)
	secrets := []string{"0paque-t0ken", "t0ken-in-a-file", "a2V5LWRhdGE="}
	tokenFile := writeFile(t, "token", secrets[1])
	kubeconfig := writeFile(t, "admin.conf", `apiVersion: v1
kind: Config
clusters: [{name: acme, cluster: {server: "https://api.acme.example:6443"}}]
users: [{name: admin, user: {token: `+secrets[0]+`, tokenFile: `+tokenFile+`, client-key-data: `+secrets[2]+`}}]
contexts: [{name: acme, context: {cluster: acme, user: admin}}]
current-context: acme
`)
	f := dns()
	err := withFlags(t, []string{"--kubeconfig", kubeconfig}, func(c *cli.Context) {
		cfg, err := configureValid(c)
		if err != nil {
			t.Fatal(err)
		}
		s := &settled{}
		s.now.Store(&cfg)
		f.config = map[string]any{"kproxy.dev": configz{s, false}, "kubeproxy.config.k8s.io": configz{s, true}}
	})
	if err != nil {
		t.Fatal(err)
	}
	f.log = `level=ERROR msg="list failed" err="Get \"https://api.acme.example:6443/api\": lookup api.acme.example: no such host" header="Authorization: Bearer ` + secrets[0] + "\"\n"
	socket := f.serve(t)
	open, masked := reported(t, "--socket", socket), reported(t, "--socket", socket, "--mask")
	if !strings.Contains(open["config.json"], kubeconfig) || !strings.Contains(open["log.txt"], "lookup api.acme.example") {
		t.Errorf("the configuration is %.500q, the log %q", open["config.json"], open["log.txt"])
	}
	for i, files := range []map[string]string{open, masked} {
		for name, text := range files {
			for _, secret := range append(secrets, []string{"acme", "admin.conf"}[:2*i]...) {
				if strings.Contains(text, secret) {
					t.Errorf("masked %t, %s has %q", i == 1, name, secret)
				}
			}
		}
	}
}

// A report of a node whose kproxy is dead says so, and has what the kernel has.
func TestBugreportOfTheDead(t *testing.T) {
	files := reported(t, "--socket", filepath.Join(t.TempDir(), "none.sock"))
	if !strings.Contains(files["index.html"], "kproxy says nothing: kproxy isn&#39;t running here") || files["sysctl.txt"] == "" || files["interfaces.txt"] == "" {
		t.Errorf("%.2000s", files["index.html"])
	}
	if _, ok := files["status.json"]; ok {
		t.Error("there is a status")
	}
	if os.Geteuid() != 0 {
		t.Skip("needs root: to list nftables")
	}
	t.Setenv("PATH", t.TempDir()) // as in the image, which has no nft
	if text := reported(t, "--socket", filepath.Join(t.TempDir(), "none.sock"))["rules/nft.txt"]; !strings.Contains(text, "\n# ipv4\n") || !strings.Contains(text, "\n# ipv6\n") {
		t.Errorf("without programs, nft.txt is %q", text)
	}
}

func TestLastLines(t *testing.T) {
	var l lastLines
	for i := range 20000 {
		fmt.Fprintf(&l, "line %05d %s\n", i, strings.Repeat("x", 20))
	}
	text := string(l.text())
	if len(text) > linesAtMost || len(text) < linesAtMost/2-100 || !strings.HasPrefix(text, "line ") || !strings.HasSuffix(text, "line 19999 "+strings.Repeat("x", 20)+"\n") {
		t.Errorf("%d bytes: %.60q", len(text), text)
	}
	if n := strings.Count(text, "\n"); n*32 != len(text) {
		t.Errorf("%d lines in %d bytes", n, len(text))
	}
}
