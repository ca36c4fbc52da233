package kernel_test

import (
	"os"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/test/kerneltest"
)

// TestReadOnlySysctls: in a container, where /proc/sys is read-only, what is
// right is fine, and what isn't is reported with the remedy and no error.
func TestReadOnlySysctls(t *testing.T) {
	kerneltest.Namespace(t)
	runtime.LockOSThread() // once more: the thread has mounts of its own from here on, and ends with the test
	settings := []kernel.Sysctl{
		{Name: "net.ipv4.ip_forward", Value: "1", Reason: "of this"},
		{Name: "net.ipv4.tcp_early_demux", Value: "0", Reason: "of that"},
		{Name: "net.ipv4.ip_default_ttl", Value: "60", Reason: "less would do", AtLeast: true},
		{Name: "net.ipv4.tcp_fin_timeout", Value: "90", Reason: "of more", AtLeast: true},
	}
	write := func(name, value string) {
		t.Helper()
		if err := os.WriteFile("/proc/sys/net/ipv4/"+name, []byte(value), 0); err != nil {
			t.Fatal(err)
		}
	}
	write("ip_forward", "1")
	write("tcp_early_demux", "1")
	write("ip_default_ttl", "64")
	write("tcp_fin_timeout", "60")
	readOnly(t, "/proc/sys")

	reports, err := kernel.EnsureSysctls(settings)
	if err != nil {
		t.Fatal(err)
	}
	if len(reports) != 2 || reports[0].Changed || !kernel.Unwritable(reports[0].Err) {
		t.Fatalf("reports %+v, want two, of what could not be changed", reports)
	}
	if got := reports[1].String(); !strings.Contains(got, "net.ipv4.tcp_fin_timeout is 60, 90 is needed") {
		t.Errorf("of what is less than needed: %s", got)
	}
	for _, want := range []string{"net.ipv4.tcp_early_demux is 1, 0 is needed: of that", "--init-only", "sysctl -w net.ipv4.tcp_early_demux=0"} {
		if s := reports[0].String(); !strings.Contains(s, want) {
			t.Errorf("report lacks %q: %s", want, s)
		}
	}
}

// readOnly mounts path over itself, read-only, for the calling thread alone.
func readOnly(t *testing.T, path string) {
	t.Helper()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(unix.Unshare(unix.CLONE_NEWNS))
	must(unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""))
	must(unix.Mount(path, path, "", unix.MS_BIND|unix.MS_REC, ""))
	must(unix.Mount("", path, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""))
}
