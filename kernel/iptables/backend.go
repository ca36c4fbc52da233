package iptables

import (
	"bytes"
	"context"
	"strconv"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/service"
)

// Backend is the [kernel.Backend] of iptables. Programs run in the network
// namespace of the calling thread. It may be used by one goroutine at a time.
type Backend struct {
	env     *steering.Env
	watch   *Watch                  // is told what the backend changes; may be nil
	written int                     // rules of a family that are known to be in the kernel, about
	rules   [2]steering.SingleRules // by service.Family; nil before they are asked for
}

var _ kernel.Backend = (*Backend)(nil)

// New returns a Backend that works with e. It touches nothing.
func New(e *steering.Env) *Backend { return &Backend{env: e} }

// restore feeds text to iptables-restore, which leaves alone what text doesn't
// mention. What text has up to a COMMIT takes effect as a whole or not at all.
func (b *Backend) restore(ctx context.Context, f service.Family, text []byte) error {
	_, err := b.env.Runner.Run(ctx, text, b.env.Variant.Program[f]+"-restore", "--noflush", "-w", strconv.Itoa(steering.LockWait))
	if b.watch != nil {
		b.watch.committed(bytes.Count(text, []byte(commit)), err == nil)
	}
	return err
}

// single opens a family's rules, for single ones.
func (b *Backend) single(f service.Family) (steering.SingleRules, error) {
	var err error
	if b.rules[f] == nil {
		b.rules[f], err = b.env.Rules(b.env.Variant, f)
	}
	return b.rules[f], err
}

// commit ends a table's part.
const commit = "\nCOMMIT\n"
