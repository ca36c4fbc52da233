package lab

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// SCTP has no place in package net. A socket of one association is made by system
// calls; from there on it is used as one of TCP.

// HasSCTP says why the kernel can't open sockets of SCTP; nil if it can.
func HasSCTP() error {
	f, err := openSCTP(netip.IPv4Unspecified())
	if err != nil {
		return err
	}
	return f.Close()
}

func openSCTP(of netip.Addr) (*os.File, error) {
	domain := unix.AF_INET
	if of.Is6() {
		domain = unix.AF_INET6
	}
	fd, err := unix.Socket(domain, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, unix.IPPROTO_SCTP)
	if err != nil {
		return nil, fmt.Errorf("open socket of SCTP: %w", err)
	}
	return os.NewFile(uintptr(fd), "SCTP"), nil
}

func socketAddress(a netip.AddrPort) unix.Sockaddr {
	if a.Addr().Is4() {
		return &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}
	}
	return &unix.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16()}
}

// listenSCTP listens at one address: a host tells its peer of all that it listens at,
// and NAT doesn't rewrite those.
func listenSCTP(address string) (net.Listener, error) {
	at, err := netip.ParseAddrPort(address)
	if err != nil {
		return nil, err
	}
	f, err := openSCTP(at.Addr())
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if err := errors.Join(unix.Bind(int(f.Fd()), socketAddress(at)), unix.Listen(int(f.Fd()), 64)); err != nil {
		return nil, fmt.Errorf("listen for SCTP at %s: %w", at, err)
	}
	return net.FileListener(f)
}

// dialSCTP connects, and waits for it until the deadline of ctx. It does so from one address, for the same reason; and all that a
// node has in mode ipvs don't fit into a packet (docs/limits.md).
func dialSCTP(ctx context.Context, address string) (net.Conn, error) {
	to, err := netip.ParseAddrPort(address)
	if err != nil {
		return nil, err
	}
	f, err := openSCTP(to.Addr())
	if err != nil {
		return nil, err
	}
	defer f.Close()
	from, err := sourceTo(ctx, to)
	if err != nil {
		return nil, err
	}
	bind := func(port int) error {
		return unix.Bind(int(f.Fd()), socketAddress(netip.AddrPortFrom(from, uint16(port))))
	}
	if err := eachOwnPort(bind); err != nil {
		return nil, fmt.Errorf("bind to %s by SCTP: %w", from, err)
	}
	fd := int(f.Fd())
	if err := unix.SetNonblock(fd, true); err != nil {
		return nil, err
	}
	err = unix.Connect(fd, socketAddress(to))
	if errors.Is(err, unix.EINPROGRESS) {
		err = untilConnected(ctx, fd)
	}
	if err != nil {
		return nil, fmt.Errorf("connect to %s by SCTP: %w", to, err)
	}
	return net.FileConn(f)
}

// untilConnected waits for the end of a connect, and returns its error or, when ctx's deadline comes first, os.ErrDeadlineExceeded.
// A connect that blocks would end by any signal.
func untilConnected(ctx context.Context, fd int) error {
	for {
		wait := -1 // for ever
		if deadline, ok := ctx.Deadline(); ok {
			wait = int(max(time.Until(deadline).Milliseconds(), 0))
		}
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}, wait)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return err
		case n == 0:
			return os.ErrDeadlineExceeded
		}
		number, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR)
		if err == nil && number != 0 {
			err = unix.Errno(number)
		}
		return err
	}
}

// sourceTo is the address that the kernel chooses for packets to another.
func sourceTo(ctx context.Context, to netip.AddrPort) (netip.Addr, error) {
	var d net.Dialer
	c, err := d.DialContext(ctx, "udp", to.String())
	if err != nil {
		return netip.Addr{}, err
	}
	defer c.Close()
	return c.LocalAddr().(*net.UDPAddr).AddrPort().Addr().Unmap(), nil
}
