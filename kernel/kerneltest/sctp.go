package kerneltest

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"kproxy.dev/kproxy/service"
)

// SCTP has no place in package net: these are system calls.

// HasSCTP says why the kernel can't open sockets of SCTP; nil if it can.
func HasSCTP() error {
	fd, err := openSCTP(service.IPv4)
	if err != nil {
		return err
	}
	return unix.Close(fd)
}

func openSCTP(f service.Family) (int, error) {
	domain := unix.AF_INET
	if f == service.IPv6 {
		domain = unix.AF_INET6
	}
	fd, err := unix.Socket(domain, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, unix.IPPROTO_SCTP)
	if err != nil {
		return 0, fmt.Errorf("open socket of SCTP: %w", err)
	}
	return fd, nil
}

func socketAddress(a netip.AddrPort) unix.Sockaddr {
	if a.Addr().Is4() {
		return &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}
	}
	return &unix.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16()}
}

// ServeSCTP answers on host i until the test ends, as [Network.Serve] does.
func (n *Network) ServeSCTP(i int, name string, port uint16) {
	n.t.Helper()
	n.On(i, func() {
		for _, f := range service.Families {
			n.serveSCTP(name, netip.AddrPortFrom(n.Address(f, i), port))
		}
	})
}

func (n *Network) serveSCTP(name string, at netip.AddrPort) {
	n.t.Helper()
	fd, err := openSCTP(service.FamilyOf(at.Addr()))
	n.must(err)
	n.t.Cleanup(func() {
		_ = unix.Shutdown(fd, unix.SHUT_RDWR) // ends the wait below
		unix.Close(fd)
	})
	n.must(unix.Bind(fd, socketAddress(at)))
	n.must(unix.Listen(fd, 64))
	go func() {
		for {
			c, from, err := unix.Accept(fd)
			if err != nil {
				return
			}
			_, _ = unix.Write(c, []byte(name+" "+addressOf(from)+"\n"))
			unix.Close(c)
		}
	}()
}

func addressOf(a unix.Sockaddr) string {
	switch a := a.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrFrom4(a.Addr).String()
	case *unix.SockaddrInet6:
		return netip.AddrFrom16(a.Addr).String()
	}
	return "nobody"
}

// askSCTP is ask over SCTP.
func askSCTP(to netip.AddrPort) (server, client string, err error) {
	fd, err := openSCTP(service.FamilyOf(to.Addr()))
	if err != nil {
		return "", "", err
	}
	defer unix.Close(fd)
	limit := unix.NsecToTimeval(int64(askTimeout / time.Nanosecond))
	for _, option := range []int{unix.SO_SNDTIMEO, unix.SO_RCVTIMEO} {
		if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, option, &limit); err != nil {
			return "", "", err
		}
	}
	buf := make([]byte, 100)
	read := 0
	if err = unix.Connect(fd, socketAddress(to)); err == nil {
		read, err = unix.Read(fd, buf)
	}
	switch {
	case errors.Is(err, unix.ECONNREFUSED):
		return "", "", ErrRefused
	case errors.Is(err, unix.EAGAIN), errors.Is(err, unix.EINPROGRESS), errors.Is(err, unix.ETIMEDOUT):
		return "", "", ErrTimeout
	case err != nil:
		return "", "", err
	}
	server, client, _ = strings.Cut(strings.TrimSpace(string(buf[:read])), " ")
	return server, client, nil
}
