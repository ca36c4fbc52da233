package kernel

import (
	"errors"
	"time"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/kernel/netlink"
)

// RouteEvents has what depends on a namespace's links, addresses, routes, routing rules and forwarding read only when the kernel
// tells that one has changed: a node has hundreds of them, and they are asked for every other second. Its zero value is ready; it
// isn't safe for concurrent use.
type RouteEvents struct {
	socket *netlink.Socket
	looked time.Time // without an error; zero if something has changed since
}

// lookAnyway is how long what the kernel hasn't told of may be overlooked.
const lookAnyway = 30 * time.Second

// routeGroups lists the multicast groups that tell of what routing depends on (linux/rtnetlink.h).
var routeGroups = []int{
	unix.RTNLGRP_LINK, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR, unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV6_ROUTE,
	unix.RTNLGRP_IPV4_RULE, unix.RTNLGRP_IPV6_RULE, unix.RTNLGRP_IPV4_NETCONF, unix.RTNLGRP_IPV6_NETCONF,
}

// Look calls look, and returns its error, unless nothing has changed since one succeeded. The first call is for the network
// namespace of its thread.
func (e *RouteEvents) Look(look func() error) error {
	if e.changed() {
		e.Again()
	}
	if !e.looked.IsZero() && time.Since(e.looked) < lookAnyway {
		return nil
	}
	now := time.Now()
	err := look()
	if err == nil {
		e.looked = now
	}
	return err
}

// Again has the next Look look.
func (e *RouteEvents) Again() { e.looked = time.Time{} }

// changed reads all events, and reports whether there are any, or might have been.
func (e *RouteEvents) changed() (is bool) {
	if e.socket == nil {
		s, err := subscribeToRoutes()
		if err != nil {
			return true
		}
		e.socket, is = s, true
	}
	var b [1]byte // the rest of a message is dropped
	for {
		switch _, _, err := unix.Recvfrom(e.socket.FD, b[:], 0); {
		case errors.Is(err, unix.EAGAIN):
			return is
		case err != nil && !errors.Is(err, unix.ENOBUFS) && !errors.Is(err, unix.EINTR):
			e.Close()
			return true
		}
		is = true
	}
}

// Close ends listening; the next Look begins it anew.
func (e *RouteEvents) Close() {
	if e.socket != nil {
		e.socket.Close()
		e.socket = nil
	}
}

func subscribeToRoutes() (*netlink.Socket, error) {
	s, err := netlink.Open(unix.NETLINK_ROUTE, 0)
	if err != nil {
		return nil, err
	}
	for _, group := range routeGroups {
		if err := unix.SetsockoptInt(s.FD, unix.SOL_NETLINK, unix.NETLINK_ADD_MEMBERSHIP, group); err != nil {
			return nil, errors.Join(err, s.Close())
		}
	}
	return s, nil
}
