package iptables

import (
	"bytes"
	"context"
	"strconv"
	"time"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/service"
)

// Config is what a Backend works with.
type Config struct {
	Runner kernel.Runner
	Sets   kernel.SetStore
	// Variant says which programs to use; see [kernel.Probe].
	Variant kernel.Variant
	// LockWait is how long a program waits for the xtables lock before it gives
	// up with [kernel.ErrLocked]. Whole seconds.
	LockWait time.Duration
	// SkipIPv6 leaves IPv6 alone, for hosts without ip6tables.
	SkipIPv6 bool
}

// DefaultConfig returns a Config for this host's own programs. The set store is
// the caller's to open and close.
func DefaultConfig() Config {
	return Config{Runner: kernel.Exec{}, Variant: kernel.DefaultVariant(), LockWait: 5 * time.Second}
}

// Backend is the [kernel.Backend] of iptables. Programs run in the network
// namespace of the calling thread. It may be used by one goroutine at a time.
type Backend struct {
	config  Config
	watch   *Watch // is told what the backend changes; may be nil
	written int    // rules of a family that are known to be in the kernel, about
}

var _ kernel.Backend = (*Backend)(nil)

// New returns a Backend. It touches nothing.
func New(c Config) *Backend { return &Backend{config: c} }

func (b *Backend) families() []service.Family {
	if b.config.SkipIPv6 {
		return []service.Family{service.IPv4}
	}
	return service.Families[:]
}

// restore feeds text to iptables-restore, which leaves alone what text doesn't
// mention. What text has up to a COMMIT takes effect as a whole or not at all.
func (b *Backend) restore(ctx context.Context, f service.Family, text []byte) error {
	_, err := b.config.Runner.Run(ctx, text, b.config.Variant.Program[f]+"-restore", "--noflush", "-w", b.lockWait())
	if b.watch != nil {
		b.watch.committed(bytes.Count(text, []byte(commit)), err == nil)
	}
	return err
}

// run runs iptables on one table.
func (b *Backend) run(ctx context.Context, f service.Family, table string, args ...string) ([]byte, error) {
	return b.config.Runner.Run(ctx, nil, b.config.Variant.Program[f], append([]string{"-w", b.lockWait(), "-t", table}, args...)...)
}

// commit ends a table's part.
const commit = "\nCOMMIT\n"

func (b *Backend) lockWait() string { return strconv.Itoa(int(b.config.LockWait / time.Second)) }
