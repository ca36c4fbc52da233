package compare

import (
	"strings"
	"testing"

	"kproxy.dev/kproxy/lab/compare/load"
)

func TestValidate(t *testing.T) {
	for _, tt := range []struct {
		name   string
		change func(*Config)
		want   string // a phrase of the error; none if empty
	}{
		{"usual", func(*Config) {}, ""},
		{"quick", func(c *Config) { *c = QuickConfig() }, ""},
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

// Whatever may be asked for, the loads that come of it are allowed, and there
// is a port for each session of all rounds.
func TestLoadsAreAllowed(t *testing.T) {
	for _, c := range []Config{DefaultConfig(), QuickConfig()} {
		for c.Repeat = 1; c.Repeat <= MaxRepeat; c.Repeat++ {
			r := newRig(&c, Direct)
			loads := append(c.workloads(), workload{c.firsts(), ""})
			for _, w := range loads {
				l := w.load
				l.Targets = r.targets(l.Kind, filler(0))
				l.FirstPort = firstSessionPort
				if l.Kind == load.Sessions {
					l.FirstPort += uint16((c.Repeat - 1) * l.Count)
					if end := int(l.FirstPort) + l.Count; end > 32768 {
						t.Errorf("%d rounds: sessions use ports up to %d", c.Repeat, end)
					}
				}
				if err := l.Validate(); err != nil {
					t.Errorf("%d rounds, %s: %v", c.Repeat, l.Kind, err)
				}
			}
		}
	}
}

func TestEveryServiceHasAnAddressOfItsOwn(t *testing.T) {
	seen := map[string]bool{loadService.String(): true}
	for i := range MaxServices {
		a := filler(i).String()
		if seen[a] {
			t.Fatalf("service %d has the address %s of another", i, a)
		}
		seen[a] = true
	}
}

func TestLastLine(t *testing.T) {
	const log = "time=… level=INFO\nkproxy: this host lacks IPVS (the kernel has none): get it, or choose --mode iptables\n"
	if got, want := lastLine(log), "this host lacks IPVS (the kernel has none)"; got != want {
		t.Errorf("lastLine = %q, want %q", got, want)
	}
}
