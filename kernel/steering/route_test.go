package steering_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/test/kerneltest"
)

func TestRoutingComesAndGoes(t *testing.T) {
	kerneltest.Namespace(t)
	show := func() string {
		out, err := exec.Command("sh", "-c", "ip rule; ip route show table 10249; ip route show table local; "+
			"ip -6 rule; ip -6 route show table 10249 2>/dev/null; ip -6 route show table local; true").Output()
		if err != nil {
			t.Fatal(err)
		}
		return string(out)
	}
	if out, err := exec.Command("sh", "-ec", "ip rule add fwmark 0x1000/0x1800 lookup 10249 pref 5; ip route add 192.0.2.0/24 dev lo table 10249").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	before := show()
	r := steering.DefaultRouting()
	missing, err := r.Missing()
	if err != nil || len(missing) != 10 {
		t.Errorf("Missing at first = %v, %v; want three rules and two routes for each family", missing, err)
	}
	var after string
	for range 2 { // again: nothing to do
		if err := r.Ensure(); err != nil {
			t.Fatal(err)
		}
		if missing, err := r.Missing(); err != nil || len(missing) > 0 {
			t.Errorf("Missing after Ensure = %v, %v", missing, err)
		}
		if after != "" && after != show() {
			t.Errorf("the second Ensure changed %s to %s", after, show())
		}
		after = show()
	}
	for _, want := range []string{
		"10248:\tfrom all fwmark 0x1000/0x1800 iif lo goto 10250", "10249:\tfrom all fwmark 0x1000/0x1800 lookup 10249",
		"10250:\tfrom all fwmark 0x800/0x1800 iif lo lookup 10249", "local default dev lo",
	} {
		if strings.Count(after, want) != 2 {
			t.Errorf("%q isn't there for both families:\n%s", want, after)
		}
	}
	other := r
	other.Marks = kernel.Marks{Masquerade: 0x100, Transparent: 0x200}
	if missing, err := other.Missing(); err != nil || len(missing) != 6 {
		t.Errorf("Missing with other marks = %v, %v; want every rule", missing, err)
	}
	if err := other.Ensure(); err != nil {
		t.Fatal(err)
	}
	if now := show(); strings.Count(now, "10249:") != 2 || strings.Count(now, "fwmark 0x200/0x300") != 4 || strings.Contains(now, "0x1800 iif") {
		t.Errorf("rules with other marks don't replace the old ones:\n%s", now)
	}
	for range 2 {
		if err := r.Remove(); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(before, show()); diff != "" {
			t.Errorf("after Remove (-before +after):\n%s", diff)
		}
	}
}

// TestRoutingWithoutIPv6: where IPv6 is switched off, IPv4 has its rules and routes, and nothing is missing. When it is
// switched on, IPv6's are missing.
func TestRoutingWithoutIPv6(t *testing.T) {
	kerneltest.Namespace(t)
	turn := func(off string) {
		t.Helper()
		if err := os.WriteFile("/proc/sys/net/ipv6/conf/all/disable_ipv6", []byte(off), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	r := steering.DefaultRouting()
	ensure := func() {
		t.Helper()
		if err := r.Ensure(); err != nil {
			t.Fatal(err)
		}
		if missing, err := r.Missing(); err != nil || len(missing) > 0 {
			t.Errorf("Missing after Ensure = %v, %v", missing, err)
		}
	}
	turn("1")
	if missing, err := r.Missing(); err != nil || len(missing) != 5 {
		t.Errorf("Missing without IPv6 = %v, %v; want three rules and two routes of IPv4", missing, err)
	}
	ensure()
	turn("0")
	if missing, err := r.Missing(); err != nil || len(missing) != 5 {
		t.Errorf("Missing once there is IPv6 = %v, %v; want three rules and two routes of IPv6", missing, err)
	}
	ensure()
	turn("1")
	ensure()
	if err := r.Remove(); err != nil {
		t.Fatal(err)
	}
}

func TestSysctls(t *testing.T) {
	kerneltest.Namespace(t)
	for path, value := range map[string]string{"net/ipv4/ip_forward": "0", "net/ipv6/conf/all/forwarding": "0"} {
		if err := os.WriteFile("/proc/sys/"+path, []byte(value), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	settings := append(kernel.Sysctls(), kernel.Sysctl{Name: "net.ipv4.no_such_setting", Value: "1"})
	lines := func() string {
		t.Helper()
		reports, err := kernel.EnsureSysctls(settings)
		if err != nil {
			t.Fatal(err)
		}
		var out strings.Builder
		for _, r := range reports {
			fmt.Fprintln(&out, r)
		}
		return out.String()
	}
	first := lines()
	for _, want := range []string{"set net.ipv4.ip_forward to 1 (was 0): ", "net.ipv6.conf.all.forwarding is 0, 1 is needed: "} {
		if !strings.Contains(first, want) {
			t.Errorf("reports lack %q:\n%s", want, first)
		}
	}
	if b, _ := os.ReadFile("/proc/sys/net/ipv6/conf/all/forwarding"); string(b) != "0\n" {
		t.Errorf("IPv6 forwarding was changed to %s", b)
	}
	if again := lines(); strings.Contains(again, "set ") || !strings.Contains(again, "net.ipv6.conf.all.forwarding is 0") {
		t.Errorf("the second time: %s; want only what is left to the user", again)
	}
}

// noRules is a layer without rules or sets.
type noRules struct{ steering.RulesetPlane }

func (noRules) Render(*plan.Plan, plan.Delta) kernel.Ruleset    { return kernel.Ruleset{} }
func (noRules) Fresh(*plan.Plan) kernel.Ruleset                 { return kernel.Ruleset{} }
func (noRules) Observe(context.Context) (kernel.Ruleset, error) { return kernel.Ruleset{}, nil }
func (noRules) Expect(kernel.Ruleset)                           {}
func (noRules) Check(context.Context) ([]string, error)         { return nil, nil }

// TestStackSeesToRoutes: the first Sync makes them, Check names what is gone, and the next
// Sync mends it.
func TestStackSeesToRoutes(t *testing.T) {
	kerneltest.Namespace(t)
	routes := steering.DefaultRouting()
	s := steering.NewStack(noRules{}, &routes)
	s.Want(&plan.Plan{}, plan.Delta{})
	check := func() string {
		t.Helper()
		found, err := s.Check(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return strings.Join(found, "; ")
	}
	if found := check(); found != "" {
		t.Errorf("before the first Sync: %s", found)
	}
	for _, damage := range []struct{ command, notices string }{
		{"true", ""},
		{"ip rule del pref 10249", "ipv4 rule 10249 to table 10249 is gone"},
		{"ip -6 rule del pref 10249", "ipv6 rule 10249 to table 10249 is gone"},
		{"ip route flush table 10249", "ipv4 route in table 10249 is gone"},
	} {
		if r := s.Sync(t.Context(), func() {}); !r.OK() {
			t.Fatal(r.Err)
		}
		if found := check(); found != "" {
			t.Errorf("after a Sync: %s", found)
		}
		if out, err := exec.Command("sh", "-c", damage.command).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		if found := check(); found != damage.notices {
			t.Errorf("after %s: %q, want %q", damage.command, found, damage.notices)
		}
	}
	if r := s.Sync(t.Context(), func() {}); !r.OK() || check() != "" {
		t.Errorf("in the end: %v, %s", r.Err, check())
	}
}
