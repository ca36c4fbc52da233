package leftovers_test

import (
	"bytes"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/leftovers"
	"kproxy.dev/kproxy/test/kerneltest"
)

// host is the network namespace of a test.
type host struct{ *testing.T }

func (h host) run(stdin, program string, args ...string) string {
	h.Helper()
	cmd := exec.Command(program, args...)
	cmd.Stdin = strings.NewReader(stdin)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		h.Fatalf("%s: %v\n%s", cmd, err, &stderr)
	}
	return stdout.String()
}

var volatile = regexp.MustCompile(`(?m)^#.*\n|\[\d+:\d+\]`)

// state is everything that the tests write to, as the programs print it.
func (h host) state() map[string]string {
	h.Helper()
	out := map[string]string{"ipset": h.run("", "ipset", "save")}
	for _, v := range []kernel.Variant{kernel.VariantNFT(), kernel.VariantLegacy()} {
		for _, p := range v.Program {
			out[p] = volatile.ReplaceAllString(h.run("", p+"-save"), "")
		}
	}
	// Those of iptables-nft are above.
	for _, t := range strings.Split(strings.TrimSpace(h.run("", "nft", "list", "tables")), "\n") {
		words := strings.Fields(t)
		if len(words) == 3 && (words[2] == "mine" || words[2] == "kube-proxy") {
			out[t] = h.run("", "nft", "-n", "list", "table", words[1], words[2])
		}
	}
	return out
}

// six is text for IPv6.
func six(text string) string {
	return strings.NewReplacer("10.96.0.", "fd00:96::", "10.244.0.0/16", "fd00:244::/64", "10.244.0.", "fd00:244::", "203.0.113.0/24", "2001:db8:113::/48", "192.0.2.", "2001:db8::",
		"127.0.0.0/8", "::1", "/32", "/128", "icmp-port-unreachable", "icmp6-port-unreachable", "255.255.255.255", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff",
		"--to-destination fd00", "--to-destination [fd00", "::2:53", "::2]:53", "::3:53", "::3]:53").Replace(text)
}

func (h host) restore(variant kernel.Variant, text string) {
	h.Helper()
	h.run(text, variant.Program[0]+"-restore", "--noflush")
	h.run(strings.ReplaceAll(strings.ReplaceAll(six(text), "--to-destination fd00:244::2]:53", "--to-destination [fd00:244::2]:53"),
		"--to-destination fd00:244::3]:53", "--to-destination [fd00:244::3]:53"), variant.Program[1]+"-restore", "--noflush")
}

// TestLeftovers: what kube-proxy left behind is found and removed, whichever mode
// it ran in and whichever variant of iptables it used, and everybody else's is
// afterwards as it was, byte for byte.
func TestLeftovers(t *testing.T) {
	nft, legacy := kernel.VariantNFT(), kernel.VariantLegacy()
	sets := func(h host) {
		h.run(strings.ReplaceAll(ipvsSets, "create KUBE-MINE hash:ip family inet hashsize 1024 maxelem 65536\n", ""), "ipset", "restore", "-exist")
	}
	tests := []struct {
		name  string
		leave func(host)
		found string
	}{
		{"nothing", func(host) {}, "nothing"},
		{"iptables", func(h host) { h.restore(nft, iptablesMode) }, "19 chains of iptables-nft, 19 chains of ip6tables-nft"},
		{"iptables, legacy", func(h host) { h.restore(legacy, iptablesMode) }, "19 chains of iptables-legacy, 19 chains of ip6tables-legacy"},
		{"ipvs", func(h host) { sets(h); h.run(ipvsMode, nft.Program[0]+"-restore", "--noflush") }, "11 chains of iptables-nft, 5 ipsets"},
		{"ipvs, legacy", func(h host) { sets(h); h.run(ipvsMode, legacy.Program[0]+"-restore", "--noflush") }, "11 chains of iptables-legacy, 5 ipsets"},
		{"former versions", func(h host) { h.restore(legacy, formerVersions) }, "8 chains of iptables-legacy, 8 chains of ip6tables-legacy"},
		{"nftables", func(h host) { h.run(nftablesMode, "nft", "-f", "-") }, "the nftables table ip kube-proxy, the nftables table ip6 kube-proxy"},
		{"one mode after the other", func(h host) {
			h.restore(legacy, iptablesMode)
			sets(h)
			h.run(ipvsMode, nft.Program[0]+"-restore", "--noflush")
			h.run(nftablesMode, "nft", "-f", "-")
		}, "11 chains of iptables-nft, 19 chains of iptables-legacy, 19 chains of ip6tables-legacy, the nftables table ip kube-proxy, the nftables table ip6 kube-proxy, 5 ipsets"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			kerneltest.Namespace(t)
			h := host{t}
			h.restore(nft, foreignRules)
			h.restore(legacy, foreignRules)
			h.run("create KUBE-MINE hash:ip family inet\nadd KUBE-MINE 192.0.2.1\n", "ipset", "restore")
			h.run(foreignTables, "nft", "-f", "-")
			before := h.state()
			tt.leave(h)
			found, err := leftovers.Look(t.Context(), kernel.Exec{})
			if err != nil {
				t.Fatal(err)
			}
			if got := found.String(); got != tt.found || len(found.Kept) > 0 || found.Empty() != (tt.found == "nothing") {
				t.Errorf("found %s, kept %v; want %s", got, found.Kept, tt.found)
			}
			if err := leftovers.Remove(t.Context(), kernel.Exec{}, found); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(before, h.state()); diff != "" {
				t.Errorf("what is others' (-before +after):\n%s", diff)
			}
			if again, err := leftovers.Look(t.Context(), kernel.Exec{}); err != nil || !again.Empty() {
				t.Errorf("found again: %s, %v", again, err)
			}
		})
	}
}

// TestOthersUse: a chain of kube-proxy's that somebody else's rules lead to stays,
// with what it leads to, and is named; so do these rules, also in a built-in
// chain. kube-proxy's own jumps go.
func TestOthersUse(t *testing.T) {
	const cni = `-A CNI-HOSTPORT-SETMARK -m comment --comment "CNI portfwd masquerade mark" -j KUBE-MARK-MASQ`
	foreign := func(table, chain, rule string) string {
		return "iptables-nft, table " + table + ": " + chain + " stays, because a rule that isn't kube-proxy's leads there: " + rule
	}
	tests := []struct {
		name, table, rule string
		kept              string
		stay              []string // chains
	}{
		{"a plugin's chain", "nat", cni, "iptables-nft, table nat: KUBE-MARK-MASQ stays, because the rules of CNI-HOSTPORT-SETMARK lead there", []string{"KUBE-MARK-MASQ"}},
		{
			"a site's mark", "nat", `-A PREROUTING -s 192.0.2.0/24 -p tcp -m tcp --dport 8080 -m comment --comment "site: masquerade" -j KUBE-MARK-MASQ`,
			"", []string{"KUBE-MARK-MASQ"},
		},
		{"a site's mark without a comment", "nat", `-A PREROUTING -s 192.0.2.0/24 -p tcp -m tcp --dport 8081 -j KUBE-MARK-MASQ`, "", []string{"KUBE-MARK-MASQ"}},
		{"all marked", "nat", `-A OUTPUT -j KUBE-MARK-MASQ`, "", []string{"KUBE-MARK-MASQ"}},
		{"by interface", "filter", `-A FORWARD -i wg0 -j KUBE-FORWARD`, "", []string{"KUBE-FORWARD"}},
		{"kube-proxy's comment and a match", "filter", `-A FORWARD -i wg0 -m comment --comment "kubernetes forwarding rules" -j KUBE-FORWARD`, "", []string{"KUBE-FORWARD"}},
		{"kube-proxy's comment and another state", "filter", `-A FORWARD -m conntrack --ctstate INVALID -m comment --comment "kubernetes service portals" -j KUBE-SERVICES`, "", []string{"KUBE-SERVICES"}},
		{"kube-proxy's jump elsewhere", "nat", `-A POSTROUTING -m comment --comment "kubernetes service portals" -j KUBE-POSTROUTING`, "", []string{"KUBE-POSTROUTING"}},
		{"a goto", "filter", `-A FORWARD -m comment --comment "kubernetes forwarding rules" -g KUBE-FORWARD`, "", []string{"KUBE-FORWARD"}},
		{"without a comment", "filter", `-A INPUT -j KUBE-NODEPORTS`, "", []string{"KUBE-NODEPORTS"}},
		{"a service", "nat", `-A PREROUTING -d 192.0.2.99/32 -p tcp -j KUBE-SVC-AAAAAAAAAAAAAAA2`, "", []string{
			"KUBE-MARK-MASQ", "KUBE-SEP-AAAAAAAAAAAAAA22", "KUBE-SEP-AAAAAAAAAAAAAA33", "KUBE-SVC-AAAAAAAAAAAAAAA2",
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			kerneltest.Namespace(t)
			h := host{t}
			h.run(iptablesMode, "iptables-nft-restore", "--noflush")
			text := tt.rule + "\nCOMMIT\n"
			if tt.rule == cni {
				text = ":CNI-HOSTPORT-SETMARK - [0:0]\n" + text
			}
			h.run("*"+tt.table+"\n"+text, "iptables-nft-restore", "--noflush")
			_, want := h.rules(tt.table, tt.stay)
			want = slices.DeleteFunc(want, func(r string) bool { // its own jumps
				return r != tt.rule && !strings.HasPrefix(r, "-A KUBE-")
			})
			found, err := leftovers.Look(t.Context(), kernel.Exec{})
			if err != nil {
				t.Fatal(err)
			}
			words := strings.Fields(tt.rule)
			if tt.kept == "" {
				tt.kept = foreign(tt.table, words[len(words)-1], tt.rule)
			}
			if diff := cmp.Diff([]string{tt.kept}, found.Kept); diff != "" {
				t.Errorf("kept (-want +got):\n%s", diff)
			}
			if err := leftovers.Remove(t.Context(), kernel.Exec{}, found); err != nil {
				t.Fatal(err)
			}
			chains, rules := h.rules(tt.table, tt.stay)
			if diff := cmp.Diff(want, rules); diff != "" || !slices.Contains(rules, tt.rule) {
				t.Errorf("rules left (-want +got):\n%s", diff)
			}
			for i, c := range tt.stay {
				tt.stay[i] = tt.table + " " + c
			}
			if diff := cmp.Diff(tt.stay, chains); diff != "" {
				t.Errorf("chains left (-want +got):\n%s", diff)
			}
			if again, err := leftovers.Look(t.Context(), kernel.Exec{}); err != nil || !again.Empty() || len(again.Kept) != 1 {
				t.Errorf("found again: %s, kept %v, %v", again, again.Kept, err)
			}
		})
	}
}

// rules lists what iptables-nft-save prints of a table: kube-proxy's chains, and
// all rules in built-in chains and in those named.
func (h host) rules(table string, chains []string) (own, rules []string) {
	h.Helper()
	in := ""
	for line := range strings.Lines(h.run("", "iptables-nft-save")) {
		words := strings.Fields(line)
		switch {
		case line[0] == '*':
			in = words[0][1:]
		case line[0] == ':' && strings.HasPrefix(line, ":KUBE-"):
			own = append(own, in+" "+words[0][1:])
		case words[0] == "-A" && in == table && (!strings.HasPrefix(words[1], "KUBE-") || slices.Contains(chains, words[1])):
			rules = append(rules, strings.TrimSpace(line))
		}
	}
	return own, rules
}
