// Package vm tests run.sh, which runs a command in a virtual machine: what
// comes out of one that works, and that one that fails is never taken for that.
package vm

import (
	"bytes"
	"cmp"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
)

// result holds what the caller of run.sh sees.
type result struct {
	Status      int
	Out, Errors string
}

// kinds are the guests of this machine: the usual one, and user-mode Linux.
var kinds = []string{"", "uml"}

// on runs a test in a guest of each kind.
func on(t *testing.T, kinds []string, test func(t *testing.T, accel string)) {
	t.Parallel()
	for _, accel := range kinds {
		t.Run(cmp.Or(accel, "usual"), func(t *testing.T) { test(t, "KPROXY_VM_ACCEL="+cmp.Or(accel, os.Getenv("KPROXY_VM_ACCEL"))) })
	}
}

// run runs a shell script in the VM.
func run(t *testing.T, script string, env ...string) result {
	t.Helper()
	if runtime.GOARCH != "amd64" {
		t.Skip("needs an x86-64 machine")
	}
	if _, err := exec.LookPath("qemu-system-x86_64"); err != nil {
		t.Skip("needs qemu-system-x86_64")
	}
	if os.Geteuid() != 0 && slices.Contains(env, "KPROXY_VM_ACCEL=uml") {
		t.Skip("needs root to start user-mode Linux")
	}
	t.Parallel()
	var out, errs bytes.Buffer
	cmd := exec.CommandContext(t.Context(), "./run.sh", "bash", "-c", script)
	cmd.Env = append(append(os.Environ(), "KPROXY_VM_CLOCK=real"), env...)
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return result{cmd.ProcessState.ExitCode(), out.String(), errs.String()}
}

func TestOutputAndStatus(t *testing.T) {
	on(t, kinds, func(t *testing.T, accel string) {
		const script = `echo out; echo error >/dev/stderr; uname -n; sleep 1000 & exit 3`
		got := run(t, script, accel)
		if diff := gocmp.Diff(result{3, "out\nkproxy-vm\n", "error\n"}, got); diff != "" {
			t.Errorf("a command's status and output (-want +got):\n%s", diff)
		}
	})
}

func TestTheHostIsSeenButNotChanged(t *testing.T) {
	on(t, kinds, func(t *testing.T, accel string) {
		kept, lost := t.TempDir(), t.TempDir()
		here, err := os.Getwd()
		if err != nil {
			t.Fatal(err)
		}
		const script = `echo "$KPROXY_WORD"; pwd; test -x run.sh && echo kept >"$KPROXY_KEPT/file" && echo lost >"$KPROXY_LOST/file"`
		got := run(t, script, accel, "KPROXY_WORD=two  'words'", "KPROXY_KEPT="+kept, "KPROXY_LOST="+lost, "KPROXY_VM_WRITE="+kept)
		if diff := gocmp.Diff(result{0, "two  'words'\n" + here + "\n", ""}, got); diff != "" {
			t.Errorf("environment and folder (-want +got):\n%s", diff)
		}
		if text, err := os.ReadFile(filepath.Join(kept, "file")); string(text) != "kept\n" {
			t.Errorf("the folder that may be written has %q, %v", text, err)
		}
		if _, err := os.Stat(filepath.Join(lost, "file")); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("another folder was written: %v", err)
		}
	})
}

func TestWhatTheKernelHas(t *testing.T) {
	const script = `set -e
ip link add kd0 type dummy
ipvsadm -A -t 10.0.0.1:80 -s mh
ipset create s hash:ip,port
iptables -A INPUT -m set --match-set s dst,dst -j ACCEPT
iptables-legacy -A INPUT -m conntrack --ctstate NEW -j ACCEPT
conntrack -L
ip netns add a; ip -n a link add kv0 type veth peer name kv1`
	on(t, kinds, func(t *testing.T, accel string) {
		if got := run(t, script, accel); got.Status != 0 {
			t.Errorf("status %d: %s", got.Status, got.Errors)
		}
	})
}

// TestClockSkipsWaiting: in user-mode Linux a quarter of an hour of waiting takes no longer than the guest itself.
func TestClockSkipsWaiting(t *testing.T) {
	if got := run(t, "sleep 900; echo $SECONDS", "KPROXY_VM_ACCEL=uml", "KPROXY_VM_CLOCK=", "KPROXY_VM_TIMEOUT=300"); got.Status != 0 || got.Out != "900\n" {
		t.Errorf("status %d, %q: %s", got.Status, got.Out, got.Errors)
	}
}

func TestFailures(t *testing.T) {
	tests := []struct {
		name, script, env, want string
	}{
		{"oops", "echo c >/proc/sysrq-trigger; sleep 1000", "", "the kernel failed"},
		{"end without a status", "busybox poweroff -f; sleep 1000", "", "it ended without a status"},
		{"too long", "sleep 1000", "KPROXY_VM_TIMEOUT=20", "not done after 20 s"},
		{"silence", "kill -STOP -1; sleep 1000", "KPROXY_VM_SILENCE=20", "no sign of life for 20 s"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			kinds := kinds
			if tt.env != "" { // what run.sh itself sees, and waits for
				kinds = kinds[1:]
			}
			on(t, kinds, func(t *testing.T, accel string) {
				got := run(t, tt.script, accel, tt.env)
				if got.Status != 125 || !strings.Contains(got.Errors, "vm: "+tt.want) {
					t.Errorf("status %d: %s\nwant status 125, and %q", got.Status, got.Errors, tt.want)
				}
			})
		})
	}
}
