package kernel

import (
	"fmt"
	"net/netip"
	"time"

	"github.com/hashicorp/go-multierror"

	"kproxy.dev/kproxy/service"
)

// defaultHeldTimeout is in seconds; entries bring their own.
const defaultHeldTimeout = 60

// Held is a TCP connection that userspace carries: what its client sends.
type Held struct{ Client, Address netip.AddrPort }

// HoldConnections makes connections come to userspace for d, rounded up to
// seconds, also when conntrack has forgotten them and their service is in the
// kernel by now, where their next packet would begin a connection to an endpoint.
func HoldConnections(store SetStore, d time.Duration, held []Held) error {
	var entries [2][]string
	for _, h := range held {
		f := service.FamilyOf(h.Client.Addr())
		entries[f] = append(entries[f], AddressEntry(service.TCP, h.Client)+","+h.Address.Addr().String())
	}
	var errs *multierror.Error
	for _, f := range service.Families {
		if len(entries[f]) == 0 {
			continue
		}
		if err := store.Add(portalSet(SetHeld, f), wholeSeconds(d), entries[f]...); err != nil {
			errs = multierror.Append(errs, fmt.Errorf("hold %d connections: %w", len(entries[f]), err))
		}
	}
	return errs.ErrorOrNil()
}
