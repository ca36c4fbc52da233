package kernel_test

import (
	"testing"

	"kproxy.dev/kproxy/kernel"
)

func TestSameRule(t *testing.T) {
	tests := []struct {
		a, b string
		same bool
	}{
		{"-j RETURN", "-j RETURN", true},
		{"-j RETURN", "-j ACCEPT", false},
		{"-j KPROXY-A", "-g KPROXY-A", false},
		{`-m comment --comment web -j A`, `-m comment --comment "web" -j A`, true},
		{`-p tcp -m comment --comment "a b" -m tcp --dport 80 -j A`, `-p tcp -m tcp --dport 80 -m comment --comment "a b" -j A`, true},
		{"-p tcp -j DNAT --to-destination 10.0.0.1:80", "-p tcp -m tcp -j DNAT --to-destination 10.0.0.1:80", true},
		{"-p tcp -j DNAT --to-destination 10.0.0.1:80", "-p udp -j DNAT --to-destination 10.0.0.1:80", false},
		{"-p tcp -m tcp --dport 80 -j A", "-p tcp -m tcp --sport 80 -j A", false},
		{"! -d 10.0.0.0/8 -j A", "-d 10.0.0.0/8 -j A", false},
		{"-m set ! --match-set S src -j A", "-m set --match-set S src -j A", false},
		{"-m set --match-set S src -m set --match-set T dst -j A", "-m set --match-set T dst -m set --match-set S src -j A", true},
		{"-m set --match-set S src -m set --match-set T dst -j A", "-m set --match-set S dst -m set --match-set T src -j A", false},
		{"-m conntrack --ctstate DNAT -m conntrack --ctstate NEW -j A", "-m conntrack --ctstate NEW -j A", false},
		{"-m mark --mark 0x1/0x1 -j A", "-m connmark --mark 0x1/0x1 -j A", false},
		{"-m statistic --mode nth --every 3 --packet 0 -j A", "-m statistic --mode nth --every 3 -j A", false},
		{"-m addrtype --dst-type LOCAL -j A", "-j A", false},
		{"-m tcp --dport 80 -j A", "-p tcp -m tcp --dport 80 -j A", false},
		{"", "", true},
	}
	for _, tt := range tests {
		if got := kernel.SameRule(tt.a, tt.b); got != tt.same {
			t.Errorf("SameRule(%q, %q) = %t", tt.a, tt.b, got)
		}
		if got := kernel.SameRule(tt.b, tt.a); got != tt.same {
			t.Errorf("SameRule(%q, %q) = %t", tt.b, tt.a, got)
		}
	}
}
