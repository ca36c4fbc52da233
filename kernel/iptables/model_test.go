package iptables_test

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/iptables"
	"kproxy.dev/kproxy/kernel/kerneltest"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/service"
)

// TestRestore holds the model to what the programs do: what they take, what
// they refuse, and what a refusal leaves behind.
func TestRestore(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name string
		text string
		line int // that is refused; 0: taken
		want []string
	}{
		{"chain and rule", "*nat\n:KPROXY-A - [0:0]\n-A KPROXY-A -p tcp -j RETURN\nCOMMIT\n", 0, []string{"nat KPROXY-A -p tcp -j RETURN", "nat KPROXY-KEPT -p udp -j RETURN"}},
		{"declaring empties", "*nat\n:KPROXY-KEPT - [0:0]\nCOMMIT\n", 0, []string{"nat KPROXY-KEPT"}},
		{"adding doesn't", "*nat\n-A KPROXY-KEPT -p tcp -j RETURN\nCOMMIT\n", 0, []string{"nat KPROXY-KEPT -p udp -j RETURN", "nat KPROXY-KEPT -p tcp -j RETURN"}},
		{"deleting", "*nat\n:KPROXY-KEPT - [0:0]\n-X KPROXY-KEPT\nCOMMIT\n", 0, nil},
		{"deleting what refers to each other", "*nat\n:KPROXY-A - [0:0]\n:KPROXY-B - [0:0]\n-A KPROXY-A -j KPROXY-B\nCOMMIT\n*nat\n:KPROXY-A - [0:0]\n:KPROXY-B - [0:0]\n-X KPROXY-B\n-X KPROXY-A\nCOMMIT\n", 0, []string{"nat KPROXY-KEPT -p udp -j RETURN"}},
		{"no such chain", "*nat\n:KPROXY-A - [0:0]\n-A KPROXY-A -j KPROXY-NONE\nCOMMIT\n", 3, []string{"nat KPROXY-KEPT -p udp -j RETURN"}},
		{"no such set", "*nat\n:KPROXY-A - [0:0]\n-A KPROXY-A -m set --match-set KPROXY-NONE src -j RETURN\nCOMMIT\n", 3, []string{"nat KPROXY-KEPT -p udp -j RETURN"}},
		{"drop in nat", "*nat\n:KPROXY-A - [0:0]\n-A KPROXY-A -j DROP\nCOMMIT\n", 3, []string{"nat KPROXY-KEPT -p udp -j RETURN"}},
		{"long name", "*nat\n:KPROXY-" + strings.Repeat("A", 30) + " - [0:0]\nCOMMIT\n", 2, []string{"nat KPROXY-KEPT -p udp -j RETURN"}},
		{"a table is all or nothing, tables aren't", "*filter\n:KPROXY-F - [0:0]\nCOMMIT\n*nat\n:KPROXY-A - [0:0]\n-A KPROXY-A -j KPROXY-NONE\nCOMMIT\n", 6,
			[]string{"filter KPROXY-F", "nat KPROXY-KEPT -p udp -j RETURN"}},
	}
	runners := []struct {
		name    string
		open    func(t *testing.T) kernel.Runner
		program string
	}{
		{"model", func(*testing.T) kernel.Runner { return kerneltest.NewHost() }, "iptables"},
		{"nft", func(t *testing.T) kernel.Runner { kerneltest.Namespace(t); return kernel.Exec{} }, "iptables-nft"},
		{"legacy", func(t *testing.T) kernel.Runner { kerneltest.Namespace(t); return kernel.Exec{} }, "iptables-legacy"},
	}
	for _, r := range runners {
		for _, tt := range tests {
			t.Run(r.name+"/"+tt.name, func(t *testing.T) {
				runner := r.open(t)
				ctx := context.Background()
				restore := func(text string) error {
					_, err := runner.Run(ctx, []byte(text), r.program+"-restore", "--noflush", "-w", "5")
					return err
				}
				if err := restore("*nat\n:KPROXY-KEPT - [0:0]\n-A KPROXY-KEPT -p udp -j RETURN\nCOMMIT\n"); err != nil {
					t.Fatal(err)
				}
				err := restore(tt.text)
				if refused := errors.Is(err, kernel.ErrSyntax); refused != (tt.line > 0) || err != nil && !refused {
					t.Errorf("restore: %v, want it refused: %t", err, tt.line > 0)
				}
				text, err := runner.Run(ctx, nil, r.program+"-save")
				if err != nil {
					t.Fatal(err)
				}
				if diff := cmp.Diff(tt.want, ownLines(t, text)); diff != "" {
					t.Errorf("chains (-want +got):\n%s", diff)
				}
			})
		}
	}
}

// TestStartRunsFewPrograms: programs are most of what a start takes, so it runs a few for each family, whatever the number of rules and jumps.
func TestStartRunsFewPrograms(t *testing.T) {
	t.Parallel()
	h := kerneltest.NewHost()
	programs := &recorder{Runner: h}
	c := steering.DefaultEnv(nil)
	c.Runner, c.Sets = programs, h.Sets()
	c.Rules = func(v kernel.Variant, f service.Family) (steering.SingleRules, error) {
		programs.ran = append(programs.ran, v.Program[f])
		return h.Rules(v, f)
	}
	want := iptables.Render(everything(), options())
	if applied, err := iptables.New(c).Apply(t.Context(), kernel.Diff(kernel.Ruleset{}, want)); err != nil || len(applied.Failed) > 0 {
		t.Fatalf("Apply: %v, failed %v", err, applied.Failed)
	}
	// Chains, jumps, and the one at the end of FORWARD, for which go-iptables runs three.
	if len(programs.ran) > 2*3 {
		t.Errorf("%d programs ran:\n%s", len(programs.ran), strings.Join(programs.ran, "\n"))
	}
}

// recorder is a Runner that keeps what was run.
type recorder struct {
	kernel.Runner
	ran []string
}

func (r *recorder) Run(ctx context.Context, stdin []byte, program string, args ...string) ([]byte, error) {
	r.ran = append(r.ran, program+" "+strings.Join(args, " "))
	return r.Runner.Run(ctx, stdin, program, args...)
}

// ownLines are kproxy's chains in what iptables-save printed, a line for each
// rule or empty chain.
func ownLines(t *testing.T, text []byte) []string {
	t.Helper()
	chains, _ := iptables.ParseSave(text)
	var out []string
	for _, c := range chains {
		if len(c.Rules) == 0 {
			out = append(out, c.Table+" "+c.Name)
		}
		for _, r := range c.Rules {
			out = append(out, c.Table+" "+c.Name+" "+r)
		}
	}
	return out
}
