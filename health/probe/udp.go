package probe

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"syscall"

	"kproxy.dev/kproxy/health"
)

// udp sends an empty datagram, which a server of any protocol can tell from a
// request. The endpoint is down when ICMP says that the port, host or network
// is unreachable, and up when a datagram of any content comes in return.
// Silence until the time-out is health.ErrSilent: see the package comment.
//
// Each probe has a socket, and so a source port, of its own: what a firewall
// or a server remembers of one flow doesn't decide about all probes.
func (n Network) udp(ctx context.Context, addr netip.AddrPort) error {
	c, err := n.dialer().DialUDP(ctx, "udp", netip.AddrPort{}, addr)
	if err != nil {
		return late(err)
	}
	defer c.Close()
	defer bindContext(ctx, c)()
	// Write doesn't send an empty datagram, WriteMsgUDP does.
	if _, _, err := c.WriteMsgUDPAddrPort(nil, nil, netip.AddrPort{}); err != nil {
		return late(err)
	}
	var b [1]byte
	_, _, _, _, err = c.ReadMsgUDPAddrPort(b[:], nil)
	switch {
	case errors.Is(ctx.Err(), context.Canceled):
		return context.Canceled
	case errors.Is(err, os.ErrDeadlineExceeded):
		return health.ErrSilent
	case errors.Is(err, syscall.ECONNREFUSED):
		return &failure{"ICMP port unreachable", err}
	}
	return err
}

// late returns err, of what happens before a datagram is sent, so that a time-out says
// nothing about the endpoint: this host had no time for the probe, and silence would have been fine.
func late(err error) error {
	if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, os.ErrDeadlineExceeded) {
		return &localError{fmt.Errorf("send a datagram in time: %w", err)}
	}
	return err
}
