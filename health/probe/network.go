package probe

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/health"
	"kproxy.dev/kproxy/service"
)

// Prober makes one probe. It returns nil if the endpoint is up, health.ErrSilent
// if it needn't answer and didn't, and otherwise what is wrong with it, in words
// that don't change from probe to probe. It must return soon after ctx ends.
type Prober interface {
	Probe(ctx context.Context, t health.Target) error
}

// Network probes over the network. The zero value is ready, and it is safe
// for concurrent use.
type Network struct {
	Mark    uint32
	Control func(network, address string, c syscall.RawConn) error
}

// Probe makes the probe that t.Check asks for; t.Check.Port, if there is one,
// takes the place of the endpoint's.
func (n Network) Probe(ctx context.Context, t health.Target) error {
	addr := t.Address
	if t.Check.Port != 0 {
		addr = netip.AddrPortFrom(addr.Addr(), t.Check.Port)
	}
	var err error
	switch t.Check.Kind {
	case service.CheckTCP:
		err = n.tcp(ctx, addr)
	case service.CheckHTTP:
		err = n.http(ctx, addr, t.Check.Path)
	case service.CheckUDP:
		err = n.udp(ctx, addr)
	case service.CheckGRPC:
		err = n.grpc(ctx, addr, t.Check.Path)
	default:
		return &localError{fmt.Errorf("health check %q is not one of tcp, http, udp, grpc", t.Check.Kind)}
	}
	return clean(describe(err, t.Check.Timeout))
}

// supported reports whether there is a probe of this kind.
func supported(k service.Check) bool {
	switch k {
	case service.CheckTCP, service.CheckHTTP, service.CheckUDP, service.CheckGRPC:
		return true
	}
	return false
}

// tcp is up when a connection is accepted, whatever happens to it then. That
// includes one that is reset before this host has looked at it: a refused
// handshake would be ECONNREFUSED.
func (n Network) tcp(ctx context.Context, addr netip.AddrPort) error {
	c, err := n.dialTCP(ctx, addr)
	if errors.Is(err, syscall.ECONNRESET) {
		return nil
	}
	if err != nil {
		return err
	}
	return c.Close()
}

// dialTCP connects, with SO_LINGER 0: closing the connection sends a RST. A
// FIN would leave a port in TIME_WAIT for a minute, 30 for every endpoint
// that is probed every 2s.
func (n Network) dialTCP(ctx context.Context, addr netip.AddrPort) (*net.TCPConn, error) {
	d := n.dialer()
	c, err := d.DialTCP(ctx, "tcp", netip.AddrPort{}, addr)
	if err != nil {
		return nil, err
	}
	if err := c.SetLinger(0); err != nil {
		c.Close()
		return nil, &localError{err}
	}
	return c, nil
}

func (n Network) dialer() *net.Dialer {
	return &net.Dialer{KeepAlive: -1, Control: n.control}
}

func (n Network) control(network, address string, c syscall.RawConn) error {
	if n.Mark != 0 {
		var set error
		if err := c.Control(func(fd uintptr) {
			set = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MARK, int(n.Mark))
		}); err != nil {
			return &localError{err}
		}
		if set != nil {
			return &localError{fmt.Errorf("set mark %#x on a probe's socket: %w", n.Mark, set)}
		}
	}
	if n.Control == nil {
		return nil
	}
	if err := n.Control(network, address, c); err != nil {
		return &localError{err}
	}
	return nil
}

// bindContext makes reads and writes on c end with ctx; call stop afterwards.
func bindContext(ctx context.Context, c net.Conn) (stop func() bool) {
	if t, ok := ctx.Deadline(); ok {
		c.SetDeadline(t) // fails only on a closed connection, whose reads fail too
	}
	return context.AfterFunc(ctx, func() { c.SetDeadline(time.Unix(1, 0)) })
}
