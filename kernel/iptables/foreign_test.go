package iptables_test

import (
	"os/exec"
	"slices"
	"strings"
	"testing"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/iptables"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/test/kerneltest"
)

// FuzzForeignComment: whatever another program's rule has for a comment, iptables prints it so that it is read as that, and what
// it holds is taken for no rule.
func FuzzForeignComment(f *testing.F) {
	for _, s := range []string{
		"web", "it's", `"`, `\`, `a "b" \c`, "-j", "x -j KPROXY-SERVICES", "a\nb", "a\n", "\n", "\r\n",
		"a\n-A KPROXY-SERVICES -j DROP\nFORGED", "a\n:KPROXY-SERVICES - [0:0]\n-A PREROUTING -j KPROXY-SERVICES", "a\nCOMMIT\n*nat\n:KPROXY-X - [0:0]", "\"\n-A PREROUTING -j KPROXY-X",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, comment string) {
		if len(comment) > 200 || strings.Contains(comment, "\x00") {
			return
		}
		for _, v := range variants {
			kerneltest.Namespace(t)
			run := func(program string, args ...string) string {
				out, err := exec.Command(program, args...).Output()
				if err != nil {
					t.Fatalf("%s %q: %v", program, args, err)
				}
				return string(out)
			}
			program := v.Program[service.IPv4]
			run(program, "-t", "nat", "-A", "PREROUTING", "-m", "comment", "--comment", comment, "-j", "ACCEPT")
			text := run(program+"-save", "-t", "nat")
			if chains, jumps := iptables.ParseSave([]byte(text)); len(chains)+len(jumps) > 0 {
				t.Errorf("%s: %q is read as chains %v and jumps %v", v.Name, text, chains, jumps)
			}
			var rules []string
			for line := range kernel.SavedLines(text) {
				if rule, is := strings.CutPrefix(line, "-A PREROUTING "); is {
					rules = append(rules, rule)
				}
			}
			if want := []string{"-m", "comment", "--comment", comment, "-j", "ACCEPT"}; len(rules) != 1 || !slices.Equal(kernel.Words(rules[0]), want) {
				t.Errorf("%s: rules %q, want one of %q", v.Name, rules, want)
			}
		}
	})
}
