package userspace

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"

	"golang.org/x/sys/unix"
)

// ports are the source ports of connections that bear a client's address: ports
// that clients themselves don't use.
//
// The kernel would choose from the range that clients choose from as well. IPVS
// remembers a connection for two minutes after its end (TIME_WAIT in
// ip_vs_proto_tcp.c) by client, port and endpoint; an endpoint's answer to a
// socket of ours with the same three would be taken for one of that
// connection's, and get the service's address as its source (ip_vs_out). The
// same goes for a connection that the client makes through IPVS from a port that
// one of ours uses.
type ports struct{ low, high uint16 } // both included; the zero value leaves the choice to the kernel

const (
	// lowestPort keeps away from the ports that services listen on most.
	lowestPort = 10240
	// fewestPorts make it worth while.
	fewestPorts = 4096
	// sourceTries is how many ports are tried before the kernel chooses: in use are
	// those of the same client's connections, few of 20,000.
	sourceTries = 16
)

// belowClients are the ports below those that this host's own connections get,
// as those of most clients do: Linux's begin at 32768, others' at 49152.
func belowClients() ports {
	text, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range")
	if err != nil {
		return ports{}
	}
	var low, high uint16
	if _, err := fmt.Sscan(string(text), &low, &high); err != nil || low < lowestPort+fewestPorts {
		return ports{}
	}
	return ports{lowestPort, low - 1}
}

// from calls dial with a with one port after the other until one is free for
// the destination.
func (p ports) from(a netip.Addr, dial func(netip.AddrPort) error) error {
	if p.high > 0 {
		for range sourceTries {
			port := p.low + uint16(rand.UintN(uint(p.high-p.low)+1))
			if err := dial(netip.AddrPortFrom(a, port)); !errors.Is(err, unix.EADDRINUSE) && !errors.Is(err, unix.EADDRNOTAVAIL) {
				return err
			}
		}
	}
	return dial(netip.AddrPortFrom(a, 0))
}
