package docs

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const samplePage = "# Title\n\n<!-- run: ip rule -->\n```text\n$ ip rule\n0: local\n```\nwords\n\n<!-- run: kproxy status -->\n```text\n$ kproxy status\n```\n"

func TestBlocks(t *testing.T) {
	want := []block{{"ip rule", "$ ip rule\n0: local\n"}, {"kproxy status", "$ kproxy status\n"}}
	if diff := cmp.Diff(want, blocksOf(samplePage), cmp.AllowUnexported(block{})); diff != "" {
		t.Errorf("blocks (-want +got):\n%s", diff)
	}
	if got := prose(samplePage); got != "# Title\n\nwords\n\n" {
		t.Errorf("prose %q", got)
	}
	now := map[string]string{"ip rule": "$ ip rule\n1: other\n", "kproxy status": "$ kproxy status\n"}
	if got := blocksOf(replaced(samplePage, now))[0].output; got != now["ip rule"] {
		t.Errorf("replaced by %q", got)
	}
}

// TestMasked: what may differ is masked, and nothing else.
func TestMasked(t *testing.T) {
	for _, c := range []struct {
		command, one, other string
		same                bool
	}{
		{"kproxy status", "web  2  11  up 8s", "web   12  9  up 1m2s", true},
		{"kproxy status", "web userspace", "web iptables", false},
		{"kproxy connections", "tcp 10.1.0.2:40000 web 1.6K 350\ntcp 10.1.0.2:5 a 3 1", "tcp 10.1.0.2:50 a  2.5M 33\ntcp 10.1.0.2:5 web 3 10", true},
		{"kproxy trace 10.96.0.10:80", "  541  -j X\n  expires in 2 s", "  7  -j X\n  expires in 1 s", true},
		{"kproxy trace 10.96.0.10:80", "  541  -j X", "  541  -j Y", false},
		{"iptables -t nat -S KPROXY-PORTAL", "-j DNAT --to-destination 169.254.102.49:10244", "-j DNAT --to-destination 169.254.102.49:10245", false},
		{"ipset save | grep '^add'", "add A 0.0.0.0/1 timeout 2\nadd B 1", "add B 1\nadd A 0.0.0.0/1 timeout 3", true},
		{"ipset save | grep '^add'", "add H 10.1.0.2,tcp:46988,10.96.0.10 timeout 58", "add H 10.1.0.2,tcp:50000,10.96.0.10 timeout 60", true},
		{"ipset save | grep '^add'", "add A 10.2.0.2", "add A 10.2.0.3", false},
		{"conntrack -L", "tcp 6 299 src=10.1.0.2 sport=35732 dport=80 packets=9 sport=10244", "tcp 6 1 src=10.1.0.2 sport=45732 dport=80 packets=3 sport=10244", true},
		{"conntrack -L", "tcp dport=80", "tcp dport=81", false},
		{"ipvsadm -Ln", "  -> 10.2.0.2:9000  Masq  1  0  3", "  -> 10.2.0.2:9000  Masq  1  2  1", true},
		{"ipvsadm -Ln", "  -> 10.2.0.2:9000  Masq  1  0  3", "  -> 10.2.0.2:9001  Masq  1  2  1", false},
	} {
		one, other := masked(block{c.command, "$\n" + c.one + "\n"}), masked(block{c.command, "$\n" + c.other + "\n"})
		if (one == other) != c.same {
			t.Errorf("%s: %q and %q are masked to\n%q\n%q", c.command, c.one, c.other, one, other)
		}
	}
}

var link = regexp.MustCompile(`\]\(([^):]+?)(#[^)]*)?\)`)

// TestLinks: what pages link to is there, and the index leads to every page.
func TestLinks(t *testing.T) {
	pages, err := filepath.Glob(filepath.Join(folder, "*.md"))
	if err != nil || len(pages) == 0 {
		t.Fatalf("no pages found: %v", err)
	}
	linked := map[string]bool{}
	for _, page := range pages {
		for _, m := range link.FindAllStringSubmatch(read(t, page), -1) {
			target := filepath.Join(folder, m[1])
			if _, err := os.Stat(target); err != nil {
				t.Errorf("%s links to %s: %v", page, m[1], err)
				continue
			}
			if filepath.Base(page) == "README.md" {
				linked[target] = true
			}
			if anchor := strings.TrimPrefix(m[2], "#"); anchor != "" && strings.HasSuffix(target, ".md") && !hasHeading(read(t, target), anchor) {
				t.Errorf("%s links to %s%s: it has no such heading", page, m[1], m[2])
			}
		}
	}
	for _, page := range pages {
		if filepath.Base(page) != "README.md" && !linked[page] {
			t.Errorf("the index doesn't lead to %s", page)
		}
	}
}

// hasHeading reports whether a page has a heading whose anchor is the given one,
// as GitHub makes them.
func hasHeading(page, anchor string) bool {
	drop := regexp.MustCompile(`[^a-z0-9 _-]`)
	for line := range strings.Lines(page) {
		if title, ok := strings.CutPrefix(strings.TrimLeft(line, "#"), " "); ok && strings.HasPrefix(line, "#") {
			if strings.ReplaceAll(drop.ReplaceAllString(strings.ToLower(strings.TrimSpace(title)), ""), " ", "-") == anchor {
				return true
			}
		}
	}
	return false
}
