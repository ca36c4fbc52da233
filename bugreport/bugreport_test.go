package bugreport

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"errors"
	"io"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

var when = time.Date(2026, 11, 28, 2, 0, 0, 0, time.UTC)

// unpack returns the files of an archive by their names without the folder.
func unpack(t *testing.T, archive []byte, folder string) map[string]string {
	t.Helper()
	z, err := gzip.NewReader(bytes.NewReader(archive))
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
		name, ok := strings.CutPrefix(h.Name, folder+"/")
		text, err := io.ReadAll(r)
		if err != nil || !ok {
			t.Fatalf("%s: %v", h.Name, err)
		}
		files[name] = string(text)
	}
}

func TestArchive(t *testing.T) {
	var b bytes.Buffer
	r := New(&b, Config{Node: "n1", At: when})
	r.StandsOut("it is <slow>")
	r.Add("status.txt", "status", []byte("all is well\n"), nil)
	r.Add("log.txt", "log", nil, errors.New("kproxy isn't running"))
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	files := unpack(t, b.Bytes(), "kproxy-bugreport-n1-20261128T020000Z")
	page := files["index.html"]
	if len(files) != 2 || files["status.txt"] != "all is well\n" {
		t.Errorf("files: %q", files)
	}
	for _, want := range []string{"it is &lt;slow&gt;", `<a href="status.txt">`, "all is well", "kproxy isn&#39;t running"} {
		if !strings.Contains(page, want) {
			t.Errorf("the page lacks %q:\n%s", want, page)
		}
	}
	// The archive is what tar(1) reads, which takes members of gzip one after another.
	name := filepath.Join(t.TempDir(), "a.tar.gz")
	if err := os.WriteFile(name, b.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("tar", "-xzOf", name, r.Folder()+"/status.txt").CombinedOutput(); err != nil || string(out) != "all is well\n" {
		t.Errorf("tar: %v: %s", err, out)
	}
}

// An archive never gets longer than it may, and the page says what had no room.
func TestArchiveIsBounded(t *testing.T) {
	const room = 3 << 20
	noise := make([]byte, 3<<20)
	for i := range noise {
		noise[i] = byte(rand.IntN(256)) // which doesn't compress
	}
	var b bytes.Buffer
	r := New(&b, Config{Node: "n1", At: when, Room: room})
	r.Add("first.txt", "", noise[:1<<20], nil)
	r.Add("long.txt", "", []byte(strings.Repeat(strings.Repeat("x", 1023)+"\n", fileAtMost>>10)+"the end"), nil)
	r.Add("large.txt", "", noise, nil)
	for i := range 200 { // whose excerpts don't fit into the page
		r.Add("small/"+string(rune('a'+i%26))+strings.Repeat("x", i)+".txt", "", []byte(strings.ToValidUTF8(string(noise[i*excerptAtMost/2:(i+1)*excerptAtMost/2]), "?")), nil)
	}
	if err := r.Close(); err != nil || b.Len() > room {
		t.Fatalf("%d bytes, %v", b.Len(), err)
	}
	files := unpack(t, b.Bytes(), r.Folder())
	if _, ok := files["large.txt"]; ok || len(files["first.txt"]) != 1<<20 || !strings.Contains(files["index.html"], "large.txt<td>0<td> <strong>(left out: ") {
		t.Errorf("large.txt is in: %v; first.txt has %d bytes; the page:\n%.2000s", ok, len(files["first.txt"]), files["index.html"])
	}
	if len(files["long.txt"]) != fileAtMost || !strings.Contains(files["index.html"], "(cut after ") {
		t.Errorf("long.txt has %d bytes", len(files["long.txt"]))
	}
}

func TestSecrets(t *testing.T) {
	for text, want := range map[string]string{
		"Authorization: Bearer abcdef0123456789":                                          "Authorization: Bearer [secret]",
		"a eyJhbGciOiJSUzI1NiJ9.eyJpc3MiOiJrdWJl.c2ln b":                                  "a [secret] b",
		"-----BEGIN RSA PRIVATE KEY-----\nMIIE\nabc=\n-----END RSA PRIVATE KEY-----\nand": "[secret]\nand",
		"users: [{user: {token: s3cr3t-value}}]":                                          "users: [{user: {token: [secret]}}]",
		`{"token":"s3cr3t","port":80}`:                                                    `{"token":"[secret]","port":80}`,
		`{"client-key-data": "TFMwdA=="}`:                                                 `{"client-key-data": "[secret]"}`,
		"--password=hunter2 x":                                                            "--password=[secret] x",
		"https://me:hunter2@api.example:6443/x":                                           "https://[secret]@api.example:6443/x",
		"chain basic rules of token bucket":                                               "chain basic rules of token bucket",
		"http://10.0.0.1:80/a@b":                                                          "http://10.0.0.1:80/a@b",
	} {
		if got := string(WithoutSecrets([]byte(text))); got != want {
			t.Errorf("%q:\n got %q\nwant %q", text, got, want)
		}
	}
}

func TestMask(t *testing.T) {
	m := NewMask([]byte("key"))
	m.Learn("shop", "web", "billing-acme", "node7.example.org", "default")
	addr := func(s string) string { return m.addr(netip.MustParseAddr(s)).String() }
	net24 := m.prefix(netip.MustParseAddr("10.1.2.0"), 24).String()
	for text, want := range map[string]string{
		"10.1.2.3":                       addr("10.1.2.3"),
		"10.1.2.3:80":                    addr("10.1.2.3") + ":80",
		"10.1.2.0/24 dev eth0":           net24 + "/24 dev eth0",
		"10.1.2.3-10.1.2.9":              addr("10.1.2.3") + "-" + addr("10.1.2.9"),
		"[fd00:1::2]:80,tcp":             "[" + addr("fd00:1::2") + "]:80,tcp",
		"-s fd00:1::2/128":               "-s " + addr("fd00:1::2") + "/128",
		"127.0.0.1 0.0.0.0/0 ::1 ::/0":   "127.0.0.1 0.0.0.0/0 ::1 ::/0",
		"at 2026-11-28T02:00:01.5Z":      "at 2026-11-28T02:00:01.5Z",
		"01:53:17 net.ipv4.ip_forward":   "01:53:17 net.ipv4.ip_forward",
		"default/web:http":               "default/" + m.name("web") + ":http",
		"web-6f7d-x, webs":               m.name("web-6f7d-x") + ", webs",
		"web.shop.svc.cluster.local.":    m.name("web") + "." + m.name("shop") + ".svc.cluster.local.",
		`"node":"node7.example.org"`:     `"node":"` + m.name("node7.example.org") + `"`,
		"KPROXY-PORTAL billing-acme: 12": "KPROXY-PORTAL " + m.name("billing-acme") + ": 12",
		"":                               "",
	} {
		if got := string(m.apply([]byte(text))); got != want {
			t.Errorf("%q:\n got %q\nwant %q", text, got, want)
		}
	}
	if got := string(m.apply([]byte("52:54:00:ab:cd:ef"))); got == "52:54:00:ab:cd:ef" || len(got) != 17 || got[:3] != "02:" {
		t.Errorf("a hardware address became %q", got)
	}
	// Networks stay networks, and another key makes others.
	network := netip.PrefixFrom(m.prefix(netip.MustParseAddr("10.1.2.0"), 24), 24)
	for _, a := range []string{"10.1.2.1", "10.1.2.200"} {
		if !network.Contains(m.addr(netip.MustParseAddr(a))) {
			t.Errorf("%s left its network", a)
		}
	}
	if network.Contains(m.addr(netip.MustParseAddr("10.1.3.1"))) || addr("10.1.2.3") == "10.1.2.3" {
		t.Error("another network became the same, or an address itself")
	}
	if diff := cmp.Diff(addr("10.1.2.3"), NewMask([]byte("other")).addr(netip.MustParseAddr("10.1.2.3")).String()); diff == "" {
		t.Error("another key makes the same")
	}
	if got := addr("fe80::1"); !strings.HasPrefix(got, "fe80:") || got == "fe80::1" {
		t.Errorf("fe80::1 became %s", got)
	}
}

// FuzzMask: no text makes it panic, and known addresses and names never come through.
func FuzzMask(f *testing.F) {
	f.Add("a 10.1.2.3 b", "x")
	f.Add("::ffff:10.1.2.3/999 [", "web.")
	f.Fuzz(func(t *testing.T, before, after string) {
		m := NewMask([]byte("key"))
		m.Learn("acme-shop")
		out := string(m.apply([]byte(before + " 10.1.2.3 acme-shop " + after)))
		if !strings.Contains(before, "10.1.2.3") && !strings.Contains(after, "10.1.2.3") && strings.Contains(out, " 10.1.2.3 ") ||
			!strings.Contains(before, "acme-shop") && !strings.Contains(after, "acme-shop") && strings.Contains(out, " acme-shop ") {
			t.Errorf("%q", out)
		}
	})
}
