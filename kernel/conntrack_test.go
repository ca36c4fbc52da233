package kernel_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/test/kerneltest"
)

func TestConntrackMax(t *testing.T) {
	tests := []struct {
		name           string
		perCore, least int
		cpus, want     int
	}{
		{"not asked for", 0, 131072, 8, 0},
		{"by the CPUs", 32768, 1, 8, 262144},
		{"at least", 32768, 131072, 2, 131072},
		{"at most a million", 32768, 131072, 512, 1048576},
		{"exactly a million", 32768, 131072, 32, 1048576},
		{"unless more is asked for at least", 1000, 2000000, 2, 2000000},
		{"but not on a machine that is capped", 32768, 2000000, 64, 1048576},
		{"CPUs aren't known", 32768, 0, 0, 32768},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := (kernel.Conntrack{MaxPerCore: tt.perCore, Min: tt.least}).Max(tt.cpus); got != tt.want {
				t.Errorf("%d entries, want %d", got, tt.want)
			}
		})
	}
}

// loadConntrack asks for the connections there are, upon which a kernel loads
// what has them; kproxy does so before it makes their settings.
func loadConntrack(t *testing.T) {
	t.Helper()
	if _, err := netlink.ConntrackTableList(netlink.ConntrackTable, netlink.FAMILY_V4); err != nil {
		t.Fatal(err)
	}
}

// TestEnsureConntrack sets what is asked for, and reads it back, in a network
// namespace, where the number of entries isn't to be set.
func TestEnsureConntrack(t *testing.T) {
	kerneltest.Namespace(t)
	loadConntrack(t)
	read := func(name string) string {
		b, err := os.ReadFile("/proc/sys/net/netfilter/nf_conntrack_" + name)
		if err != nil {
			t.Fatal(err)
		}
		return strings.TrimSpace(string(b))
	}
	c := kernel.Conntrack{
		MaxPerCore: 12345, TCPEstablished: 3 * time.Hour, TCPCloseWait: 7 * time.Minute,
		UDP: 11 * time.Second, UDPStream: 111 * time.Second, TCPBeLiberal: true,
	}
	most := read("max")
	if kernel.LiberalConntrack() {
		t.Error("conntrack is liberal before anybody said so")
	}
	reports, err := kernel.EnsureConntrack(c, 1)
	if err != nil {
		t.Fatal(err)
	}
	changed := map[string]string{}
	for _, r := range reports {
		if r.Changed {
			changed[strings.TrimPrefix(r.Name, "net.netfilter.nf_conntrack_")] = r.Value
		} else if r.Name != "net.netfilter.nf_conntrack_max" || r.Err == nil || !strings.Contains(r.String(), "it can't be set here") {
			t.Errorf("not set: %s", r)
		}
	}
	want := map[string]string{
		"tcp_timeout_established": "10800", "tcp_timeout_close_wait": "420", "udp_timeout": "11", "udp_timeout_stream": "111", "tcp_be_liberal": "1",
	}
	if diff := cmp.Diff(want, changed); diff != "" {
		t.Errorf("reported as changed (-want +got):\n%s", diff)
	}
	for name, value := range want {
		if got := read(name); got != value {
			t.Errorf("%s is %s, want %s", name, got, value)
		}
	}
	if got := read("max"); got != most {
		t.Errorf("the host's own limit was %s and is %s", most, got)
	}
	if !kernel.LiberalConntrack() {
		t.Error("conntrack isn't liberal")
	}
	c.MaxPerCore = 0
	if reports, err := kernel.EnsureConntrack(c, 1); len(reports) > 0 || err != nil {
		t.Errorf("once more: %v, %v; want nothing to do", reports, err)
	}
	if reports, err := kernel.EnsureConntrack(kernel.Conntrack{}, 1); len(reports) > 0 || err != nil || read("udp_timeout") != "11" {
		t.Errorf("nothing asked for: %v, %v; want all left as it is", reports, err)
	}
}

func TestBuckets(t *testing.T) {
	path := filepath.Join(t.TempDir(), "hashsize")
	tests := []struct {
		name, was, want string
		max             int
	}{
		{"too few", "1000\n", "32768", 131072},
		{"enough", "32768\n", "32768\n", 131072},
		{"more than enough", "65536\n", "65536\n", 131072},
		{"no limit of ours", "16\n", "16\n", 0},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if err := os.WriteFile(path, []byte(tt.was), 0o644); err != nil {
				t.Fatal(err)
			}
			r, err := kernel.EnsureSysctls([]kernel.Sysctl{kernel.Buckets(path, tt.max)})
			if err != nil || (len(r) > 0) != (tt.was != tt.want) || len(r) > 0 && !r[0].Changed {
				t.Errorf("report %v, error %v", r, err)
			}
			if b, _ := os.ReadFile(path); string(b) != tt.want {
				t.Errorf("it is %q, want %q", b, tt.want)
			}
		})
	}
	if r, err := kernel.EnsureSysctls([]kernel.Sysctl{kernel.Buckets(filepath.Join(t.TempDir(), "none"), 1000)}); r != nil || err != nil {
		t.Errorf("without the file: %v, %v; want nothing", r, err)
	}
}

// TestBucketsOfTheHost: the hash table is the host's, and a process in another
// network namespace learns why it can't change it.
func TestBucketsOfTheHost(t *testing.T) {
	kerneltest.Namespace(t)
	loadConntrack(t)
	before, err := os.ReadFile(kernel.ConntrackBuckets)
	if err != nil {
		t.Fatal(err)
	}
	r, err := kernel.EnsureSysctls([]kernel.Sysctl{kernel.Buckets(kernel.ConntrackBuckets, 1<<30)})
	if err != nil || len(r) != 1 || r[0].Err == nil || !strings.Contains(r[0].String(), "it can't be set here") {
		t.Errorf("report %v, error %v; want the reason", r, err)
	}
	if after, _ := os.ReadFile(kernel.ConntrackBuckets); string(after) != string(before) {
		t.Errorf("it was %s and is %s", before, after)
	}
}

func TestOnlineCPUs(t *testing.T) {
	path := filepath.Join(t.TempDir(), "online")
	for list, want := range map[string]int{"0\n": 1, "0-3\n": 4, "0-3,8,10-11\n": 7, "": 0, "x": 0, "3-1": 0} {
		if err := os.WriteFile(path, []byte(list), 0o644); err != nil {
			t.Fatal(err)
		}
		if got, err := kernel.OnlineCPUs(path); got != want || (err == nil) != (want > 0) {
			t.Errorf("%q: %d, %v; want %d", list, got, err, want)
		}
	}
}
