package kernel

import (
	"bytes"
	"context"
	"errors"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"kproxy.dev/kproxy/service"
)

// Runner runs programs. It is the seam between kproxy and iptables: tests put
// a model of the host behind it, or faults in front of it.
type Runner interface {
	// Run gives stdin to the program and returns what it printed. An error
	// of the program is an [*ExecError].
	Run(ctx context.Context, stdin []byte, program string, args ...string) ([]byte, error)
}

// Exec runs real programs, in the network namespace of the calling thread. It
// is safe for concurrent use.
type Exec struct{}

// waitDelay is how long a cancelled program has to close its pipes.
const waitDelay = 2 * time.Second

// Run implements [Runner].
func (Exec) Run(ctx context.Context, stdin []byte, program string, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.WaitDelay = waitDelay
	if stdin != nil {
		cmd.Stdin = bytes.NewReader(stdin)
	}
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	if err == nil {
		return stdout.Bytes(), nil
	}
	if ctx.Err() != nil {
		return stdout.Bytes(), ctx.Err()
	}
	e := &ExecError{Program: program, Args: args, Status: -1, Stderr: strings.TrimSpace(stderr.String())}
	var exit *exec.ExitError
	switch {
	case errors.As(err, &exit):
		e.Status = exit.ExitCode()
		Classify(e)
	case errors.Is(err, exec.ErrNotFound):
		e.Kind, e.Stderr = ErrNoProgram, "not in PATH"
	default:
		e.Stderr = err.Error()
	}
	return stdout.Bytes(), e
}

// lockedStatus is RESOURCE_PROBLEM in iptables' include/xtables.h.
const lockedStatus = 4

var linePattern = regexp.MustCompile(`(?i)(?:occurred at line: |\bline )(\d+)`)

// Classify sets e.Kind and e.Line from what the program printed. Only this
// function knows iptables' messages (iptables 1.8: iptables/xshared.c,
// iptables-restore.c, nft.c).
func Classify(e *ExecError) {
	msg := e.Stderr
	if m := linePattern.FindStringSubmatch(msg); m != nil {
		e.Line, _ = strconv.Atoi(m[1])
	}
	has := func(parts ...string) bool {
		return slices.ContainsFunc(parts, func(p string) bool { return strings.Contains(msg, p) })
	}
	switch {
	case has("xtables lock") || e.Status == lockedStatus && has("Resource temporarily unavailable"):
		e.Kind = ErrLocked
	case has("Permission denied", "you must be root", "Operation not permitted"):
		e.Kind = ErrPermission
	case e.Line > 0:
		e.Kind = ErrSyntax
	case has("No chain/target/match by that name", "does a matching rule exist", "does not exist", "doesn't exist", "No such file or directory"):
		e.Kind = ErrNotFound
	case e.Status == 2 || e.Status == 1:
		e.Kind = ErrSyntax
	}
}

// Variant is one of the two implementations of iptables that a host may have.
// Each has its own rules in the kernel; kproxy's belong where the host's are.
type Variant struct {
	Name    string    // "nft" or "legacy"; empty if unknown
	Program [2]string // per service.Family; "-save" and "-restore" are appended
}

// The variants under the names that tell them apart.
func VariantNFT() Variant {
	return Variant{"nft", [2]string{service.IPv4: "iptables-nft", service.IPv6: "ip6tables-nft"}}
}

// VariantLegacy is the variant that predates nftables.
func VariantLegacy() Variant {
	return Variant{"legacy", [2]string{service.IPv4: "iptables-legacy", service.IPv6: "ip6tables-legacy"}}
}

// DefaultVariant is whichever the host calls iptables.
func DefaultVariant() Variant {
	return Variant{"", [2]string{service.IPv4: "iptables", service.IPv6: "ip6tables"}}
}
