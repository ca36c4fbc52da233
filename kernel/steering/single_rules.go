package steering

import (
	"errors"
	"os/exec"
	"strings"

	"github.com/coreos/go-iptables/iptables"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/service"
)

// SingleRules changes single rules of chains that kproxy shares with others, and reads counters: what
// coreos/go-iptables is made for. Whole chains are iptables-restore's, many tables at once.
type SingleRules interface {
	InsertUnique(table, chain string, position int, rule ...string) error
	AppendUnique(table, chain string, rule ...string) error
	DeleteIfExists(table, chain string, rule ...string) error
	List(table, chain string) ([]string, error) // as iptables -S prints them
	// ListWithCounters returns what iptables -v -S prints; StructuredStats of the library refuses negated addresses.
	ListWithCounters(table, chain string) ([]string, error)
}

// OpenSingleRules opens the rules of a variant and family. Programs run in the network namespace of the
// calling thread, and wait for the xtables lock for LockWait.
func OpenSingleRules(v kernel.Variant, f service.Family) (SingleRules, error) {
	r, err := iptables.New(iptables.IPFamily(iptables.Protocol(f)), iptables.Path(v.Program[f]), iptables.Timeout(LockWait))
	if errors.Is(err, exec.ErrNotFound) {
		err = &kernel.ExecError{Program: v.Program[f], Status: -1, Stderr: "not in PATH", Kind: kernel.ErrNoProgram}
	}
	return r, err
}

// LockWait is for how many seconds a program waits for the xtables lock before it gives
// up with [kernel.ErrLocked].
const LockWait = 5

// Classified returns an error of [SingleRules] as [kernel.Exec] returns a program's.
func Classified(err error) error {
	var e *iptables.Error
	if !errors.As(err, &e) {
		return err
	}
	out := &kernel.ExecError{Program: "iptables", Status: e.ExitStatus(), Stderr: strings.TrimSpace(e.Error())}
	kernel.Classify(out)
	return out
}
