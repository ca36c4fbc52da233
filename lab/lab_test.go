package lab

import (
	"context"
	"fmt"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// build brings a lab up for one test and takes it down after.
func build(t *testing.T, c Config) *Network {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: builds network namespaces")
	}
	n := New(c)
	t.Cleanup(func() {
		if err := n.Down(); err != nil {
			t.Errorf("Down: %v", err)
		}
	})
	if err := n.Up(t.Context()); err != nil {
		t.Fatalf("Up: %v", err)
	}
	return n
}

func within(t *testing.T, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

// dualStack configures a lab for a test. Its prefix ends in the process id:
// the tests may run twice at a time on one machine.
func dualStack(prefix string, backends int) Config {
	return Config{Prefix: fmt.Sprintf("%s-%d", prefix, os.Getpid()), Topology: Routed, Backends: backends, Clients: 2, IPv6: true}
}

func exists(path string) bool { return unix.Access(path, unix.F_OK) == nil }
