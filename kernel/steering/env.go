package steering

import (
	"context"
	"log/slog"
	"strings"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/service"
)

// Env holds what those data planes work with that share steering's rules on one host.
type Env struct {
	Options
	Runner  kernel.Runner
	Rules   func(kernel.Variant, service.Family) (SingleRules, error)
	Sets    kernel.SetStore
	Variant kernel.Variant // of iptables
	Routing Routing
	Log     *slog.Logger
	// ReadOnly is for reading what is in the kernel; nothing is changed and nothing watched.
	ReadOnly bool
}

// DefaultEnv returns that of a host that has everything, with this host's own programs. The set store is
// the caller's to open and close.
func DefaultEnv(sets kernel.SetStore) *Env {
	return &Env{Options: DefaultOptions(), Runner: kernel.Exec{}, Rules: OpenSingleRules, Sets: sets, Variant: kernel.DefaultVariant(), Routing: DefaultRouting()}
}

// countingRunner tells of the failures of iptables-restore.
type countingRunner struct {
	kernel.Runner
	failed func(service.Family)
}

// Run implements [kernel.Runner].
func (r countingRunner) Run(ctx context.Context, stdin []byte, program string, args ...string) ([]byte, error) {
	out, err := r.Runner.Run(ctx, stdin, program, args...)
	if err != nil && ctx.Err() == nil && strings.HasSuffix(program, "-restore") {
		f := service.IPv4
		if strings.HasPrefix(program, "ip6") {
			f = service.IPv6
		}
		r.failed(f)
	}
	return out, err
}
