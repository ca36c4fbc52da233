package iptables_test

import (
	"context"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/iptables"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/test/kerneltest"
)

// foreignRules is what somebody else has: rules before and after kproxy's jumps,
// a chain of their own, a rule that uses a set of theirs.
const foreignRules = `*nat
:DOCKER - [0:0]
-A PREROUTING -m addrtype --dst-type LOCAL -j DOCKER
-A DOCKER -p tcp -m tcp --dport 8081 -j DNAT --to-destination 172.17.0.2:80
COMMIT
*filter
:MINE - [0:0]
-A INPUT -m set --match-set FOREIGN src -j MINE
-A MINE -j DROP
COMMIT
`

// foreignLines are the chains and rules of others in what iptables-save printed.
// Empty tables of built-in chains come and go with programs that list them.
func foreignLines(text []byte) string {
	var out []string
	table := ""
	for line := range strings.Lines(string(text)) {
		line = strings.TrimSpace(line)
		switch {
		case strings.Contains(line, kernel.Prefix):
		case strings.HasPrefix(line, "*"):
			table = line
		case strings.HasPrefix(line, "-A "), strings.HasPrefix(line, ":") && strings.Contains(line, " - "):
			line, _, _ = strings.Cut(line, " [") // counters
			out = append(out, table+" "+line)
		}
	}
	slices.SortStableFunc(out, func(a, b string) int { return strings.Compare(a[:4], b[:4]) })
	return strings.Join(out, "\n")
}

func TestConformanceOfKernel(t *testing.T) {
	t.Parallel()
	for _, v := range variants {
		t.Run(v.Name, func(t *testing.T) {
			kerneltest.Conformance(t, kerneltest.Mode{
				Mode: plan.ModeIPTables, Plane: plan.IPTables, Seeds: 3, Steps: 15, EveryCall: v.Name == variants[0].Name,
				Render: func(p *plan.Plan) kernel.Ruleset { return iptables.Render(p, options()) },
				Open: func(t *testing.T, faults *kerneltest.Faults) kerneltest.System {
					return openKernel(t, v, faults)
				},
			})
		})
	}
}

func openKernel(t *testing.T, v kernel.Variant, faults *kerneltest.Faults) kerneltest.System {
	kerneltest.Namespace(t)
	run(t, "ipset create FOREIGN hash:ip; ipset add FOREIGN 192.0.2.1")
	restoreText(t, v.Program[0], foreignRules)
	return kernelSystem(t, v, faults)
}

func kernelSystem(t *testing.T, v kernel.Variant, faults *kerneltest.Faults) kerneltest.System {
	sets, err := kernel.OpenIPSets()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(sets.Close)
	c := steering.DefaultEnv(nil)
	c.Variant, c.Runner, c.Rules, c.Sets = v, faults.Runner(kernel.Exec{}), faults.Rules(steering.OpenSingleRules), faults.Sets(sets)
	b := iptables.New(c)
	return kerneltest.System{
		Backend: b,
		Foreign: func(t *testing.T) string {
			text, err := exec.Command(v.Program[0] + "-save").Output()
			if err != nil {
				t.Fatal(err)
			}
			return foreignLines(text) + run(t, "ipset save FOREIGN")
		},
		Restart: func(t *testing.T) kerneltest.System { return kernelSystem(t, v, faults) },
	}
}

// run runs a shell command that must succeed.
func run(t testing.TB, command string) string {
	t.Helper()
	out, err := exec.Command("sh", "-ec", command).CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v\n%s", command, err, out)
	}
	return string(out)
}

func restoreText(t testing.TB, program, text string) {
	t.Helper()
	cmd := exec.Command(program+"-restore", "--noflush")
	cmd.Stdin = strings.NewReader(text)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%s-restore: %v\n%s", program, err, out)
	}
}

// TestCleanup: nothing that kproxy made is left, in either variant, and everything of
// others is.
func TestCleanup(t *testing.T) {
	t.Parallel()
	kerneltest.Namespace(t)
	run(t, "ipset create FOREIGN hash:ip; ipset add FOREIGN 192.0.2.1; ip rule add fwmark 0x1 lookup 10249 pref 77; ip route add 192.0.2.0/24 dev lo table 10249")
	dump := func() string {
		out := run(t, "ip rule; ip -6 rule; ip route show table 10249; (ip -6 route show table 10249 2>/dev/null || true); ipset save")
		for _, v := range variants {
			for f := range service.Families {
				text, err := exec.Command(v.Program[f] + "-save").Output()
				if err != nil {
					t.Fatal(err)
				}
				out += v.Program[f] + "\n" + foreignLines(text)
			}
		}
		return out
	}
	for _, v := range variants {
		restoreText(t, v.Program[0], foreignRules)
		restoreText(t, v.Program[1], foreignRules6)
	}
	before := dump()
	for _, v := range variants {
		b, _ := newBackend(t, v)
		if _, err := b.Apply(context.Background(), kernel.Diff(kernel.Ruleset{}, iptables.Render(everything(), options()))); err != nil {
			t.Fatal(err)
		}
	}
	if err := steering.DefaultRouting().Ensure(); err != nil {
		t.Fatal(err)
	}
	sets := openSets(t)
	if err := (&steering.Redirects{Store: sets}).Alive(time.Hour); err != nil {
		t.Fatal(err)
	}
	c := steering.DefaultEnv(nil)
	c.Sets = sets
	for range 2 { // again: there is nothing to do
		if err := iptables.NewDriver().Remove(context.Background(), c, nil); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(before, dump()); diff != "" {
			t.Errorf("after clean-up (-before +after):\n%s", diff)
		}
		for _, v := range variants {
			for f := range service.Families {
				if left := run(t, v.Program[f]+"-save 2>/dev/null | grep KPROXY || true"); left != "" {
					t.Errorf("%s still has:\n%s", v.Program[f], left)
				}
			}
		}
	}
}

const foreignRules6 = `*filter
:MINE - [0:0]
-A INPUT -p udp -m comment --comment "somebody else" -j MINE
-A MINE -j DROP
COMMIT
`
