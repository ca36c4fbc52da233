package userspace

import (
	"net/netip"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/service"
)

// connect begins to connect to an endpoint and returns the socket, whose loop
// learns of the outcome.
func (d *dialers) connect(s source, to netip.AddrPort) (fd int, err error) {
	begin := func(local netip.AddrPort) (err error) {
		fd, err = d.begin(s, local, to)
		return err
	}
	switch {
	case s.transparent:
		err = d.ports.from(s.addr, begin)
	case s.addr.IsValid():
		err = begin(netip.AddrPortFrom(s.addr, 0))
	default:
		err = begin(netip.AddrPort{})
	}
	return fd, err
}

// begin is connect from one local address and port; an invalid address leaves
// both to the kernel.
func (d *dialers) begin(s source, local, to netip.AddrPort) (int, error) {
	domain := unix.AF_INET
	if service.FamilyOf(to.Addr()) == service.IPv6 {
		domain = unix.AF_INET6
	}
	fd, err := sysSocket(domain)
	if err != 0 {
		return -1, err
	}
	if err = d.prepare(fd, domain, s, local); err == 0 {
		remote := newRawAddress(to)
		if err = sysConnect(fd, &remote); err == unix.EINPROGRESS || err == unix.EINTR {
			err = 0
		}
	}
	if err != 0 {
		sysClose(fd)
		return -1, err
	}
	return fd, nil
}

func (d *dialers) prepare(fd, domain int, s source, local netip.AddrPort) unix.Errno {
	if err := sysOption(fd, unix.SOL_SOCKET, unix.SO_MARK, d.mark); err != 0 {
		return err
	}
	if err := sysOption(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1); err != 0 {
		return err
	}
	if err := keepAlive(fd, d.keepAlive); err != 0 {
		return err
	}
	if !local.IsValid() {
		return 0
	}
	if s.transparent {
		level, name := unix.SOL_IP, unix.IP_TRANSPARENT
		if domain == unix.AF_INET6 {
			level, name = unix.SOL_IPV6, unix.IPV6_TRANSPARENT
		}
		if err := sysOption(fd, level, name, 1); err != 0 {
			return err
		}
		// A port is one connection's for a destination, not for all of them.
		if err := sysOption(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err != 0 {
			return err
		}
	}
	if local.Port() == 0 {
		if err := sysOption(fd, unix.SOL_IP, unix.IP_BIND_ADDRESS_NO_PORT, 1); err != 0 {
			return err
		}
	}
	address := newRawAddress(local)
	return sysBind(fd, &address)
}
