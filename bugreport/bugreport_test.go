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
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kproxy.dev/kproxy/test/kerneltest"
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
	r.Add("line.json", "", []byte(strings.Repeat(`"10.1.2.33",`, fileAtMost/12+1)), nil)
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
	if line := files["line.json"]; len(line) < fileAtMost-20 || !strings.HasSuffix(line, `.33",`) {
		t.Errorf("line.json has %d bytes, and ends with %.20q", len(line), line[max(0, len(line)-20):])
	}
}

// What comes too late isn't masked and compressed any more.
func TestArchiveEndsInTime(t *testing.T) {
	var b bytes.Buffer
	r := New(&b, Config{Node: "n1", At: when, End: time.Now().Add(-time.Second)})
	r.Add("log.txt", "log", []byte("all is well\n"), nil)
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	if files := unpack(t, b.Bytes(), r.Folder()); files["log.txt"] != "" || !strings.Contains(files["index.html"], "(it took too long)") {
		t.Errorf("files: %q", files)
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
	m.Learn("shop", "web", "billing-acme", "node7.example.org", "10.9.9.9.example", "10.1.2.3", "default")
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
		"10.1.2.3..10.1.2.9":             addr("10.1.2.3") + ".." + addr("10.1.2.9"),
		"10.1.2.3.80 > 10.1.2.9.53":      addr("10.1.2.3") + ".80 > " + addr("10.1.2.9") + ".53",
		"10.1.2.3.nip.io, v10.1.2.3_a":   addr("10.1.2.3") + ".nip.io, v" + addr("10.1.2.3") + "_a",
		"fe80::1%eth0 ::ffff:10.1.2.3":   addr("fe80::1") + "%eth0 ::ffff:" + addr("10.1.2.3"),
		"fd00:0:0:0:0:0:0:1:80":          addr("fd00::1") + ":80",
		`"\nfd00:1::2\u003eshop\tweb"`:   `"\n` + addr("fd00:1::2") + `\u003e` + m.name("shop") + `\t` + m.name("web") + `"`,
		"metadata.name%3Dshop&x":         "metadata.name%3D" + m.name("shop") + "&x",
		"10.9.9.9.example":               m.name("10.9.9.9.example"),
		"":                               "",
		// An address of IPv6 that is joined to a word, and a name that isn't.
		"peer-fd00:1::2, x_fd00:1::2":  "peer-" + addr("fd00:1::2") + ", x_" + addr("fd00:1::2"),
		"a.b-c-fd00:1::2.80 node-b:80": "a.b-c-" + addr("fd00:1::2") + ".80 node-b:80",
		"billing-acme::1":              m.name("billing-acme") + "::1",
		// Names of the reverse zones, whole and of networks.
		"3.2.1.10.in-addr.arpa.":                                   reversed(addr("10.1.2.3")) + ".in-addr.arpa.",
		"lb-3.2.1.10.IN-ADDR.ARPA":                                 "lb-" + reversed(addr("10.1.2.3")) + ".IN-ADDR.ARPA",
		"2.1.10.in-addr.arpa":                                      strings.TrimPrefix(reversed(net24), "0.") + ".in-addr.arpa",
		"999.in-addr.arpa in-addr.arpa":                            "999.in-addr.arpa in-addr.arpa",
		"_x.0.1.0.0.0.0.d.f.ip6.arpa":                              "_x." + nibbles(m.prefix(netip.MustParseAddr("fd00:10::"), 32), 8) + "ip6.arpa",
		nibbles(netip.MustParseAddr("fd00:1::2"), 32) + "ip6.arpa": nibbles(netip.MustParseAddr(addr("fd00:1::2")), 32) + "ip6.arpa",
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

// reversed returns an address of IPv4 with its parts in reverse.
func reversed(a string) string {
	parts := strings.Split(a, ".")
	slices.Reverse(parts)
	return strings.Join(parts, ".")
}

// nibbles returns the first n digits of an address of IPv6 in reverse, with a dot after each.
func nibbles(a netip.Addr, n int) (labels string) {
	for _, digit := range strings.ReplaceAll(a.StringExpanded(), ":", "")[:n] {
		labels = string(digit) + "." + labels
	}
	return labels
}

// delimiters stand around addresses and names in what programs print, in quoted strings and in URLs.
var delimiters = []string{" ", "\t", "\n", "\x1b", `"`, "'", "`", "(", ")", "[", "]", "{", "}", "<", ">", "=", ",", ";", "|", "@", "/", "+", "!", "*", "~", "#", "&", "?", "^", "$", "é",
	`\"`, `\n`, `\r`, `\t`, `\a`, `\b`, `\f`, `\v`, `\\n`, `\\\"`, `\u003c`, `\u0020`, `\u2028`, `\x1b`, `\x00`, `\U0001f600`, "%20", "%2F", "%3a"}

// secretsOf lists what a mask that knows acme-shop has to replace.
var secretsOf = []string{"10.1.2.3", "fd00:1::2", "acme-shop"}

func learned() *Mask {
	m := NewMask([]byte("key"))
	m.Learn("acme-shop")
	return m
}

func TestMaskBetweenDelimiters(t *testing.T) {
	m := learned()
	for _, before := range delimiters {
		for _, after := range delimiters {
			for _, secret := range append(secretsOf, "::ffff:10.1.2.3", "52:54:00:ab:cd:ef") {
				if got := string(m.apply([]byte(before + secret + after))); strings.Contains(got, secret) || !strings.HasPrefix(got, before) || !strings.HasSuffix(got, after) {
					t.Errorf("%q between %q and %q became %q", secret, before, after, got)
				}
			}
		}
	}
}

// FuzzMask: no text makes it panic, and known addresses and names never come through.
func FuzzMask(f *testing.F) {
	f.Add("a 10.1.2.3 b", "x", uint8(0), uint8(0))
	f.Add("::ffff:10.1.2.3/999 [", "web.", uint8(1), uint8(2))
	for i := range delimiters {
		f.Add(`"msg":"a\`, "24", uint8(i), uint8(i+1))
	}
	f.Fuzz(func(t *testing.T, before, after string, left, right uint8) {
		for _, secret := range secretsOf {
			text := before + delimiters[int(left)%len(delimiters)] + secret + delimiters[int(right)%len(delimiters)] + after
			if out := string(learned().apply([]byte(text))); !strings.Contains(before+" "+after, secret) && strings.Contains(out, secret) {
				t.Errorf("%q became %q", text, out)
			}
		}
	})
}

// The kernel prints virtual servers in hex, which a mask doesn't know addresses in.
func TestReportOfVirtualServers(t *testing.T) {
	text := []byte(`TCP  0A60000A:0050 rr
  -> 0A020002:2328      Masq    1      0          0
UDP  [fd00:0000:0000:0000:0000:0000:0096:000a]:0035 rr
  -> [fd00:0002:0000:0000:0000:0000:0000:0002]:2329 Masq 1 0 0
FWM  00000005 rr
`)
	want := `TCP  10.96.0.10:80 rr
  -> 10.2.0.2:9000      Masq    1      0          0
UDP  [fd00:0000:0000:0000:0000:0000:0096:000a]:53 rr
  -> [fd00:0002:0000:0000:0000:0000:0000:0002]:9001 Masq 1 0 0
FWM  00000005 rr
`
	if diff := cmp.Diff(want, string(decimal(text))); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	masked := string(NewMask([]byte("key")).apply(decimal(text)))
	for _, secret := range []string{"0A60000A", "10.96.0.10", "10.2.0.2", "0096:000a"} {
		if strings.Contains(masked, secret) {
			t.Errorf("masked, there is %s:\n%s", secret, masked)
		}
	}
}

func TestMaskLearnsFromText(t *testing.T) {
	m := NewMask([]byte("key"))
	m.LearnFrom([]byte(`-A KPROXY -m comment --comment "shop/web:http" -j X` + "\n" + `err="Get \"https://api.acme.example:6443/api\": dial tcp: lookup api.acme.example: no such host"`))
	if got, want := string(m.apply([]byte("shop web lookup api.acme.example: 10.1.2.3"))), "acme"; strings.Contains(got, want) || strings.Contains(got, "shop") || strings.Contains(got, "web") {
		t.Errorf("masked: %q", got)
	}
}

// Without nft, as in the image, a report has sets with their elements too.
func TestReportWithoutNFT(t *testing.T) {
	kerneltest.Namespace(t)
	cmd := exec.Command("nft", "-f", "-")
	cmd.Stdin = strings.NewReader(`table ip kproxy {
	map backends { type ipv4_addr . inet_proto . inet_service . mark : ipv4_addr . inet_service; elements = { 10.96.0.10 . tcp . 80 . 0x1 : 10.2.0.2 . 9000 }; }
	map services { type ipv4_addr . inet_proto . inet_service : verdict; elements = { 10.96.0.10 . udp . 53 : goto pick }; }
	set sources { type ipv4_addr; flags interval; elements = { 10.1.0.0/16 }; }
	set hosts { type ether_addr; elements = { 52:54:00:ab:cd:ef }; }
	chain pick { dnat to tcp dport map { 80 : 10.2.0.3 }; }
	chain service { type nat hook prerouting priority -100; ip saddr @sources ip daddr . meta l4proto . th dport vmap @services; }
}`)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("nft: %v: %s", err, out)
	}
	t.Setenv("PATH", t.TempDir())
	text, err := nftables(t.Context())
	for _, want := range []string{
		"  10.96.0.10 . tcp . 80 . 0x00000001 : 10.2.0.2 . 9000\n", "  10.96.0.10 . udp . 53 : goto pick\n", "  10.1.0.0-10.1.255.255\n", "  52:54:00:ab:cd:ef\n", "{ 80 : 10.2.0.3 }",
	} {
		if err != nil || !strings.Contains(string(text), want) {
			t.Errorf("%v: there is no %q in\n%s", err, want, text)
		}
	}
}
