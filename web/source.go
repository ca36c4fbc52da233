package web

import (
	"context"
	"time"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// Source is the running proxy. Implementations are safe for concurrent use.
type Source interface {
	// Status returns the present state. The caller doesn't modify it.
	Status() plan.Status
	// Connections lists what is alive in every data plane.
	Connections(ctx context.Context) ([]plan.ConnectionStatus, error)
	// Subscribe returns a channel of events from now on, and a function that
	// ends the subscription. A subscriber that doesn't keep up loses events; the
	// source never waits for it. The source closes the channel when it stops.
	Subscribe() (<-chan plan.Event, func())
	Pins
	// Health returns what the health endpoints report.
	Health() HealthReport
}

// Pins are who keeps service ports where somebody wants them.
type Pins interface {
	// Ports returns what Status says of the ports of one service, without the
	// counters; none if there is no such service.
	Ports(namespace, name string) []plan.ServiceStatus
	// Pin keeps a service port in a data plane until PreferAuto.
	Pin(k service.Key, p service.Preference) error
}

// HealthReport is what the health endpoints report. One pass programs both
// address families, so it holds for both.
type HealthReport struct {
	LastUpdated  time.Time // end of the last pass that succeeded; zero if none has
	PendingSince time.Time // since when a change waits for a successful pass; zero if none waits
	NodeEligible bool      // the node isn't about to be deleted (KEP-3836)
	NotReady     string    // why new connections to some service aren't carried; empty while all are
}
