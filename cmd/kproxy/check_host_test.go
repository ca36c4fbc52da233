package main

import (
	"os"
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
	if got := runLine(t, "check", "--host", "--mode", "ipv"); got.status != exitUsage {
		t.Errorf("a mode that isn't one: %+v", got)
	}
	t.Setenv("PATH", t.TempDir())
	for mode, status := range map[string]int{"iptables": exitHost, "nftables": 0, "auto": 0, "userspace": 0} {
		got := runLine(t, "check", "--host", "--mode", mode)
		if got.status != status || !strings.Contains(got.stdout, "auto:       possible, with nftables\nuserspace:  possible\n") ||
			!strings.Contains(got.stdout, "iptables:   not possible\n") || !strings.Contains(got.stdout, "install the Debian package iptables") {
			t.Errorf("%s without programs: %+v", mode, got)
		}
	}
}
