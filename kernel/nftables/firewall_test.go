package nftables_test

import (
	"os/exec"
	"strings"
	"testing"

	"kproxy.dev/kproxy/kernel/nftables"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/test/kerneltest"
)

// TestDroppingChains: chains of others that drop by default are found, in nftables' own tables and in those of both variants of
// iptables; kproxy's own tables, and rules that drop some packets, aren't. Those in which iptables' rules could accept are
// found before anything is programmed.
func TestDroppingChains(t *testing.T) {
	t.Parallel()
	const table = "nft add table inet guard; nft 'add chain inet guard fw { type filter hook forward priority 10; policy accept; }'; "
	tests := []struct{ name, script, want string }{
		{"nothing", "true", ""},
		{"policy", "nft add table inet guard; nft 'add chain inet guard fw { type filter hook input priority 10; policy drop; }'", "chain fw of nftables table inet guard drops what comes in"},
		{"last rule rejects", table + "nft add rule inet guard fw ct status dnat accept; nft add rule inet guard fw counter log reject with icmpx admin-prohibited", "chain fw of nftables table inet guard drops what is forwarded"},
		{"last rule drops", table + "nft add rule inet guard fw drop", "chain fw of nftables"},
		{"last rule accepts", table + "nft add rule inet guard fw drop; nft add rule inet guard fw accept", ""},
		{"last rule drops some", table + "nft add rule inet guard fw ip saddr 192.0.2.1 drop", ""},
		{"another hook", "nft add table ip guard; nft 'add chain ip guard fw { type filter hook prerouting priority 10; policy drop; }'", ""},
		{"of bridges", "nft add table bridge guard; nft 'add chain bridge guard fw { type filter hook forward priority 10; policy drop; }'", ""},
		{"kproxy's own", "nft add table ip kproxy; nft 'add chain ip kproxy fw { type filter hook forward priority 10; policy drop; }'", ""},
		{"iptables, policy", "iptables-nft -P FORWARD DROP", "chain FORWARD of nftables table ip filter drops what is forwarded"},
		{"iptables, last rule", "ip6tables-nft -A OUTPUT -m comment --comment all -j REJECT", "chain OUTPUT of nftables table ip6 filter drops what goes out"},
		{"legacy, policy", "iptables-legacy -P INPUT DROP", "chain INPUT of iptables-legacy's ip table filter drops what comes in"},
		{"legacy, last rule", "ip6tables-legacy -A FORWARD -s ::1 -j ACCEPT; ip6tables-legacy -A FORWARD -j DROP", "chain FORWARD of iptables-legacy's ip6 table filter drops what is forwarded"},
		{"legacy, last rule rejects", "iptables-legacy -A FORWARD -j REJECT", "chain FORWARD of iptables-legacy's ip table filter"},
		{"legacy, some", "iptables-legacy -A FORWARD -p tcp -j DROP; iptables-legacy -A INPUT -i eth0 -j DROP; iptables-legacy -A OUTPUT -m mark --mark 1 -j DROP; iptables-legacy -A FORWARD -j ACCEPT", ""},
		{"legacy, a chain", "iptables-legacy -N own; iptables-legacy -A own -j DROP; iptables-legacy -A FORWARD -s 192.0.2.1 -j own", ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			kerneltest.Namespace(t)
			if out, err := exec.Command("sh", "-ec", tt.script).CombinedOutput(); err != nil {
				t.Fatalf("%s: %v: %s", tt.script, err, out)
			}
			warnings, err := (*nftables.Plane)(nil).Warnings()
			got := strings.Join(warnings, "\n")
			if err != nil || (got == "") != (tt.want == "") || !strings.HasPrefix(got, tt.want) || strings.Contains(got, "\n") {
				t.Errorf("%q, %v; want %q", got, err, tt.want)
			}
			yields := ""
			if strings.Contains(tt.script, "tables-") {
				yields = tt.want
			}
			facts, err := nftables.NewDriver("", false).Probe(t.Context(), plan.ModeAuto, true)
			got = strings.Join(facts.Dropping, "\n")
			if err != nil || facts.Missing != nil || (got == "") != (yields == "") || !strings.HasPrefix(got, yields) || strings.Contains(got, "\n") {
				t.Errorf("mode auto yields to %q, missing %v, %v; want %q", got, facts.Missing, err, yields)
			}
		})
	}
}
