package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"kproxy.dev/kproxy/lab/report"
	"kproxy.dev/kproxy/plan"
)

// TestCompare takes a small comparison through every data plane of this host; in mode ipvs only through IPVS, beside none, as mode
// iptables shows the others. The command makes sure itself that each was really used; what it measures isn't looked at, as that is
// the machine's business.
func TestCompare(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to make network namespaces")
	}
	t.Parallel()
	prefix := fmt.Sprintf("kpe-%d-c", os.Getpid())
	page := filepath.Join(t.TempDir(), "page.html")
	args := []string{"--repeat", "1", "-o", "json", "--html", page}
	want := []string{"direct", "userspace", "iptables", "ipvs", "nftables"}
	services := []string{"2", "5"}
	if mode == plan.ModeIPVS {
		args = append(args, "--planes", "ipvs")
		want = []string{"direct", "ipvs"}
		services = services[:1]
	}
	args = append(args, "--services", strings.Join(services, ","))
	e := finish(t, nil, compareCommand(t, 3*time.Minute, prefix, args...))
	e.wants(t, 0)
	var r report.Report
	if err := json.Unmarshal([]byte(e.stdout), &r); err != nil {
		t.Fatalf("read the report: %v\n%s", err, e.stderr)
	}
	if !hasIPVS {
		want = slices.DeleteFunc(want, func(name string) bool { return name == "ipvs" })
		if len(r.Absent) != 1 || r.Absent[0].Subject != "ipvs" || r.Absent[0].Reason == "" {
			t.Errorf("absent: %+v, want ipvs with its reason", r.Absent)
		}
	} else if len(r.Absent) != 0 {
		t.Errorf("absent: %+v, want none", r.Absent)
	}
	for _, c := range r.Cases {
		planes := want
		if strings.HasPrefix(c.Name, "programming-") {
			planes = want[1:] // nothing to program
		}
		if len(c.Subjects) != len(planes) {
			t.Errorf("%s: figures of %d data planes, want %v", c.Name, len(c.Subjects), planes)
		}
		for _, name := range planes {
			if s := c.Subject(name); s == nil || len(s.Values) != 1 || s.Median <= 0 {
				t.Errorf("%s of %s: %+v, want one round of more than nothing", c.Name, name, s)
			}
		}
	}
	if cases := 12 + len(services)*(1+4); len(r.Cases) != cases {
		t.Errorf("%d cases, want %d", len(r.Cases), cases)
	}
	if text, err := os.ReadFile(page); err != nil || !strings.Contains(string(text), "</html>") {
		t.Errorf("the page: %v, %d bytes", err, len(text))
	}
	nothingLeft(t, prefix)
}

// TestCompareInterrupted: Ctrl-C ends a comparison, and nothing is left of it.
func TestCompareInterrupted(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to make network namespaces")
	}
	t.Parallel()
	prefix := fmt.Sprintf("kpe-%d-i", os.Getpid())
	page := filepath.Join(t.TempDir(), "page.html")
	cmd := compareCommand(t, 3*time.Minute, prefix, "--services", "2", "--html", page)
	progress, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var said strings.Builder
	told := false // once: the second Ctrl-C ends a program where it stands
	for b := make([]byte, 4096); ; {
		n, err := progress.Read(b)
		said.Write(b[:n])
		if err != nil {
			break
		}
		if !told && strings.Contains(said.String(), "round 1") {
			told = true
			if err := cmd.Process.Signal(os.Interrupt); err != nil {
				t.Error(err)
			}
		}
	}
	_ = cmd.Wait() // its status is looked at
	if got := cmd.ProcessState.ExitCode(); got != 1 || !strings.Contains(said.String(), "ended before its time") {
		t.Errorf("exit status %d, want 1 and the reason:\n%s", got, said.String())
	}
	if left, _ := filepath.Glob(page + "*"); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
	nothingLeft(t, prefix)
}

func TestCompareNeedsRoot(t *testing.T) {
	e := finish(t, nil, asNobody(t, command(t, "lab", "compare", "--html", "")))
	e.wants(t, 3, "needs root")
}

func compareCommand(t *testing.T, limit time.Duration, prefix string, args ...string) *exec.Cmd {
	ctx, cancel := context.WithTimeout(context.Background(), within(limit))
	t.Cleanup(cancel)
	return exec.CommandContext(ctx, binary, append([]string{"lab", "compare", "--quick", "--prefix", prefix}, args...)...)
}

// nothingLeft checks that no namespace, folder or process of a comparison is there.
func nothingLeft(t *testing.T, prefix string) {
	t.Helper()
	for _, pattern := range []string{"/run/netns/" + prefix + "*", "/run/" + prefix + "*"} {
		if left, _ := filepath.Glob(pattern); len(left) > 0 {
			t.Errorf("left behind: %v", left)
		}
	}
	commands, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, name := range commands {
		if text, err := os.ReadFile(name); err == nil && strings.Contains(string(text), prefix+"-") {
			t.Errorf("still running: %q", strings.ReplaceAll(string(text), "\x00", " "))
		}
	}
}
