package userspace

import (
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"
)

// localsMaxAge is how long the node's addresses are believed; localsMinAge how
// often an address that must be local, but isn't known to be, may cause a look.
const (
	localsMaxAge = 5 * time.Second
	localsMinAge = 100 * time.Millisecond
)

// locals knows this node's own addresses. Readers never wait: an old set is
// used until a goroutine has read the new one.
type locals struct {
	list    func() ([]netip.Addr, error)
	current atomic.Pointer[localSet]
	mu      sync.Mutex // held while reading the addresses
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
		s = l.refresh(localsMaxAge)
	} else if time.Since(s.read) > localsMaxAge {
		go l.refresh(localsMaxAge)
	}
	_, ok := s.addrs[a]
	return ok
}

// mustContain is contains for an address that is very likely local: it may be
// seconds old at most, so it looks again before it says no.
func (l *locals) mustContain(a netip.Addr) bool {
	if l.contains(a) {
		return true
	}
	_, ok := l.refresh(localsMinAge).addrs[a]
	return ok
}

// refresh reads the addresses unless somebody did within maxAge. When they
// can't be read, the last ones stay.
func (l *locals) refresh(maxAge time.Duration) *localSet {
	l.mu.Lock()
	defer l.mu.Unlock()
	old := l.current.Load()
	if old != nil && time.Since(old.read) <= maxAge {
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
