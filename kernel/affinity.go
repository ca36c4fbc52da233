package kernel

import (
	"context"
	"net/netip"
	"time"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// Client is a client that stays with an endpoint for the time that remains.
type Client struct {
	Address   netip.Addr
	Endpoint  netip.AddrPort
	Remaining time.Duration
}

// AffinityKeeper is a [Plane] that keeps clients with endpoints, and can hand them over when
// services move. Its methods are called by one goroutine, beside those of Plane.
type AffinityKeeper interface {
	// ReadAffinity returns the clients of services that leave the data plane. A client
	// may be there more than once.
	ReadAffinity(from []Moving) (map[service.Key][]Client, error)
	// SeedAffinity makes clients of services that come keep their endpoints. It passes
	// over those of endpoints that take no connections.
	SeedAffinity(ctx context.Context, to []Moving, clients map[service.Key][]Client) error
}

// Moving is a service that moves, as it is in the data plane that it comes to or leaves.
type Moving struct {
	Service *plan.Service
	Policy  *plan.Policy
}
