package compare

import (
	"errors"
	"fmt"
	"net/netip"

	"kproxy.dev/kproxy/conntrack"
	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/lab/compare/load"
	"kproxy.dev/kproxy/service"
)

// carrier is the plane that a flow went through, by what the kernel did with
// it: a flow that nobody rewrote was routed; one rewritten to an endpoint went
// to it by a rule's DNAT or by IPVS, which leaves no mark of NAT; one rewritten
// to anything else, the node, ended at kproxy's listener.
func carrier(f *conntrack.Flow) Plane {
	switch {
	case !f.Rewritten():
		return Direct
	case !lab.PodCIDR4.Contains(f.ReplySrc.Addr()):
		return Userspace
	case f.DestinationNAT():
		return IPTables
	}
	return IPVS
}

// tuple is what the kernel's table knows a connection by.
type tuple struct {
	protocol    service.Protocol
	client, dst netip.AddrPort
}

// checkCarried makes sure that every witness of a load was carried by p. The
// kernel keeps TCP connections that have ended for two minutes, and UDP ones
// for half of one.
func checkCarried(p Plane, l *load.Load, witnesses []load.Witness, flows []conntrack.Flow) error {
	if len(witnesses) == 0 {
		return errors.New("no connection is known that could tell what carried the load")
	}
	protocol := service.TCP
	if l.Kind == load.Datagrams || l.Kind == load.Sessions {
		protocol = service.UDP
	}
	known := map[tuple]*conntrack.Flow{}
	for i := range flows {
		f := &flows[i]
		known[tuple{f.Protocol, f.OrigSrc, f.OrigDst}] = f
	}
	for _, w := range witnesses {
		f, ok := known[tuple{protocol, w.Client, w.Target}]
		switch {
		case !ok && p == Direct:
			// Without a rule that needs it, connections aren't tracked.
		case !ok:
			return fmt.Errorf("the connection from %s to %s should have gone through %s, and the kernel's table knows nothing of it", w.Client, w.Target, p)
		case carrier(f) != p:
			return fmt.Errorf("the connection %s should have gone through %s, and went through %s", f, p, carrier(f))
		}
	}
	return nil
}
