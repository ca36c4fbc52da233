package probe

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"syscall"
)

// udp sends an empty datagram, which a server of any protocol can tell from a
// request. The endpoint is down when ICMP says that the port, host or network
// is unreachable. A datagram of any content in return, and silence until the
// time-out, are up: most servers don't answer what they don't understand. So
// a host that is gone without a trace looks up; only TCP-like checks see that.
//
// Linux sends at most one ICMP error a second to a peer by default
// (net.ipv4.icmp_ratelimit), and a lost one looks up, too: Fall in a row are
// seen if the interval is above a second.
func (n Network) udp(ctx context.Context, addr netip.AddrPort) error {
	c, err := n.dialer().DialUDP(ctx, "udp", netip.AddrPort{}, addr)
	if err != nil {
		return err
	}
	defer c.Close()
	defer bindContext(ctx, c)()
	// Write doesn't send an empty datagram, WriteMsgUDP does.
	if _, _, err := c.WriteMsgUDPAddrPort(nil, nil, netip.AddrPort{}); err != nil {
		return err
	}
	var b [1]byte
	_, _, _, _, err = c.ReadMsgUDPAddrPort(b[:], nil)
	switch {
	case errors.Is(ctx.Err(), context.Canceled):
		return context.Canceled
	case errors.Is(err, os.ErrDeadlineExceeded):
		return nil
	case errors.Is(err, syscall.ECONNREFUSED):
		return &failure{"ICMP port unreachable", err}
	}
	return err
}
