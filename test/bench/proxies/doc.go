// Package proxies has the benchmark's own programs between client and server:
// the simplest proxy that Go has, as the baseline ([Copy]), and kproxy's
// userspace data plane without anything around it ([Engine]), so that engine can
// be compared with engine. Each serves ports of one address and passes what
// comes to the same port of another, until its context ends.
package proxies

import "net/netip"

// Config says what to serve.
type Config struct {
	Listen netip.Addr `json:"listen"`
	To     netip.Addr `json:"to"`
	TCP    []uint16   `json:"tcp,omitempty"`
	UDP    []uint16   `json:"udp,omitempty"`
}
