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
	for _, args := range [][]string{{"check", "--host"}, {"check", "--host", "--mode", "iptables"}} {
		got := runLine(t, args...)
		if got.status != exitHost || !strings.Contains(got.stdout, "userspace:  not possible\n") || !strings.Contains(got.stdout, "install the Debian package iptables") {
			t.Errorf("%q: %+v", args, got)
		}
	}
}
