package main

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/urfave/cli/v2"
	"golang.org/x/sys/unix"
)

// runApp runs `kproxy run` and returns what it prints and says on stderr.
func runApp(args ...string) (stdout, stderr string, err error) {
	var out, errs bytes.Buffer
	app := newApp()
	app.Writer, app.ErrWriter = &out, &errs
	err = app.Run(append([]string{"kproxy", "run"}, args...))
	return out.String(), errs.String(), err
}

// What is written, with the flags that are named beside it, is what was asked for.
func TestWriteConfig(t *testing.T) {
	outsideOfPods(t)
	for _, tt := range []struct{ args, named string }{
		{"--kubeconfig /k", ""},
		{"--kubeconfig /k --mode ipvs -v debug --kube-api-qps 0.1 --nodeport-addresses primary,10.0.0.0/8 --cluster-cidr 10.0.0.0/8,fd00::/48 --conntrack-min 7", ""},
		{"--kubeconfig /k --metrics-bind-address= --node-ip 192.0.2.1,fd00::1 -v error", "--metrics-bind-address --node-ip --v"},
		{"--master https://10.0.0.1 --offload-after 1m --offload-min-connections 3 --exclude-cluster-cidr 10.1.0.0/16", "--exclude-cluster-cidr --master --offload-after --offload-min-connections"},
		{"--manifests /m --oom-score-adj 5 --iptables-sync-period 1s", "--manifests --iptables-sync-period"},
		{"--manifests /m", "--manifests --oom-score-adj"},
		{"--manifests /m --mode ipvs --health-rise 3 --socket /s --listen-tcp-port 1 --oom-score-adj 5", "--health-rise --ipvs-tcp-timeout --listen-tcp-port --manifests --socket"},
	} {
		t.Run(tt.args, func(t *testing.T) {
			name := filepath.Join(t.TempDir(), "config.conf")
			stdout, stderr, err := runApp(append(strings.Fields(tt.args), "--write-config-to", name)...)
			if err != nil || stdout != "" {
				t.Fatalf("it says %q, %v", stdout, err)
			}
			again := []string{"--config", name}
			var named []string
			for line := range strings.Lines(stderr) {
				flag, _, _ := strings.Cut(line, ": ")
				if strings.Contains(flag, "=") {
					again = append(again, flag)
				}
				flag, _, _ = strings.Cut(flag, "=")
				named = append(named, flag)
			}
			if d := cmp.Diff(strings.Fields(tt.named), named, cmpopts.EquateEmpty()); d != "" {
				t.Errorf("named (-want +got):\n%s", d)
			}
			var was, is configured
			for args, at := range map[*[]string]*configured{new(strings.Fields(tt.args)): &was, &again: &is} {
				err := withFlags(t, *args, func(c *cli.Context) {
					if *at, err = configureValid(c); err != nil {
						t.Fatal(err)
					}
				})
				if err != nil {
					t.Fatal(err)
				}
			}
			is.File = ""
			for _, c := range was.Changes(is.Config) {
				// What has several spellings for the same.
				if s := c.String(); !strings.HasPrefix(s, `v from "debug" to "4"`) &&
					!strings.HasPrefix(s, `ipvs.tcpTimeout from "conntrack" to "24h`) && !strings.HasPrefix(s, `detectLocalMode from ""`) &&
					!strings.HasPrefix(s, `oomScoreAdj from ""`) {
					t.Errorf("with the file and %q: %s", again, s)
				}
			}
			if text, err := os.ReadFile(name); err != nil || len(text) == 0 {
				t.Errorf("the file: %v", err)
			}
		})
	}
}

// Without services to serve, the file is what a pod would be given.
func TestWriteConfigForPods(t *testing.T) {
	outsideOfPods(t)
	dir := t.TempDir()
	write := func(name string) string {
		_, _, err := runApp("--mode", "nftables", "--write-config-to", filepath.Join(dir, name))
		text, err2 := os.ReadFile(filepath.Join(dir, name))
		if err := errors.Join(err, err2); err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	outside := write("outside")
	t.Setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
	t.Setenv("KUBERNETES_SERVICE_PORT", "443")
	if d := cmp.Diff(write("inside"), outside); d != "" {
		t.Errorf("(-in a pod +outside):\n%s", d)
	}
}

// kube-proxy has the flag, and a program that probes a command line with it gets an answer.
func TestRunPrintsTheVersion(t *testing.T) {
	stdout, _, err := runApp("--version", "--mode", "nonsense")
	if want := "kproxy " + version + ", commit "; err != nil || !strings.HasPrefix(stdout, want) {
		t.Errorf("it prints %q, %v, want %s…", stdout, err, want)
	}
}

// Every path that isn't there is named, and nothing was looked at before.
func TestRunRefusesManifestsThatAreNotThere(t *testing.T) {
	outsideOfPods(t)
	dir := t.TempDir()
	for _, paths := range [][]string{{dir + "/none"}, {dir, dir + "/none", dir + "/nor-this"}} {
		args := []string{"--socket", dir + "/run/kproxy.sock"}
		for _, p := range paths {
			args = append(args, "--manifests", p)
		}
		_, _, err := runApp(args...)
		if err == nil || statusOf(err) != exitUsage {
			t.Fatalf("with %q it ends with %v", paths, err)
		}
		for _, p := range paths {
			if named := strings.Contains(err.Error(), "--manifests: stat "+p+":"); named != (p != dir) {
				t.Errorf("with %q it says %v", paths, err)
			}
		}
		if _, err := os.Stat(dir + "/run"); err == nil {
			t.Error("it has opened its socket")
		}
	}
}

// TestHangupsDontEndAStart: SIGHUP asks a kproxy to read again, also one that has
// only just begun to read its flags.
func TestHangupsDontEndAStart(t *testing.T) {
	if _, _, err := runApp("--version"); err != nil { // ends before anything else is done
		t.Fatal(err)
	}
	runtime.LockOSThread() // a thread has its signals before the call that sends them returns
	defer runtime.UnlockOSThread()
	if err := unix.Tgkill(os.Getpid(), unix.Gettid(), unix.SIGHUP); err != nil {
		t.Fatal(err)
	}
}

// TestFlagError: what a flag names is the user's to correct, the host's limits aren't.
func TestFlagError(t *testing.T) {
	for err, want := range map[error]int{unix.ENOSPC: exitFailed, unix.EROFS: exitFailed, unix.EMFILE: exitFailed, unix.ENOTDIR: exitUsage, unix.ENAMETOOLONG: exitUsage} {
		if got := statusOf(hostError(flagError("socket", &os.PathError{Op: "open", Path: "/run/kproxy.lock", Err: err}))); got != want {
			t.Errorf("%v: exit status %d, want %d", err, got, want)
		}
	}
}
