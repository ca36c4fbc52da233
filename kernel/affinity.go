package kernel

import (
	"net/netip"
	"time"
)

// Client is a client that stays with an endpoint for the time that remains.
type Client struct {
	Address   netip.Addr
	Endpoint  netip.AddrPort
	Remaining time.Duration
}
