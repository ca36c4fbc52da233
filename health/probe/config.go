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
	// Prober runs the probes.
	Prober Prober
	// Logger gets probes that could not be made because this host ran out of
	// something.
	Logger *slog.Logger
}

// minWorkers leaves one slot to targets that answer.
const minWorkers = 4
