package main

import (
	"os"
	"regexp"
	"strings"
	"testing"
)

func TestCheckHost(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: network namespaces")
	}
	if got := runLine(t, "check", "--host"); got.status != 0 || !strings.Contains(got.stdout, "userspace:  possible\n") {
		t.Errorf("%+v", got)
	}
	if got := runLine(t, "check", "--host"); !regexp.MustCompile(`\nVERDICT: this host can run kproxy: mode auto takes [a-zA-Z]+\n$`).MatchString(got.stdout) {
		t.Errorf("the verdict of\n%s", got.stdout)
	}
	if got := runLine(t, "check", "--host", "--mode", "ipv"); got.status != exitUsage {
		t.Errorf("a mode that isn't one: %+v", got)
	}
	t.Setenv("PATH", t.TempDir())
	for mode, status := range map[string]int{"iptables": exitHost, "nftables": 0, "auto": 0, "userspace": 0} {
		got := runLine(t, "check", "--host", "--mode", mode)
		says := map[int]string{0: "VERDICT: this host can run kproxy in mode ", exitHost: "VERDICT: this host can't run kproxy in mode "}[status]
		if !strings.Contains(got.stdout, "\n"+says+mode) {
			t.Errorf("the verdict of %s without programs:\n%s", mode, got.stdout)
		}
		if got.status != status || !strings.Contains(got.stdout, "auto:       possible, with nftables\nuserspace:  possible\n") ||
			!strings.Contains(got.stdout, "iptables:   not possible\n") || !strings.Contains(got.stdout, "install the Debian package iptables") {
			t.Errorf("%s without programs: %+v", mode, got)
		}
	}
}
