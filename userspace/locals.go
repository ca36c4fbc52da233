package userspace

import (
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// localsMaxAge is how long the node's addresses are believed.
const localsMaxAge = 5 * time.Second

// locals knows this node's own addresses. Readers never wait: an old set is
// used until a goroutine has read the new one.
type locals struct {
	list    func() ([]netip.Addr, error)
	ask     func(netip.Addr) bool // about one address, at once
	current atomic.Pointer[localSet]
	mu      sync.Mutex // held while reading the addresses

	refreshing atomic.Bool // by a goroutine: one is enough
}

type localSet struct {
	addrs map[netip.Addr]struct{}
	read  time.Time
}

// contains reports whether a is one of this node's own addresses.
func (l *locals) contains(a netip.Addr) bool {
	if a.IsLoopback() {
		return true
	}
	s := l.current.Load()
	if s == nil {
		s = l.refresh()
	} else if time.Since(s.read) > localsMaxAge && l.refreshing.CompareAndSwap(false, true) {
		go func() {
			defer l.refreshing.Store(false)
			l.refresh()
		}()
	}
	_, ok := s.addrs[a]
	return ok
}

// mustContain is contains for an address that is very likely local: it may be
// seconds old at most, so the kernel is asked before it says no. To list all
// addresses would take long where there are many, and the callers serve traffic.
func (l *locals) mustContain(a netip.Addr) bool { return l.contains(a) || l.ask(a) }

// refresh reads the addresses unless another goroutine has just done so. When they can't be
// read, the last ones stay.
func (l *locals) refresh() *localSet {
	l.mu.Lock()
	defer l.mu.Unlock()
	old := l.current.Load()
	if old != nil && time.Since(old.read) <= localsMaxAge {
		return old
	}
	s := &localSet{read: time.Now()}
	addrs, err := l.list()
	if err != nil && old != nil {
		s.addrs = old.addrs
	} else {
		s.addrs = make(map[netip.Addr]struct{}, len(addrs))
		for _, a := range addrs {
			s.addrs[a.Unmap().WithZone("")] = struct{}{}
		}
	}
	l.current.Store(s)
	return s
}

// interfaceAddresses lists the addresses of every interface.
func interfaceAddresses() ([]netip.Addr, error) {
	nets, err := net.InterfaceAddrs()
	if err != nil {
		return nil, err
	}
	addrs := make([]netip.Addr, 0, len(nets))
	for _, n := range nets {
		if ip, ok := n.(*net.IPNet); ok {
			if a, ok := netip.AddrFromSlice(ip.IP); ok {
				addrs = append(addrs, a.Unmap())
			}
		}
	}
	return addrs, nil
}

// isLocal reports whether packets to an address are delivered on this node: then
// the kernel gives a socket that is connected to it that address itself
// (ip_route_output_key_hash_rcu; rule 1 of RFC 6724, section 5). Nothing is sent.
func isLocal(a netip.Addr) bool {
	to := newRawAddress(netip.AddrPortFrom(a, 9))
	fd, err := unix.Socket(int(to.family), unix.SOCK_DGRAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return false
	}
	defer unix.Close(fd)
	var local rawAddress
	return sysConnect(fd, &to) == 0 && sysLocal(fd, &local) == 0 && local.addrPort().Addr() == a
}
