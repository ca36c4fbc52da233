package steering

import (
	"log/slog"

	"kproxy.dev/kproxy/kernel"
)

// Env is what data planes work with that share steering's rules on one host.
type Env struct {
	Options
	Runner  kernel.Runner
	Sets    kernel.SetStore
	Variant kernel.Variant // of iptables
	Routing Routing
	Log     *slog.Logger
	// ReadOnly is for reading what is in the kernel; nothing is changed and nothing watched.
	ReadOnly bool
}

// EnvOf is the Env of a host as it was found, with default options else.
func EnvOf(h *kernel.Host, sets kernel.SetStore) Env {
	e := Env{Options: DefaultOptions(), Runner: kernel.Exec{}, Sets: sets, Variant: h.Variant, Routing: DefaultRouting()}
	e.RandomFully, e.SocketMatch, e.CatchRefusals = h.RandomFully, h.SocketMatch, h.CatchRefusals
	e.SkipIPv6, e.DropInvalid = !h.IPv6, !kernel.LiberalConntrack()
	return e
}
