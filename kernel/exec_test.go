package kernel_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"kproxy.dev/kproxy/kernel"
)

func TestClassify(t *testing.T) {
	tests := []struct {
		status int
		stderr string
		kind   error
		line   int
	}{
		{4, "Another app is currently holding the xtables lock. Perhaps you want to use the -w option?", kernel.ErrLocked, 0},
		{4, "iptables: Resource temporarily unavailable.", kernel.ErrLocked, 0},
		{4, "iptables v1.8.9 (nf_tables): Could not fetch rule set generation id: Permission denied (you must be root)", kernel.ErrPermission, 0},
		{3, "iptables v1.8.9 (legacy): can't initialize iptables table `nat': Permission denied (you must be root)", kernel.ErrPermission, 0},
		{2, "iptables-restore v1.8.9 (legacy): Set KPROXY-X doesn't exist.\n\nError occurred at line: 12\nTry `iptables-restore -h'", kernel.ErrSyntax, 12},
		{1, "iptables-restore: line 30 failed", kernel.ErrSyntax, 30},
		{4, "iptables-nft-restore v1.8.9 (nf_tables): \nline 5: RULE_APPEND failed (No such file or directory): rule in chain KPROXY-X", kernel.ErrSyntax, 5},
		{1, "iptables: No chain/target/match by that name.", kernel.ErrNotFound, 0},
		{1, "iptables: Bad rule (does a matching rule exist in that chain?).", kernel.ErrNotFound, 0},
		{2, "iptables v1.8.9 (legacy): unknown option \"--foo\"", kernel.ErrSyntax, 0},
		{139, "", nil, 0},
	}
	for _, tt := range tests {
		e := &kernel.ExecError{Program: "iptables-restore", Status: tt.status, Stderr: tt.stderr}
		kernel.Classify(e)
		if e.Kind != tt.kind || e.Line != tt.line {
			t.Errorf("%q: %v at line %d, want %v at line %d", tt.stderr, e.Kind, e.Line, tt.kind, tt.line)
		}
	}
}

func TestExec(t *testing.T) {
	ctx := context.Background()
	out, err := kernel.Exec{}.Run(ctx, []byte("in"), "sh", "-c", "cat; echo unused >&2")
	if err != nil || string(out) != "in" {
		t.Errorf("Run = %q, %v", out, err)
	}
	_, err = kernel.Exec{}.Run(ctx, nil, "sh", "-c", "echo 'Error occurred at line: 3' >&2; exit 2")
	var e *kernel.ExecError
	if !errors.As(err, &e) || e.Status != 2 || e.Line != 3 || !errors.Is(err, kernel.ErrSyntax) || !strings.Contains(err.Error(), "line 3") {
		t.Errorf("failing program: %v", err)
	}
	if _, err := (kernel.Exec{}).Run(ctx, nil, "kproxy-no-such-program"); !errors.Is(err, kernel.ErrNoProgram) {
		t.Errorf("missing program: %v, want ErrNoProgram", err)
	}
	cancelled, cancel := context.WithCancel(ctx)
	time.AfterFunc(20*time.Millisecond, cancel)
	if _, err := (kernel.Exec{}).Run(cancelled, nil, "sleep", "30"); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled program: %v", err)
	}
}
