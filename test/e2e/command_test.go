package e2e

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"kproxy.dev/kproxy/lab"
)

// ended is how a command ended.
type ended struct {
	command        string
	stdout, stderr string
	status         int
}

// finish runs a command to its end, but not for ever: `kproxy run` that should
// have failed would run on.
func finish(t *testing.T, ns *lab.Namespace, cmd *exec.Cmd) ended {
	t.Helper()
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	run := cmd.Run
	if ns != nil {
		run = func() error { return ns.Do(cmd.Run) }
	}
	err := run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatalf("%s: %v", cmd, err)
	}
	return ended{strings.Join(cmd.Args, " "), stdout.String(), stderr.String(), cmd.ProcessState.ExitCode()}
}

// command is the binary under test with arguments.
func command(t *testing.T, args ...string) *exec.Cmd {
	ctx, cancel := context.WithTimeout(context.Background(), within(20*time.Second))
	t.Cleanup(cancel)
	return exec.CommandContext(ctx, binary, args...)
}

// kproxy runs a command of the binary under test on the node, with the control
// socket of the kproxy that runs there.
func (w *world) kproxy(name string, args ...string) ended {
	w.Helper()
	switch name {
	case "status", "connections", "pin":
		args = append([]string{"--socket", w.socket()}, args...)
	}
	return finish(w.T, w.net.Node, command(w.T, append([]string{name}, args...)...))
}

// socket is the control socket that start gives to kproxy.
func (w *world) socket() string { return filepath.Join(w.dir, "kproxy.sock") }

// ok checks that a command succeeded and returns what it printed.
func (w *world) ok(e ended) string {
	w.Helper()
	e.wants(w.T, 0)
	return e.stdout
}

// wants checks the exit status, and that what was printed holds every phrase.
func (e ended) wants(t *testing.T, status int, phrases ...string) {
	t.Helper()
	if e.status != status {
		t.Errorf("%s: exit status %d, want %d\nstdout: %s\nstderr: %s", e.command, e.status, status, e.stdout, e.stderr)
		return
	}
	for _, p := range phrases {
		if !strings.Contains(e.stdout+e.stderr, p) {
			t.Errorf("%s: doesn't say %q\nstdout: %s\nstderr: %s", e.command, p, e.stdout, e.stderr)
		}
	}
}

// nobody is a user without any capability.
const nobody = 65534

// asNobody makes cmd run as an unprivileged user, from a copy of the program
// that such a user can reach.
func asNobody(t *testing.T, cmd *exec.Cmd) *exec.Cmd {
	t.Helper()
	if os.Geteuid() != 0 {
		return cmd // unprivileged already
	}
	cmd.Path = filepath.Join(publicDir(t), "kproxy")
	copyFile(t, cmd.Path, binary, 0o755)
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	return cmd
}

// publicDir is a temporary directory that everybody may read and enter, which
// t.TempDir is not.
func publicDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "kproxy-e2e-")
	if err == nil {
		t.Cleanup(func() { os.RemoveAll(dir) })
		err = os.Chmod(dir, 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

func copyFile(t *testing.T, to, from string, mode os.FileMode) {
	t.Helper()
	in, err := os.Open(from)
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, mode)
	if err == nil {
		_, err = io.Copy(out, in)
		err = errors.Join(err, out.Close())
	}
	if err != nil {
		t.Fatal(err)
	}
}

// get asks a web server in the node's network namespace.
func (w *world) get(url string) (status int, body string) {
	w.Helper()
	resp, err := w.net.Node.HTTPClient(within(10 * time.Second)).Get(url)
	w.must(err)
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	w.must(err)
	return resp.StatusCode, string(b)
}

// sortedLines joins lines in order.
func sortedLines(lines []string) string {
	slices.Sort(lines)
	return strings.Join(lines, "\n") + "\n"
}
