package kernel_test

import (
	"errors"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/test/kerneltest"
)

// TestReadAny reads sets of others of many types, and compares with what ipset
// prints.
func TestReadAny(t *testing.T) {
	kerneltest.Namespace(t)
	script := `
create ips hash:ip family inet timeout 600
add ips 192.0.2.1 timeout 60
add ips 192.0.2.2
create six hash:ip family inet6
add six 2001:db8::1
create nets hash:net family inet
add nets 10.0.0.0/8
add nets 10.1.0.0/16 nomatch
add nets 192.0.2.1
create ports hash:ip,port family inet counters
add ports 192.0.2.1,tcp:80
add ports 192.0.2.1,udp:53
create pairs hash:ip,port,ip family inet6
add pairs 2001:db8::1,tcp:80,2001:db8::2
create ranges hash:ip,port,net family inet
add ranges 192.0.2.1,tcp:80,10.0.0.0/8
create links hash:net,iface family inet
add links 0.0.0.0/0,eth0
add links 10.0.0.0/8,physdev:eth1
create bits bitmap:port range 80-100
add bits 88
create some bitmap:ip range 192.0.2.0-192.0.2.255
add some 192.0.2.7
create lists list:set size 8
add lists ips
add lists nets
create empty hash:net,port family inet
`
	cmd := exec.Command("ipset", "restore")
	cmd.Stdin = strings.NewReader(script)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("ipset restore: %v\n%s", err, out)
	}
	sets, err := kernel.OpenIPSets()
	if err != nil {
		t.Fatal(err)
	}
	defer sets.Close()
	want := map[string][]string{}
	types := map[string]string{}
	for line := range strings.Lines(script) {
		switch w := strings.Fields(line); {
		case len(w) > 2 && w[0] == "create":
			want[w[1]], types[w[1]] = nil, w[2]
		case len(w) > 2 && w[0] == "add":
			entry := strings.TrimPrefix(w[2], "physdev:")
			if slices.Contains(w, "nomatch") {
				entry += " nomatch"
			}
			if i := strings.Index(entry, "physdev:"); i >= 0 {
				entry = entry[:i] + entry[i+len("physdev:"):] + " physdev"
			}
			want[w[1]] = append(want[w[1]], entry)
		}
	}
	for name, entries := range want {
		s, err := sets.ReadAny(name)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		var got []string
		for _, e := range s.Entries {
			text := e.Text(kernel.SetType(s.Type))
			if e.NoMatch {
				text += " nomatch"
			}
			if e.Physical {
				text += " physdev"
			}
			got = append(got, text)
			if s.Timed != (name == "ips") || s.Timed && (e.Remaining == 0 || e.Remaining > 600) {
				t.Errorf("%s: timed %v, %d s remain", name, s.Timed, e.Remaining)
			}
		}
		slices.Sort(got)
		slices.Sort(entries)
		if diff := cmp.Diff(entries, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
		if s.Type != types[name] || s.Counted != (name == "ports") || (s.Family == service.IPv6) != (name == "six" || name == "pairs") {
			t.Errorf("%s: %+v", name, s)
		}
	}
	if _, err := sets.ReadAny("nobody"); !errors.Is(err, kernel.ErrNotFound) {
		t.Errorf("a set that isn't there: %v", err)
	}
}
