package compare

import (
	"context"
	"net/netip"
	"strings"
	"testing"

	"kproxy.dev/kproxy/lab/load"
	"kproxy.dev/kproxy/plan"
)

func TestValidate(t *testing.T) {
	for _, tt := range []struct {
		name   string
		change func(*Config)
		want   string // a phrase of the error; none if empty
	}{
		{"usual", func(*Config) {}, ""},
		{"quick", func(c *Config) { *c = QuickConfig() }, ""},
		{"one plane", func(c *Config) { c.Planes = []plan.DataPlane{plan.IPVS} }, ""},
		{"no plane", func(c *Config) { c.Planes = nil }, "planes: at least one"},
		{"another plane", func(c *Config) { c.Planes = []plan.DataPlane{"ebpf"} }, `planes: "ebpf" is none of [userspace iptables ipvs nftables]`},
		{"twice the same plane", func(c *Config) { c.Planes = []plan.DataPlane{plan.IPVS, plan.IPVS} }, "planes: ipvs is there twice"},
		{"no rounds", func(c *Config) { c.Repeat = 0 }, "repeat: 0"},
		{"too many rounds", func(c *Config) { c.Repeat = 11 }, "repeat: 11"},
		{"no services", func(c *Config) { c.Services = nil }, "at least one"},
		{"no service", func(c *Config) { c.Services = []int{0, 5} }, "services: 0"},
		{"too many services", func(c *Config) { c.Services = []int{20001} }, "services: 20001"},
		{"twice the same", func(c *Config) { c.Services = []int{5, 5} }, "5 comes after 5"},
		{"backwards", func(c *Config) { c.Services = []int{10, 5} }, "5 comes after 10"},
		{"prefix", func(c *Config) { c.Prefix = "a/b" }, `"a/b"`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := DefaultConfig()
			tt.change(&c)
			err := c.Validate()
			if tt.want == "" && err != nil || tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)) {
				t.Errorf("Validate() = %v, want it to say %q", err, tt.want)
			}
		})
	}
}

// There is a port for each session of all rounds.
func TestSessionsHavePorts(t *testing.T) {
	for _, c := range []Config{DefaultConfig(), QuickConfig()} {
		if n := MaxRepeat * c.Sessions; n > 1<<16-1024 {
			t.Errorf("%d rounds have %d sessions, more than ports", MaxRepeat, n)
		}
	}
}

func TestEveryServiceHasAnAddressOfItsOwn(t *testing.T) {
	seen := map[string]bool{load.ServiceAddress.String(): true}
	for i := range MaxServices {
		a := filler(i).String()
		if seen[a] {
			t.Fatalf("service %d has the address %s of another", i, a)
		}
		seen[a] = true
	}
}

func TestLastLine(t *testing.T) {
	const log = "time=… level=INFO\nkproxy: this host lacks plan.IPVS (the kernel has none): get it, or choose --mode iptables\n"
	if got, want := lastLine(log), "this host lacks plan.IPVS (the kernel has none)"; got != want {
		t.Errorf("lastLine = %q, want %q", got, want)
	}
}

// conclude on made-up figures: every figure is there, in the order of the groups, and
// userspace is compared with direct routing and with iptables.
func TestConclude(t *testing.T) {
	c := QuickConfig()
	x := newComparison(c)
	var subjects []load.Subject
	for i, p := range []plan.DataPlane{Direct, plan.Userspace, plan.IPTables} {
		n := float64(i + 1)
		s := (&rig{plane: p}).subject(netip.Addr{})
		s.Run = func(context.Context, load.Load) (load.Outcome, error) {
			return load.Outcome{
				Seconds: 1, Count: 1000 / (i + 1), Bytes: uint64(1e9 / n), Failed: i % 2, Error: "lost",
				Connect: load.Percentiles{P50: n, P99: 2 * n}, Exchange: load.Percentiles{P50: n, P99: 2 * n}, CPU: load.CPU{Client: n, Machine: n},
			}, nil
		}
		subjects = append(subjects, s)
	}
	for _, w := range append([]load.Work{c.firsts(10, "First packets among 10 services")}, c.works()...) {
		if err := x.measured.Rounds(t.Context(), w, c.Repeat, subjects); err != nil {
			t.Fatal(err)
		}
	}
	x.conclude()
	r := &x.report
	if len(r.Cases) != 12+4 || r.Cases[0].Name != "throughput" || r.Cases[15].Name != "first-answer-p99-10" {
		t.Fatalf("%d cases, first %s, last %s", len(r.Cases), r.Cases[0].Name, r.Cases[len(r.Cases)-1].Name)
	}
	for _, c := range r.Cases {
		if len(c.Subjects) != 3 || len(c.Subjects[0].Values) != 3 || c.Unit == "" || c.Better == "" {
			t.Errorf("%s: %+v", c.Name, c)
		}
	}
	said := strings.Join(append(r.Findings, r.Warnings...), "\n")
	for _, want := range []string{"4 TCP streams: throughput: userspace has 0.500 times the figure of direct.", "TCP request: median: userspace has 0.667 times the figure of iptables.", "failures"} {
		if !strings.Contains(said, want) {
			t.Errorf("it doesn't say %q:\n%s", want, said)
		}
	}
}
