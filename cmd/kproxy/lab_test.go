package main

import (
	"slices"
	"strings"
	"testing"

	"github.com/urfave/cli/v2"
)

// TestSenselessLabs: what makes no sense is refused before a namespace is made.
func TestSenselessLabs(t *testing.T) {
	for line, want := range map[string]string{
		"up --backends 0":                  "--backends 0: want 1 to 250",
		"up --backends -1":                 "--backends -1: want 1 to 250",
		"up --backends 251":                "--backends 251: want 1 to 250",
		"up --traffic -1":                  "--traffic -1: want 0",
		"up --traffic NaN":                 "--traffic NaN: want 0",
		"up --traffic +Inf":                "--traffic +Inf: want 0",
		"up --traffic 1e6":                 "want 0, for none, to 1000",
		"up --slow 0":                      "--slow 0: want 1 to 1000",
		"lesson 1 --slow 9999 --solutions": "--slow 9999: want 1 to 1000",
		"up --mode ebpf":                   `"ebpf" is not one of auto, userspace, iptables, ipvs, nftables`,
		"up now":                           `takes no arguments, got ["now"]`,
		"demo --mode ebpf":                 `"ebpf" is not one of`,
		"demo now":                         `takes no arguments, got ["now"]`,
		"down now":                         `takes no arguments, got ["now"]`,
	} {
		if got := runLine(t, append([]string{"lab"}, strings.Fields(line)...)...); got.status != exitUsage || !strings.Contains(got.err, want) {
			t.Errorf("lab %s: status %d, %q; want %d and %q", line, got.status, got.err, exitUsage, want)
		}
	}
}

// TestLessonsAskTheLab: what a lesson's kproxy asks of a running one, or has it do, is about the lab's, whatever runs on this host.
func TestLessonsAskTheLab(t *testing.T) {
	_, list, _ := strings.Cut(binScript, "in\n")
	list, _, _ = strings.Cut(list, ")")
	for _, c := range newApp().Commands {
		asks := slices.ContainsFunc(c.Flags, func(f cli.Flag) bool { return slices.Contains(f.Names(), "socket") })
		if asks && c.Name != "run" && c.Name != "check" && !slices.Contains(strings.Split(list, "|"), c.Name) {
			t.Errorf("kproxy %s isn't in %q", c.Name, list)
		}
	}
}
