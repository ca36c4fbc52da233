package web

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestAskToTakeOver: who asks gets a connection of its own, another user none, and from a kproxy that can't be taken over an
// error that says so.
func TestAskToTakeOver(t *testing.T) {
	dir, err := os.MkdirTemp("", "kproxy") // t.TempDir's isn't others' to enter
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	talks := make(chan error, 1)
	serve := func(name string, handOver func(*net.UnixConn)) string {
		path := filepath.Join(dir, name)
		ln, err := ListenControl(t.Context(), path)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() {
			done <- Serve(ctx, ln, Control(APIConfig{Source: shop(), Recorder: NewRecorder(DefaultRecorderConfig(shop()))}, handOver), slog.New(slog.DiscardHandler))
		}()
		t.Cleanup(func() {
			cancel()
			if err := <-done; err != nil {
				t.Error(err)
			}
		})
		return path
	}
	path := serve("new.sock", func(c *net.UnixConn) {
		defer c.Close()
		buf := make([]byte, 10)
		n, err := c.Read(buf)
		if err == nil && string(buf[:n]) != "hello" {
			err = errors.New(string(buf[:n]))
		}
		talks <- err
	})
	c, err := AskToTakeOver(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Write([]byte("hello")); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-talks:
		if err != nil {
			t.Errorf("it received %v", err)
		}
	case <-time.After(10 * time.Second):
		t.Error("the connection has no owner")
	}
	if _, err := AskToTakeOver(t.Context(), serve("old.sock", nil)); err == nil || !strings.Contains(err.Error(), "release that can't be taken over") {
		t.Errorf("a kproxy without the way to take over: %v", err)
	}
	if _, err := AskToTakeOver(t.Context(), filepath.Join(dir, "none")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("without a socket: %v", err)
	}
	if os.Geteuid() != 0 {
		t.Skip("needs root to be another user")
	}
	if err := os.Chmod(path, 0o666); err != nil {
		t.Fatal(err)
	}
	curl := exec.Command("curl", "-sS", "--max-time", "10", "--unix-socket", path, "-X", "POST", "-H", "Connection: Upgrade", "-H", "Upgrade: "+takeoverProtocol, "http://kproxy"+takeoverPath)
	curl.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	if out, err := curl.CombinedOutput(); err != nil || string(out) != "user 65534 may not take over from user 0" {
		t.Errorf("another user gets %q (%v)", out, err)
	}
	if len(talks) > 0 {
		t.Error("another user has taken over")
	}
}
