package probe

import (
	"log/slog"

	"kproxy.dev/kproxy/health"
)

// Config configures a Scheduler.
type Config struct {
	// Defaults are put into the Views, which need them to find a service's Target.
	Defaults health.Defaults
	// Workers bounds the probes under way, and with them file descriptors and
	// goroutines. See the package comment for what it takes.
	Workers int
	// Rate bounds the probes a second, over all; 0 for no bound. Where Targets ask
	// for more, the namespaces that ask for most are probed less often than they
	// ask for.
	Rate float64
	// Mark is the SO_MARK of the probes' sockets, which keeps probes out of
	// the redirection of clients; 0 sets none. It takes CAP_NET_ADMIN.
	Mark uint32
	// Prober runs the probes; nil for a Network with Mark.
	Prober Prober
	// Logger gets probes that could not be made because this host ran out of
	// something; nil discards.
	Logger *slog.Logger
}

// DefaultConfig returns the standard health checks and room for 1024 probes at
// once.
func DefaultConfig() Config {
	return Config{Defaults: health.StandardDefaults(), Workers: 1024}
}

// minWorkers leaves one slot to targets that answer.
const minWorkers = 4
